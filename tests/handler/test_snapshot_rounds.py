"""Rounds of snapshots: two workers in step, whose files are small and real."""

from __future__ import annotations

import dataclasses
import errno
import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.checkpoint.fakes import Words
from tests.fakes.storage import FaultyFiles
from tests.handler.test_snapshot_crashes import snapshots
from tfpreempt.checkpoint.directory.manifest import FileEntry, Parent
from tfpreempt.checkpoint.state.state import State, StateRegistry
from tfpreempt.coordination.protocol_types import Key, NoticeKind
from tfpreempt.core.clock import SystemClock
from tfpreempt.core.snapshot_memory import SnapshotMemory
from tfpreempt.errors import CollectiveReadError
from tfpreempt.handler.collective_save import RoundSave
from tfpreempt.handler.snapshots import (
    KEPT,
    Snapshots,
    SnapshotTiming,
    attempt_of,
    directory_for,
    is_newer,
)
from tfpreempt.storage import file_reading

SAID = "no more snapshots are taken"
TIMING = SnapshotTiming(arrived=0.0, left=0.0, steps=0, intervals=0)


class Worker:
    """A run, its side of a round, and the session around the run."""

    def __init__(self, number: int, directory: Path) -> None:
        self.directory = directory
        self.snapshots, *self.parts = snapshots(directory, "words")
        self.snapshots.directory.start()
        self.preemption_pending = False
        self.is_busy = False
        self.is_armed = self.has_moved = True
        self.steps_made = 0
        self.extra: dict[Key, Any] = {}
        self.commit_extra: dict[str, Any] = {}
        self.clock = SystemClock()
        self.settings = SimpleNamespace(num_workers=2, host=number == 0, worker=number)
        self.state = SimpleNamespace(round=0, notice=NoticeKind.PERIODIC)
        self.deadlines = SimpleNamespace(save_seconds=None)
        self.step_flag = SimpleNamespace(started=0)
        self.is_snapshot = True
        self.forgotten: list[int] = []
        self.faults: list[Exception] = []
        self.forget_rounds = self.forgotten.extend

    def __iter__(self) -> Any:
        return iter([self])

    def fault(self, where: str, error: Exception) -> None:
        self.faults.append(error)

    def end_async(self) -> None:
        raise AssertionError("a snapshot waited for a commit")

    def take_snapshot(self, name: str) -> bool:
        return self.snapshots.capture(self.steps_made, f"start-{name}")

    def begin(self, round: int) -> RoundSave:
        """Trains a step, up to the boundary of the round."""
        self.steps_made += 1
        self.state.round = round
        self.extra = {}
        here: Any = self
        return RoundSave(here, here, here, arrived_at=0.0)

    @property
    def whole(self) -> list[str]:
        return [attempt_of(each) for each in self.snapshots.find()]


@pytest.fixture
def pair(tmp_path: Path) -> list[Worker]:
    return [Worker(number, tmp_path / str(number)) for number in range(2)]


def take(pair: list[Worker], round: int, *, wait: bool = True) -> bool:
    """Makes a round; returns whether all workers captured their state."""
    saves = [worker.begin(round) for worker in pair]
    said = [save.stage() for save in saves]
    chief = pair[0]
    if said[0]:
        saves[0].mark(tuple(i for i, yes in enumerate(said) if yes), True)
    for worker, save in zip(pair, saves, strict=True):
        worker.commit_extra = dict(chief.extra.get(Key.COMMIT, {}))
        save.go_on()
    for worker in pair if wait else ():
        worker.snapshots.wait()
    return all(said)


def in_common(pair: list[Worker]) -> set[str]:
    """Returns the snapshots that all workers have."""
    assert all(len(worker.whole) <= KEPT for worker in pair)
    return set.intersection(*[set(worker.whole) for worker in pair])


