"""The file source with unusual paths and contents."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.notice.rigs import FileRig
from tfpreempt import errors
from tfpreempt.notice.file import FileSource, first_line


@pytest.fixture
def rig(tmp_path: Path) -> FileRig:
    return FileRig(tmp_path)


@pytest.fixture
def heard() -> list[str]:
    return []


def watch(rig: FileRig, heard: list[str]) -> None:
    source = rig.make()
    source.start(heard.append)
    rig.settle()
    source.close()


def test_a_stale_file_is_a_notice(rig: FileRig, heard: list[str]) -> None:
    rig.give()
    watch(rig, heard)
    assert heard == ["the machine goes"]


@pytest.mark.parametrize(
    ("content", "detail"),
    [
        (b"", ""),
        (b"\n", ""),
        (b"  spot reclaim \r\nmore\n", "spot reclaim"),
        (b"x" * 5000, "x" * 1024),
        ("déjà\n".encode(), "déjà"),
        (b"a\x00b\x1bc", "a?b?c"),
        (b"\xff\xfe", "\ufffd\ufffd"),
    ],
)
def test_first_line(tmp_path: Path, content: bytes, detail: str) -> None:
    path = tmp_path / "notice"
    path.write_bytes(content)
    assert first_line(str(path)) == detail


def test_first_line_of_an_unreadable_file(tmp_path: Path) -> None:
    assert first_line(str(tmp_path / "absent")) == ""
    assert first_line(str(tmp_path)) == ""


def test_a_pipe_is_a_notice_and_does_not_hang(rig: FileRig, heard: list[str]) -> None:
    os.mkfifo(rig.path)
    watch(rig, heard)
    assert heard == [""]


def test_a_directory_is_a_notice(rig: FileRig, heard: list[str]) -> None:
    rig.path.mkdir()
    watch(rig, heard)
    assert heard == [""]


def test_a_file_instead_of_the_directory_is_no_notice(tmp_path: Path) -> None:
    (tmp_path / "preempted").write_text("a file")
    rig = FileRig(tmp_path / "preempted")  # looks for preempted/preempted
    heard: list[str] = []
    watch(rig, heard)
    assert heard == []


def test_the_directory_may_come_later(tmp_path: Path) -> None:
    rig = FileRig(tmp_path / "later")
    heard: list[str] = []
    source = rig.make()
    source.start(heard.append)
    rig.settle()
    rig.path.parent.mkdir()
    rig.give()
    rig.settle()
    source.close()
    assert len(heard) == 1


def test_the_path_is_fixed_when_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert FileSource("stop").name == f"file:{tmp_path}/stop"


@pytest.mark.parametrize("path", ["", None, 3, b"bytes", "nul\0"])
def test_bad_paths_are_refused(path: str) -> None:
    with pytest.raises(errors.ConfigurationError, match="expected the path of a file"):
        FileSource(path)
