"""Saves without an agreement: two workers on one store, in this process."""

from __future__ import annotations

import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.handler.test_session import FakeSave
from tests.multiprocess.harness import wait_until
from tfpreempt.checkpoint.directory.commit import CancellationToken
from tfpreempt.coordination.in_memory_store import InMemoryStore
from tfpreempt.coordination.store_executor import StoreExecutor
from tfpreempt.core.clock import SystemClock
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.events import BadStep, Commit
from tfpreempt.errors import SaveError
from tfpreempt.handler.collective_save import CollectiveSaves, Veto, VetoError

SECONDS = 5.0


def quiet(executor: StoreExecutor) -> Any:
    """Returns the fields of a coordinator without a notice."""
    return types.SimpleNamespace(
        executor=executor,
        state=types.SimpleNamespace(notice=None, round=1),
        deadlines=types.SimpleNamespace(peer_timeout=SECONDS),
        is_saving=False,
    )


class OpenMembers:
    """Records the faults."""

    def __init__(self) -> None:
        self.faults: list[str] = []

    def fault(self, where: str, error: Exception) -> None:
        self.faults.append(f"{where}: {error}")

    def log_commit(self, run: Member, commit: Commit) -> None:
        """Logs nothing."""


class Member:
    """A participant that only records its calls."""

    step = 1

    def __init__(self) -> None:
        self.start = types.SimpleNamespace(token="token")
        self.calls: list[str] = []
        self.staged: list[str] = []
        self.present: list[Sequence[int]] = []

    def stage(
        self, name: str, cancel_token: CancellationToken | None = None
    ) -> FakeSave:
        self.staged.append(name)
        return FakeSave(self, name, cancel_token)

    def commit(self, staged: FakeSave, because: str, workers: Sequence[int]) -> Commit:
        self.present.append(tuple(workers))
        return Commit(
            step=1,
            path=staged.staging,
            sequence=1,
            world_size=2,
            save_seconds=0.0,
            bytes=0,
            because=because,
        )

    @property
    def discarded(self) -> int:
        return self.calls.count("discard")


@pytest.fixture
def pair() -> Iterator[list[CollectiveSaves]]:
    store = InMemoryStore()
    executors = [
        StoreExecutor(store, SystemClock(), lambda error: None, deaths_every=60.0)
        for _ in range(2)
    ]
    yield [
        CollectiveSaves(
            Cluster(worker=worker, jobs=(("worker", 2),)),
            "test",
            quiet(executor),
            OpenMembers(),  # type: ignore[arg-type]
            on_failure=lambda error: None,
        )
        for worker, executor in enumerate(executors)
    ]
    for executor in executors:
        executor.stop()


def set_timeout(pair: list[CollectiveSaves], seconds: float) -> None:
    """How long a chief waits for the part of another worker."""
    for saves in pair:
        saves.coordinator.deadlines.peer_timeout = seconds


def save(saves: CollectiveSaves, run: Member, because: str = "save") -> Commit | None:
    return saves.save(run, because)  # type: ignore[arg-type]


def save_both(pair: list[CollectiveSaves]) -> Member:
    return save_these(pair, Member(), Member())


def save_these(pair: list[CollectiveSaves], chief: Member, other: Member) -> Member:
    thread = threading.Thread(target=save, args=(pair[1], other))
    thread.start()
    save(pair[0], chief)
    thread.join(SECONDS)
    assert other.staged[-1].startswith("save-")
    return chief


def test_both_parts_make_the_commit(pair: list[CollectiveSaves]) -> None:
    assert save_both(pair).present == [(0, 1)]


def test_a_worker_that_is_through_is_not_waited_for(
    pair: list[CollectiveSaves],
) -> None:
    pair[1].finishing()
    chief = Member()
    set_timeout(pair, 60.0)
    commit = save(pair[0], chief, "periodic")
    assert commit is not None
    assert chief.present == [(0,)]


def test_a_part_that_failed_is_missing_although_its_worker_is_through(
    pair: list[CollectiveSaves],
) -> None:
    """The worker has not trained less: the others would rely on this commit."""

    def fail(name: str) -> FakeSave:
        raise SaveError("no room")

    chief, other = Member(), Member()
    other.stage = fail  # type: ignore[assignment,method-assign]
    with pytest.raises(SaveError, match="no room"):
        save(pair[1], other)
    pair[1].finishing()
    with pytest.raises(SaveError, match=r"worker\(s\) \[1\]"):
        save(pair[0], chief)
    assert chief.present == []
    for saves, run in zip(pair, (chief, other), strict=True):
        assert not saves.last_save_is_committed(run, SECONDS)  # type: ignore[arg-type]


