"""Memory for snapshots: found, lent, and taken back however the supervisor ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tfpreempt.cli import main
from tfpreempt.cli.doctor.storage_check import Mount
from tfpreempt.cli.run import snapshot_space
from tfpreempt.cli.run.snapshot_space import AUTO, lent
from tfpreempt.core.snapshot_memory import from_environment
from tfpreempt.errors import ConfigurationError

GIB = 1 << 30


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that passes for memory, where 8 GiB are free."""
    monkeypatch.setattr(snapshot_space, "_is_in_memory", lambda place: place.is_dir())
    monkeypatch.setattr(snapshot_space, "_room", lambda place: 8 * GIB)
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


def test_a_quarter_is_shared_by_the_workers(place: Path) -> None:
    with lent(AUTO, 4, [place]) as given:
        assert given is not None
        assert given.bytes == 8 * GIB // 4 // 4
        directory = Path(given.directory)
        assert directory.parent == place
        assert directory.stat().st_mode & 0o777 == 0o700
        assert from_environment(given.to_environment()) == given
        (directory / "files").mkdir()


def test_requested_memory_is_divided_among_the_workers(place: Path) -> None:
    with lent(6 * GIB, 2, [place]) as given:
        assert given is not None
        assert (given.bytes, given.workers) == (3 * GIB, 2)
        assert from_environment(given.to_environment()) == given


def test_off_is_none(place: Path) -> None:
    with lent(0, 1, [place]) as given:
        assert given is None


def test_a_small_machine_has_none_unless_it_is_requested(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_space, "_room", lambda place: 200 << 20)
    with lent(AUTO, 1, [place]) as given:
        assert given is None
    with lent(50 << 20, 1, [place]) as given:
        assert given is not None


def test_more_than_there_is_is_refused(place: Path) -> None:
    with (
        pytest.raises(ConfigurationError, match="8 GiB are available"),
        lent(9 * GIB, 1, [place]),
    ):
        pass
    with (
        pytest.raises(ConfigurationError, match="no /dev/shm"),
        lent(GIB, 1, [place / "gone"]),
    ):
        pass
    with lent(AUTO, 1, [place / "gone"]) as given:
        assert given is None


@pytest.mark.parametrize("name", ["mkdir", "_room", "_locked"])
def test_a_failure_stops_the_start_only_if_memory_was_requested(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    def fail(*args: object) -> None:
        raise PermissionError("not here")

    if name == "_locked":
        monkeypatch.setattr(snapshot_space, name, lambda path: None)
    else:
        monkeypatch.setattr(Path if name == "mkdir" else snapshot_space, name, fail)
    with lent(AUTO, 1, [place]) as given:
        assert given is None
    assert caplog.text.count("no memory for snapshots") == 1
    with (
        pytest.raises(ConfigurationError, match="no memory can be reserved"),
        lent(GIB, 1, [place]),
    ):
        pass


@pytest.mark.slow  # starts a process
def test_memory_of_a_killed_supervisor_is_freed_at_the_next_start(place: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path\n"
        "from tfpreempt.cli.run import snapshot_space as memory\n"
        "memory._is_in_memory = Path.is_dir\n"
        "memory._room = lambda place: 1 << 33\n"
        "with memory.lent(1 << 20, 1, [Path(sys.argv[1])]) as given:\n"
        "    Path(given.directory, 'file').touch()\n"
        "    print(given.directory, flush=True)\n"
        "    sys.stdin.read()\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", program, str(place)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as killed:
        assert killed.stdout is not None
        left = Path(killed.stdout.readline().strip())
        with lent(AUTO, 1, [place]) as given:
            assert given is not None
            assert (left / "file").exists()  # its supervisor lives
        killed.communicate()
    assert (left / "file").exists()
    with lent(AUTO, 1, [place]):
        assert not left.exists()


def test_nothing_of_others_is_removed(place: Path) -> None:
    others = place / "tfpreempt-snapshots-of-mine", place / "somebody"
    for each in others:
        each.mkdir()
    with lent(AUTO, 1, [place]):
        pass
    for each in others:
        each.rmdir()


@pytest.mark.parametrize("kind", ["tmpfs", "ext4", None])
def test_only_tmpfs_is_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str | None
) -> None:
    mount = None if kind is None else Mount(point=tmp_path, kind=kind)
    monkeypatch.setattr(snapshot_space, "mount_of", lambda place: mount)
    assert snapshot_space._is_in_memory(tmp_path) == (kind == "tmpfs")
    assert not snapshot_space._is_in_memory(tmp_path / "gone")


def test_the_option_is_a_word_or_a_size() -> None:
    said = CliRunner().invoke(main, ["run", "--snapshots", "much", "--", "true"])
    assert said.exit_code == 2
    assert "auto|off|SIZE" in said.output or "is not a size" in said.output


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"TFPREEMPT_SNAPSHOT_BYTES": "many"},
        {"TFPREEMPT_SNAPSHOT_BYTES": "9" * 5000},
        {"TFPREEMPT_SNAPSHOT_WORKERS": "0"},
    ],
)
def test_without_a_supervisor_there_is_no_snapshot_memory(
    tmp_path: Path, wrong: dict[str, str]
) -> None:
    right = {
        "TFPREEMPT_SNAPSHOT_DIR": str(tmp_path),
        "TFPREEMPT_SNAPSHOT_BYTES": "5",
    }
    assert from_environment(right) is not None
    assert from_environment({**right, **wrong} if wrong else {}) is None
    os.rmdir(tmp_path)
    assert from_environment(right) is None
