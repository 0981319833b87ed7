"""Links below the root, pipes and large files are refused; the root may be a link."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tfpreempt.core import contained

READ, WRITE = os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory that is reached by a link, with a file in a directory."""
    (tmp_path / "real" / "a").mkdir(parents=True)
    (tmp_path / "real" / "a" / "file").write_bytes(b"12345")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_bytes(b"years of work")
    (tmp_path / "root").symlink_to("real")
    return tmp_path / "root"


def test_a_root_may_be_a_link(root: Path) -> None:
    assert contained.read(root / "a" / "file", 5, root=str(root)) == b"12345"
    with contained.directory(str(root / "b" / "c"), str(root), makes=True):
        assert (root / "b" / "c").is_dir()


def above(path: Path, elsewhere: Path) -> None:
    (path / "a").rename(path / "b")
    (path / "a").symlink_to(elsewhere)


def itself(path: Path, elsewhere: Path) -> None:
    (path / "a" / "file").unlink()
    (path / "a" / "file").symlink_to(elsewhere / "file")


def pipe(path: Path, elsewhere: Path) -> None:
    del elsewhere
    (path / "a" / "file").unlink()
    os.mkfifo(path / "a" / "file")


def second_name(path: Path, elsewhere: Path) -> None:
    (path / "a" / "file").unlink()
    (path / "a" / "file").hardlink_to(elsewhere / "file")


@pytest.mark.parametrize(
    ("plant", "flags", "error"),
    [
        (above, READ, contained.LinkError),
        (above, WRITE, contained.LinkError),
        (itself, READ, contained.LinkError),
        (itself, WRITE, contained.LinkError),
        (pipe, READ, contained.UnsafeFileError),
        (pipe, WRITE, contained.UnsafeFileError),
        (second_name, WRITE, contained.UnsafeFileError),
    ],
)
def test_links_made_by_another_user_are_refused(
    root: Path,
    plant: Callable[[Path, Path], None],
    flags: int,
    error: type[contained.UnsafeFileError],
) -> None:
    elsewhere = root.parent / "elsewhere"
    plant(root, elsewhere)
    with pytest.raises(error) as raised:
        contained.open_file(root / "a" / "file", flags, root=str(root))
    name = root / "a" if plant is above else root / "a" / "file"
    assert raised.value.filename == str(name)
    assert (elsewhere / "file").read_bytes() == b"years of work"


def test_without_a_root_the_directories_are_the_programs_own(root: Path) -> None:
    above(root, root.parent / "elsewhere")
    assert contained.read(root / "a" / "file", 13) == b"years of work"


def test_a_parent_that_is_kept_open_is_opened_once_and_closed(root: Path) -> None:
    file, other = root / "a" / "file", root.parent / "elsewhere" / "file"
    with contained.parents_kept_open():
        opened = []
        for path in (file, other, file):
            with contained.parent(path, str(root)) as (folder, name):
                opened.append(folder)
                assert name == "file"
        assert opened[0] == opened[2] != opened[1]
        with contained.parents_kept_open():
            pass
        above(root, root.parent / "elsewhere")
        with contained.parent(file, str(root)) as (folder, name):
            os.remove(name, dir_fd=folder)
    for descriptor in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    assert other.read_bytes() == b"years of work"
    assert os.listdir(root / "b") == []


def test_more_parents_than_are_kept_open_are_opened_for_each_file(root: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with contained.parents_kept_open():
        for number in [*range(40), *range(40)]:
            (root / str(number)).mkdir(exist_ok=True)
            (root / str(number) / "file").touch()
            with contained.parent(root / str(number) / "file", str(root)) as (
                folder,
                _,
            ):
                assert os.listdir(f"/proc/self/fd/{folder}") == ["file"]
        assert len(os.listdir("/proc/self/fd")) < len(before) + 20
    assert os.listdir("/proc/self/fd") == before


def test_no_more_is_read_than_such_a_file_has(root: Path) -> None:
    os.truncate(root / "a" / "file", 8 << 40)
    with pytest.raises(OSError, match="More than") as raised:
        contained.read(root / "a" / "file", 5)
    assert raised.value.errno == errno.EFBIG


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (os.O_WRONLY, b"62345"),
        (os.O_RDWR | os.O_CREAT | os.O_APPEND, b"123456"),
        (os.O_WRONLY | os.O_TRUNC, b"6"),
    ],
)
def test_a_file_with_a_second_name_is_replaced_by_a_copy(
    root: Path, flags: int, expected: bytes
) -> None:
    file, second = root / "a" / "file", root / "a" / "second"
    (root / "a" / "file.tfpreempt-copy").write_bytes(b"cut off")
    file.chmod(0o662)  # other bits than a umask would leave
    second.hardlink_to(file)
    descriptor = contained.open_file(file, flags, root=str(root), copies=True)
    os.write(descriptor, b"6")
    os.close(descriptor)
    assert file.read_bytes() == expected
    assert file.stat().st_mode & 0o777 == 0o662
    assert second.read_bytes() == b"12345"
    assert sorted(os.listdir(root / "a")) == ["file", "second"]


def test_a_file_of_the_user_beside_a_copied_file_stays(root: Path) -> None:
    file, users = root / "a" / "file", root / "a" / "file.copy"
    users.write_bytes(b"mine")
    (root / "a" / "second").hardlink_to(file)
    os.close(contained.open_file(file, os.O_WRONLY, root=str(root), copies=True))
    assert file.stat().st_nlink == 1
    assert users.read_bytes() == b"mine"


def test_a_large_file_with_a_second_name_is_refused(root: Path) -> None:
    file = root / "a" / "file"
    (root / "a" / "second").hardlink_to(file)
    os.truncate(file, 1 << 43)
    with pytest.raises(contained.UnsafeFileError):
        contained.open_file(file, os.O_WRONLY, root=str(root), copies=True)


def test_a_file_of_another_user_is_not_copied(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy would be a file of this user, and would be trusted as such a file."""
    file = root / "a" / "file"
    (root / "a" / "second").hardlink_to(file)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(contained.UnsafeFileError):
        contained.open_file(file, os.O_WRONLY, root=str(root), copies=True)


def test_a_file_that_replaces_the_file_to_be_copied_is_not_copied(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of the file was checked, and the file of another user was copied."""
    file, second, close = root / "a" / "file", root / "a" / "second", os.close
    second.hardlink_to(file)

    def replace_before(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and file.samefile(second):
            (root / "a" / "theirs").write_bytes(b"theirs")
            (root / "a" / "theirs").replace(file)
        close(descriptor)

    monkeypatch.setattr(os, "close", replace_before)
    with pytest.raises(contained.UnsafeFileError, match="another process"):
        contained.open_file(file, os.O_WRONLY, root=str(root), copies=True)
    assert sorted(os.listdir(root / "a")) == ["file", "second"]