def test_the_chief_knows_that_a_worker_has_refused_its_part(
    pair: list[CollectiveSaves],
) -> None:
    """The chief records the bad step later; a full disk is another error."""
    bad_step = BadStep(
        step=3, fit=1, epoch=0, batch=3, batches=1, reason="nan", is_crash=False
    )
    veto = Veto(reason="worker 1: the loss is nan", run="token", bad_step=bad_step)

    def refuse(name: str) -> FakeSave:
        raise VetoError(veto)

    chief, other = Member(), Member()
    other.stage = refuse  # type: ignore[assignment,method-assign]
    with pytest.raises(VetoError):
        save(pair[1], other)
    with pytest.raises(VetoError, match="worker 1: the loss is nan"):
        save(pair[0], chief)
    assert (chief.present, chief.discarded) == ([], 1)


def test_the_next_fit_needs_it_again(pair: list[CollectiveSaves]) -> None:
    for saves in pair:
        saves.finishing()
    assert save_both(pair).present == [(0, 1)]


def test_a_part_of_another_save_does_not_pass_for_this_one(
    pair: list[CollectiveSaves],
) -> None:
    save(pair[1], Member(), "periodic")
    chief = Member()
    set_timeout(pair, 0.1)
    with pytest.raises(SaveError, match=r"worker\(s\) \[1\]"):
        save(pair[0], chief, "save")
    assert chief.discarded == 1
    assert chief.present == []


def test_the_final_state_is_committed_with_the_present_workers(
    pair: list[CollectiveSaves],
) -> None:
    chief = Member()
    set_timeout(pair, 0.1)
    save(pair[0], chief, "finished")
    assert chief.present == [(0,)]


def test_every_worker_knows_whether_the_newest_save_is_committed(
    pair: list[CollectiveSaves],
) -> None:
    """A save serves a notice at its step, but no notice at another step."""
    chief, other = Member(), Member()

    def stands() -> list[bool]:
        return [
            saves.last_save_is_committed(run, SECONDS)  # type: ignore[arg-type]
            for saves, run in zip(pair, (chief, other), strict=True)
        ]

    assert stands() == [False, False]
    save_these(pair, chief, other)
    assert stands() == [True, True]
    chief.step = other.step = 2
    assert stands() == [False, False]


def test_a_save_that_failed_on_the_chief_counts_on_no_worker(
    pair: list[CollectiveSaves],
) -> None:
    chief, other = Member(), Member()

    def fail(*args: Any) -> None:
        raise SaveError("no room")

    chief.commit = fail  # type: ignore[assignment,method-assign]
    with pytest.raises(SaveError):
        save_these(pair, chief, other)
    assert not pair[0].last_save_is_committed(chief, SECONDS)  # type: ignore[arg-type]
    assert not pair[1].last_save_is_committed(other, SECONDS)  # type: ignore[arg-type]


# --- asynchronous --------------------------------------------------------------------


