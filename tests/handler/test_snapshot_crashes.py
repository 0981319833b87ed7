"""A process killed at any operation of a snapshot leaves an intact snapshot."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from tests.checkpoint.fakes import OwnContents, Words, cluster, content, open_directory
from tests.fakes.storage import FaultyFiles, SimulatedCrash
from tfpreempt.checkpoint.state.state import StateRegistry
from tfpreempt.core.snapshot_memory import SnapshotMemory
from tfpreempt.handler.snapshots import KEPT, Snapshots, SnapshotTiming, attempt_of

pytestmark = pytest.mark.slow  # searches long

MEMORY = SnapshotMemory(directory="/never", bytes=1 << 40)


def snapshots(
    directory: Path, text: str = "", files: FaultyFiles | None = None
) -> tuple[Snapshots, OwnContents, Words]:
    """Returns the snapshots of worker 1 of 2, with their contents."""
    registry, contents = StateRegistry(), OwnContents()
    word = Words("word", text, per_worker=True, registry=registry)
    opened = open_directory(
        directory, contents, registry=registry, files=files, worker=1
    )
    opened.cluster = dataclasses.replace(cluster(1, 2), saves_all=True)
    return Snapshots(opened, MEMORY), contents, word


def take(made: Snapshots, step: int) -> None:
    made.capture(step, f"start-round-{step}")
    made.go_on(SnapshotTiming(arrived=0.0, left=0.0, steps=0, intervals=0))
    made.wait()


def take_third(directory: Path, files: FaultyFiles) -> None:
    """The third one over two, with a fault somewhere; on the main thread or not."""
    made, _, _ = snapshots(directory, "3", files)
    made.directory.start()
    take(made, 3)


def look(directory: Path) -> list[int]:
    """Returns the steps of the intact snapshots, newest first; checks their contents.

    Raises:
        AssertionError: a snapshot is incomplete.
    """
    made, contents, word = snapshots(directory)
    found = made.find()
    assert made.missing([attempt_of(each) for each in found]) == []
    for each in found:
        made.directory.restore(each)
        assert contents.restored_from == content(each.step)
        assert word.text == str(each.step)
    return [each.step or 0 for each in found]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    directory = tmp_path / "base"
    for step in (1, 2):
        made, _, _ = snapshots(directory, str(step))
        made.directory.start()
        take(made, step)
    assert look(directory) == [2, 1]
    return directory


@pytest.mark.parametrize("when", ["before", "after", "torn"])
def test_after_a_kill_anywhere_the_newest_intact_snapshot_is_present(
    tmp_path: Path, base: Path, when: str
) -> None:
    shutil.copytree(base, tmp_path / "dry")
    dry = FaultyFiles()
    take_third(tmp_path / "dry", dry)
    assert look(tmp_path / "dry") == [3, 2]
    marker = next(
        i
        for i, each in enumerate(dry.operations)
        if each.name == "rename" and each.path.endswith("COMMITTED")
    )
    seen = set()
    for index, operation in enumerate(dry.operations):
        if when == "torn" and operation.name != "write":
            continue
        directory = tmp_path / f"{when}-{index}"
        shutil.copytree(base, directory)
        try:
            take_third(directory, FaultyFiles(fail_at=index, when=when))
        except SimulatedCrash:
            pass  # before it was a thread's
        found = look(directory)
        is_marked = index > marker or (index == marker and when == "after")
        assert found[0] == (3 if is_marked else 2), operation
        assert len(found) <= KEPT
        seen.add(found[0])
        # The next start cleans up, so the next snapshot has room.
        made, _, _ = snapshots(directory, "4")
        made.directory.start()
        take(made, 4)
        assert look(directory)[0] == 4
        assert len(look(directory)) == KEPT
        assert not (directory / ".tfpreempt-staging").exists()
        shutil.rmtree(directory)
    assert seen == {2, 3} or when == "torn"


def test_two_generations_are_there_at_most(tmp_path: Path, base: Path) -> None:
    """During the write of the third, the first is deleted, and the second intact."""
    made, _, _ = snapshots(base, "3")
    there = []

    class Spy(OwnContents):
        def write(self, save: object) -> None:
            there.append(look(base))

    made.directory.contents = Spy()
    take(made, 3)
    assert there == [[2]]
    assert look(base) == [3, 2]


def test_a_corrupt_snapshot_is_missing(
    base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, _, _ = snapshots(base)
    newest, older = made.find()
    path = Path(newest.path, "ckpt.data-00001-of-00002")
    path.write_bytes(path.read_bytes()[:-1])
    attempts = [attempt_of(newest), attempt_of(older)]
    assert made.missing(attempts) == [attempt_of(newest)]
    assert "is skipped" in caplog.text
    assert made.missing([*attempts, "start-round-9"])[-1] == "start-round-9"


def test_another_number_of_workers_has_none(base: Path) -> None:
    made, _, _ = snapshots(base)
    made.directory.cluster = dataclasses.replace(cluster(1, 3), saves_all=True)
    assert made.find() == []
