"""Directory operations that a commit needs."""

from __future__ import annotations

import errno
import os

import pytest

from tfpreempt.storage import file_reading
from tfpreempt.storage.files import LocalFiles, create, write_durably


@pytest.fixture
def root(tmp_path):
    return str(tmp_path)


def test_what_is_written_can_be_read(root):
    files = LocalFiles(root)
    folder, path = os.path.join(root, "a", "b"), os.path.join(root, "a", "b", "file")
    files.make_dirs(folder)
    files.make_dirs(folder)
    for data in (b"first" * 1000, b"", b"second"):
        files.write(path, [data])
        files.sync_file(path)
        files.sync_dir(folder)
        assert os.stat(path).st_size == len(data)
        with file_reading.open_file(path) as file:
            assert file.read() == data
    with file_reading.open_file(path) as file:
        assert (file.read(3), file.seek(-2, os.SEEK_END), file.read()) == (
            b"sec",
            4,
            b"nd",
        )
        assert file.tell() == 6
    assert file_reading.names(root) == ["a"]
    assert list(file_reading.walk(root)) == [
        (root, ["a"], []),
        (os.path.join(root, "a"), ["b"], []),
        (folder, [], ["file"]),
    ]


def test_what_a_path_is(root):
    files = LocalFiles(root)
    path, gone = os.path.join(root, "file"), os.path.join(root, "gone")
    files.write(path, [b"x"])
    assert file_reading.is_file(path)
    assert file_reading.is_there(path)
    assert file_reading.is_dir(root)
    assert file_reading.is_there(root)
    assert not file_reading.is_dir(path)
    assert not file_reading.is_file(root)
    assert file_reading.is_real_dir(root)
    assert not file_reading.is_real_dir(path)
    assert not file_reading.is_link(path)
    for answer in (
        file_reading.is_file,
        file_reading.is_dir,
        file_reading.is_there,
        file_reading.is_link,
    ):
        assert not answer(gone)
    assert not file_reading.is_real_dir(gone)
    assert list(file_reading.walk(gone)) == []
    assert file_reading.names(gone) == []


def test_what_is_not_there(root):
    with pytest.raises(FileNotFoundError, match="gone"):
        file_reading.open_file(os.path.join(root, "gone"))


def test_a_directory_is_no_file(root):
    with pytest.raises(IsADirectoryError):
        file_reading.open_file(root).read()


def test_deleting(root):
    files = LocalFiles(root)
    folder, path = os.path.join(root, "d"), os.path.join(root, "d", "file")
    files.make_dirs(folder)
    files.write(path, [b"x"])
    with pytest.raises(OSError, match="d") as caught:
        files.remove_dir(folder)
    assert caught.value.errno == errno.ENOTEMPTY
    assert file_reading.is_file(path)
    files.remove(path)
    files.remove(path)
    files.remove_dir(folder)
    files.remove_dir(folder)
    assert file_reading.names(root) == []


def test_small_files_are_whole(root):
    path = os.path.join(root, "small")
    for data in (b"old", b"new"):
        write_durably(LocalFiles(root), path, data)
        with file_reading.open_file(path) as file:
            assert file.read() == data
    assert file_reading.names(root) == ["small"]


def test_a_file_that_is_written_bit_by_bit(root):
    path = os.path.join(root, "new", "bits")
    with create(path) as file:
        file.write(b"ab")
        file.write(b"cd")
    with file_reading.open_file(path) as file:
        assert file.read() == b"abcd"