class Slow(Member):
    """A participant whose part is written when the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()

    def capture(self, name: str, cancel_token: CancellationToken) -> FakeSave:
        return self.stage(name, cancel_token)

    def write(self, captured: FakeSave) -> FakeSave:
        assert self.opened.wait(SECONDS)
        return captured

    def commit(self, staged: FakeSave, because: str, workers: Sequence[int]) -> Commit:
        assert staged.cancel_token is not None
        try:
            staged.cancel_token.begin_commit()
        except SaveError:
            staged.discard()
            raise
        return super().commit(staged, because, workers)


def begin(saves: CollectiveSaves, run: Member, name: str) -> None:
    saves.begin(run, name, saves._final)  # type: ignore[arg-type]


def faults(pair: list[CollectiveSaves]) -> list[str]:
    """The errors that periodic saves of both workers have survived."""
    return [text for saves in pair for text in saves.runs.faults]  # type: ignore[attr-defined]


def test_an_asynchronous_save_is_committed_once_all_parts_are_there(
    pair: list[CollectiveSaves],
) -> None:
    runs = [Slow(), Slow()]
    for saves, run in zip(pair, runs, strict=True):
        begin(saves, run, "periodic-1")
    runs[0].opened.set()
    assert pair[0].is_busy
    assert runs[0].present == []
    runs[1].opened.set()
    pair[0].wait()
    assert runs[0].present == [(0, 1)]
    assert faults(pair) == []


def test_the_next_one_waits_until_all_parts_of_it_are_there(
    pair: list[CollectiveSaves],
) -> None:
    chief, other = Slow(), Slow()
    chief.opened.set()
    begin(pair[0], chief, "periodic-1")
    next_one = threading.Thread(target=begin, args=(pair[0], chief, "periodic-2"))
    next_one.start()
    assert chief.staged == ["periodic-1"]
    other.opened.set()
    for number in (1, 2):
        begin(pair[1], other, f"periodic-{number}")
    next_one.join(SECONDS)
    pair[0].wait()
    assert chief.present == [(0, 1), (0, 1)]


def test_a_late_chief_finds_the_parts_of_the_other_workers(
    pair: list[CollectiveSaves],
) -> None:
    """The chief may have been in its own validation for longer than any timeout."""
    chief, other = Slow(), Slow()
    for run in (chief, other):
        run.opened.set()
    set_timeout(pair, 0.05)
    for saves, run in zip(reversed(pair), (other, chief), strict=True):
        for number in range(3):
            begin(saves, run, f"periodic-{number}")
            saves.wait()
    assert chief.present == [(0, 1)] * 3
    assert faults(pair) == []


def test_a_commit_of_the_chief_counts_on_every_worker(
    pair: list[CollectiveSaves],
) -> None:
    """Also if another worker had no time to see that its part is complete."""
    runs = [Slow(), Slow()]
    for saves, run in zip(pair, runs, strict=True):
        begin(saves, run, "periodic-1")
    pair[1].end_async_within(0.0)
    for run in runs:
        run.opened.set()
    pair[0].end_async_within(SECONDS)
    assert runs[0].present == [(0, 1)]
    for saves, run in zip(pair, runs, strict=True):
        assert saves.last_save_is_committed(run, SECONDS)  # type: ignore[arg-type]


def test_a_part_that_cannot_be_captured_drops_the_save(
    pair: list[CollectiveSaves],
) -> None:
    class Broken(Slow):
        def capture(self, name: str, cancel_token: CancellationToken) -> FakeSave:
            raise SaveError("the disk is full")

    chief = Slow()
    chief.opened.set()
    begin(pair[0], chief, "periodic-1")
    with pytest.raises(SaveError, match="disk is full"):
        begin(pair[1], Broken(), "periodic-1")
    pair[0].wait()
    assert chief.present == []
    assert chief.discarded == 1
    assert "worker(s) [1]" in str(faults(pair))


def test_a_save_that_was_given_up_counts_on_no_worker(
    pair: list[CollectiveSaves],
) -> None:
    """Both workers save again at the same step, without waiting for the old save."""
    runs = [Slow(), Slow()]
    for saves, run in zip(pair, runs, strict=True):
        begin(saves, run, "periodic-1")
    for saves in pair:
        saves.end_async_within(0.0)
    for saves, run in zip(pair, runs, strict=True):
        assert not saves.last_save_is_committed(run, SECONDS)  # type: ignore[arg-type]
        run.opened.set()
    wait_until(lambda: runs[0].discarded == 1, "the part is discarded")
    assert runs[0].present == []


def test_a_save_that_was_given_up_waits_for_no_worker(
    pair: list[CollectiveSaves],
) -> None:
    """A worker that exits does not wait for the save, and the save for no worker."""
    chief, other = Slow(), Slow()
    begin(pair[0], chief, "periodic-1")
    pair[0].end_async_within(0.0)
    assert not pair[0].is_busy
    chief.opened.set()
    other.opened.set()
    begin(pair[1], other, "periodic-1")
    wait_until(lambda: chief.discarded == 1, "the save is discarded")
    assert chief.present == []


def test_in_a_round_the_part_of_a_worker_that_is_through_is_waited_for(
    pair: list[CollectiveSaves],
) -> None:
    """All workers have agreed to save, also a worker at its end of training."""
    chief, other = Slow(), Slow()
    pair[1].finishing()
    # The chief learns of the end.
    pair[0].save(chief, "save", is_async=True)  # type: ignore[arg-type]
    chief.opened.set()
    pair[0].wait()
    chief.opened.clear()
    assert chief.present == [(0,)]
    for saves, run in zip(pair, (chief, other), strict=True):
        saves.begin(run, "round-1", set())  # type: ignore[arg-type]
    chief.opened.set()
    assert not pair[0].wait(0.2)
    other.opened.set()
    pair[0].wait()
    assert chief.present == [(0,), (0, 1)]
    assert faults(pair) == []