def fail_to_write(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(captured: object) -> object:
        raise OSError("No space left on device")

    monkeypatch.setattr(worker.snapshots.directory.contents, "write", write)


def test_all_have_the_newest_two(pair: list[Worker]) -> None:
    for round in range(1, 5):
        assert take(pair, round)
    assert in_common(pair) == {"start-round-4", "start-round-3"}
    assert [worker.snapshots.agreed for worker in pair] == ["start-round-3"] * 2
    assert pair[0].forgotten == [1, 2, 3]


@pytest.mark.parametrize("who", [0, 1])
def test_a_common_snapshot_stays_while_a_worker_cannot_write(
    pair: list[Worker], monkeypatch: pytest.MonkeyPatch, who: int
) -> None:
    take(pair, 1)
    take(pair, 2)
    with monkeypatch.context() as full:
        fail_to_write(pair[who], full)
        take(pair, 3)
        assert in_common(pair) == {"start-round-2"}
        assert not take(pair, 4)  # as one has not the third
        assert in_common(pair) == {"start-round-2"}
    assert take(pair, 5)
    assert in_common(pair) == {"start-round-2", "start-round-5"}
    assert take(pair, 6)
    assert in_common(pair) == {"start-round-5", "start-round-6"}


def test_the_restored_snapshot_outlives_a_newer_one_of_one_worker(
    pair: list[Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two kills during a snapshot, one worker has only the older snapshot."""
    take(pair, 1)
    for _ in range(2):
        again = [Worker(number, tmp_path / str(number)) for number in range(2)]
        for worker in again:
            worker.steps_made = pair[0].steps_made
            worker.snapshots.agreed = "start-round-1"
        with monkeypatch.context() as killed:
            fail_to_write(again[1], killed)
            take(again, again[0].steps_made + 1)
        assert in_common(again) == {"start-round-1"}
        pair = again


def test_a_corrupt_snapshot_is_deleted_before_the_restored_one(
    pair: list[Worker],
) -> None:
    take(pair, 1)
    take(pair, 2)
    for worker in pair:
        [path] = worker.directory.glob("2/ckpt.data-00001-of-00002")
        path.write_bytes(path.read_bytes()[:-1])
        worker.snapshots, *worker.parts = snapshots(worker.directory, "words")
        worker.snapshots.agreed = "start-round-1"
    take(pair, 3)
    assert in_common(pair) == {"start-round-1", "start-round-3"}
    for worker in pair:
        assert worker.snapshots.missing(worker.whole) == []


@pytest.mark.parametrize("who", [0, 1])
def test_no_worker_takes_snapshots_if_one_never_can(
    pair: list[Worker],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    who: int,
) -> None:
    take(pair, 1)
    take(pair, 2)
    fail_to_write(pair[who], monkeypatch)
    for round in range(3, 10):
        take(pair, round)
    assert [worker.snapshots.is_off for worker in pair] == [True, True]
    assert caplog.text.count(SAID) == 2  # once in the log of each
    assert "No space left" in caplog.text
    assert [worker.whole for worker in pair] == [[], []]


def test_a_snapshot_does_not_wait_for_a_commit_that_is_written(
    pair: list[Worker],
) -> None:
    for worker in pair:
        worker.is_busy = True
    for round in range(1, 6):
        assert not take(pair, round)
    for worker in pair:
        assert not worker.snapshots.is_off
        worker.is_busy = False
    assert take(pair, 6)


def test_a_notice_waits_for_no_snapshot(
    pair: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for the last snapshot, nor for a snapshot requested before the notice."""
    released, write = threading.Event(), pair[1].snapshots.directory.contents.write

    def slow(captured: Any) -> Any:
        assert released.wait(20.0)
        return write(captured)

    monkeypatch.setattr(pair[1].snapshots.directory.contents, "write", slow)
    take(pair, 1, wait=False)
    pair[1].preemption_pending = True
    assert not take(pair, 2, wait=False)  # returns, though the first is not through
    released.set()
    pair[1].snapshots.wait()
    pair[1].preemption_pending = False
    assert take(pair, 3)

    saves = [worker.begin(4) for worker in pair]
    assert [save.stage() for save in saves] == [True, True]
    pair[1].preemption_pending = True
    saves[0].mark((0, 1), True)
    for worker, save in zip(pair, saves, strict=True):
        worker.commit_extra = dict(pair[0].extra[Key.COMMIT])
        save.go_on()
        worker.snapshots.wait()
    assert in_common(pair) == {"start-round-3"}
    assert not list(pair[1].directory.glob("*staging*/*"))


def test_a_commit_in_between_is_the_same_to_all(pair: list[Worker]) -> None:
    take(pair, 1)
    for worker in pair:
        worker.snapshots.give_up()
    assert take(pair, 2)
    assert in_common(pair) == {"start-round-1", "start-round-2"}


def test_common_snapshots_outlive_a_failed_commit(
    pair: list[Worker],
) -> None:
    take(pair, 1)
    take(pair, 2)
    for worker in pair:
        worker.snapshots.give_up()
    assert take(pair, 3)
    assert in_common(pair) == {"start-round-2", "start-round-3"}


def test_one_that_a_commit_has_broken_off_is_nobodys_failure(
    pair: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    for round in range(1, 20, 3):
        take(pair, round)
        with monkeypatch.context() as broken:
            fail_to_write(pair[1], broken)
            take(pair, round + 1)
        for worker in pair:
            worker.snapshots.give_up()
        assert not take(pair, round + 2)  # as one lacks the one before
        assert pair[0].snapshots.refused == 0


def test_each_worker_verifies_only_the_first_snapshots(
    pair: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, really = [0], file_reading.is_real_dir

    def counted(path: str) -> bool:
        looks[-1] += 1
        return really(path)

    monkeypatch.setattr(file_reading, "is_real_dir", counted)
    for round in range(1, 14):
        take(pair, round)
        looks.append(0)
    assert looks[12] == looks[2]


def test_files_of_other_workers_do_not_count_as_snapshot_size(
    pair: list[Worker],
) -> None:
    files = [
        FileEntry(name="ckpt.index", size=10, crc32c=0),
        FileEntry(name="worker-0007/data.state", size=1 << 60, crc32c=0),
    ]
    pair[0].snapshots.expect_as_in(SimpleNamespace(files=files))  # type: ignore[arg-type]
    assert take(pair, 1)


@pytest.mark.parametrize("fails", [True, False])
def test_a_worker_without_a_snapshot_joins_the_collectives_of_states(
    tmp_path: Path, fails: bool
) -> None:
    synced = []

    class Together(Words):
        def sync(self) -> None:
            synced.append(self.name)

    full = OSError(errno.ENOSPC, "No space left on device")
    files = FaultyFiles(fail_at=0, error=full) if fails else None
    made, _, _ = snapshots(tmp_path, files=files)
    registry = made.directory.registry
    kept: State = Together("together", registry=registry)
    assert isinstance(registry, StateRegistry)
    if not fails:
        made.end("of a test")
    assert not made.capture(1, "start-round-1")
    assert synced == [kept.name]


@pytest.mark.parametrize("takes", [True, False])
def test_a_worker_outside_of_a_collective_read_stops_training(
    pair: list[Worker], monkeypatch: pytest.MonkeyPatch, takes: bool
) -> None:
    """The other workers are in the read, and would mistake its next step for it."""

    def fail(*args: Any) -> Any:
        raise CollectiveReadError("no memory")

    contents = pair[1].snapshots.directory.contents
    monkeypatch.setattr(contents, "capture" if takes else "take_part", fail)
    if not takes:
        pair[1].snapshots.is_off = True
    with pytest.raises(CollectiveReadError):
        pair[1].begin(1).stage()


# --- what goes on from what ----------------------------------------------------------


@pytest.mark.parametrize(
    ("noted", "there", "highest", "expected"),
    [
        (("c", 3), ("c", 3), 3, True),
        (("c", 3), ("x", 3), 3, False),  # another run's, which has the same number
        (("c", 3), ("x", 4), 4, False),
        (("c", 3), ("b", 2), 3, True),  # the third is damaged
        (("c", 3), ("b", 2), 4, False),  # so is one that another run has made since
        (("c", 3), None, 3, True),
        (("c", 3), None, 4, False),
        ((None, 0), ("x", 1), 1, False),
    ],
)
def test_a_snapshot_is_restored_if_its_run_committed_last(
    noted: tuple[str | None, int],
    there: tuple[str, int] | None,
    highest: int,
    expected: bool,
) -> None:
    def entry(step: int, token: str | None, sequence: int, **more: Any) -> Any:
        return SimpleNamespace(step=step, token=token, sequence=sequence, **more)

    parent = Parent(token=noted[0] or "", sequence=noted[1])
    snapshot = entry(9, "s", 1, manifest=SimpleNamespace(parent=parent))
    committed = None if there is None else entry(5, *there)
    assert is_newer(snapshot, committed, highest) == expected


# --- memory --------------------------------------------------------------------------


def test_temporarily_short_memory_does_not_end_snapshots(
    pair: list[Worker], caplog: pytest.LogCaptureFixture
) -> None:
    take(pair, 1)
    take(pair, 2)
    pair[1].snapshots.available = lambda: 5000
    assert not take(pair, 3)
    pair[1].snapshots.available = lambda: 1 << 40
    assert take(pair, 4)
    assert take(pair, 5)
    pair[1].snapshots.available = lambda: 5000
    for round in range(6, 9):
        assert not take(pair, round)
    assert caplog.text.count(SAID) == 2
    assert "5000 bytes of memory are available" in caplog.text
    assert [worker.whole for worker in pair] == [[], []]


def test_all_workers_of_the_machine_need_memory_at_once(tmp_path: Path) -> None:
    made, _, _ = snapshots(tmp_path)
    made.set_expected_size(1000)
    made.available = lambda: 100_000
    assert made.capture(1, "start-round-1")
    made.discard()
    made.memory = dataclasses.replace(made.memory, workers=100)
    assert not made.capture(1, "start-round-2")


@pytest.mark.parametrize("is_known", [True, False])
def test_the_first_one_has_a_bound_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_known: bool
) -> None:
    """Also if neither a variable nor a commit on the disk tells the size."""
    made, _, _ = snapshots(tmp_path)
    made.memory = dataclasses.replace(made.memory, bytes=17_000)
    if is_known:
        made.set_expected_size(7000)
    captured = []
    contents = made.directory.contents
    capture = contents.capture
    contents.capture = lambda *args: captured.append(args) or capture(*args)  # type: ignore[method-assign, func-returns-value]
    assert not made.capture(1, "start-round-1")
    assert made.is_off
    assert len(captured) == (not is_known)
    assert caplog.text.count(SAID) == 1
    made.go_on(TIMING)
    assert made.find() == []
    assert not list(tmp_path.glob("*staging*/*"))


def test_snapshots_of_other_directories_are_deleted_for_room(
    tmp_path: Path,
) -> None:
    """Such as snapshots of the first of many fits, each with its own directory."""
    memory = SnapshotMemory(directory=str(tmp_path), bytes=1)
    first, second, peers = (
        Path(directory_for(memory, name, worker))
        for name, worker in (("first", 1), ("second", 1), ("first", 0))
    )
    for directory in (first, peers):
        made, _, word = snapshots(directory, "words")
        made.capture(1, "start-round-1")
        made.go_on(TIMING)
        made.wait()
    made, _, word = snapshots(second, word.text)
    made.memory = dataclasses.replace(made.memory, bytes=40_000)
    assert made.capture(1, "start-round-1")
    made.discard()
    assert first.is_dir()
    made.memory = dataclasses.replace(made.memory, bytes=20_000)
    assert made.capture(1, "start-round-2")
    assert not first.exists()
    assert peers.is_dir()


def test_logs_say_little(pair: list[Worker], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for round in range(1, 4):
        take(pair, round)
    assert caplog.text == ""
    assert isinstance(pair[0].snapshots, Snapshots)
