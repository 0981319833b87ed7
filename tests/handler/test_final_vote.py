"""All workers finish, or all restart: two workers in one process."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.handler.test_session import LIMIT, FakeRun, FakeSave, notify
from tfpreempt.coordination import deadlines
from tfpreempt.coordination.in_memory_store import InMemoryStore
from tfpreempt.core.cluster import LOCAL, Cluster
from tfpreempt.core.events import Exit
from tfpreempt.errors import SaveError
from tfpreempt.handler import exit, final_vote, session, training_end

pytestmark = pytest.mark.timeout(60)


class Store(InMemoryStore):
    """A store whose service reports crashes."""

    def __init__(self) -> None:
        super().__init__()
        self.dead: set[int] = set()

    def dead_workers(self) -> frozenset[int]:
        return frozenset(self.dead)


class Worker(FakeRun):
    """A worker's handler, its session, and the result of its close.

    Args:
        number: number of the worker, 0 or 1.
        store: store of both workers.
    """

    is_resumed = is_unconfirmed = False
    steps_made = 1

    def __init__(self, number: int, store: InMemoryStore) -> None:
        super().__init__()
        self.snapshots = self
        cluster = Cluster(worker=number, jobs=(("worker", 2),))
        self.session = session.Session(cluster, store, "0", 5.0, [])
        self.session.open(self)  # type: ignore[arg-type]
        self.in_commit: Callable[[], None] = lambda: None
        self.limit: float | None = None
        self.ended: BaseException | str | None = None
        self.thread = threading.Thread(target=self._close, daemon=True)

    def clear(self) -> None:
        self.calls.append("clear snapshots")

    def commit(self, staged: Any, *told: Any) -> Any:
        self.in_commit()
        self.has_moved = False
        return super().commit(staged, *told[:2])

    def stage(self, name: str) -> FakeSave:
        staged = super().stage(name)
        self.has_moved = False
        return staged

    def _exit(
        self, committed: bool, cluster: Cluster = LOCAL, *, mirrored: bool = True
    ) -> None:
        raise SystemExit(143)

    def begin(self) -> Worker:
        """Closes the handler, on a thread."""
        self.thread.start()
        return self

    def end(self) -> BaseException | str | None:
        """Returns the raised error, or "finished"."""
        self.thread.join(LIMIT)
        assert self.ended is not None, "it still waits"
        return self.ended

    @property
    def reason(self) -> str:
        """Returns the first exit in the journal. Training may fail after this exit."""
        left = next(event for event in self.events if isinstance(event, Exit))
        return f"{left.outcome.value}: {left.detail}"

    def _close(self) -> None:
        try:
            training_end.close(self.session, self, self.limit)  # type: ignore[arg-type]
            self.ended = "finished"
        except BaseException as error:
            self.ended = error


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def pair(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Worker]]:
    """Returns the chief and another worker, which have trained a step."""
    monkeypatch.setattr(session, "SnapshotScheduler", lambda *args: FakeRun())
    monkeypatch.setattr(FakeRun, "look", lambda self: None, raising=False)
    hard: list[str] = []

    def exit_hard(end: Callable[[], None]) -> None:
        """Calls `end`, which raises in a worker's thread; records other threads."""
        name = threading.current_thread().name
        if name.startswith("tfpreempt-"):
            hard.append(name)
        end()

    monkeypatch.setattr(exit, "exit_hard", exit_hard)
    workers = [Worker(number, store) for number in range(2)]
    yield workers
    for worker in workers:
        worker.session.unregister(worker)  # type: ignore[arg-type]
        worker.session.resume_after_exit()
    assert not hard, "a deadline ended a process in place of the word"


def held_in_commit(
    chief: Worker, other: Worker, error: Exception | None = None
) -> threading.Event:
    """Closes both workers; the chief blocks in its final commit until the event is set.

    Args:
        chief: the chief.
        other: the other worker.
        error: error with which the commit then fails.
    """
    begins, may_go_on = threading.Event(), threading.Event()

    def commit() -> None:
        begins.set()
        assert may_go_on.wait(LIMIT)
        if error is not None:
            raise error

    chief.in_commit = commit
    other.begin()
    chief.begin()
    assert begins.wait(LIMIT)
    return may_go_on


def test_no_worker_ends_before_the_chief_has_committed(pair: list[Worker]) -> None:
    chief, other = pair
    may_go_on = held_in_commit(chief, other)
    other.thread.join(0.3)
    assert other.ended is None
    may_go_on.set()
    assert (chief.end(), other.end()) == ("finished", "finished")
    assert "clear snapshots" in chief.calls
    assert "clear snapshots" in other.calls


def test_a_slow_worker_is_waited_for(
    pair: list[Worker], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chief's outcome and the other worker's reply are late."""
    monkeypatch.setattr(deadlines, "BYES", 0.1)
    insert = store.insert

    def slow(key: str, value: str) -> None:
        if key.endswith("/word") or "/end/1/bye/" in key:
            time.sleep(0.5)
        insert(key, value)

    monkeypatch.setattr(store, "insert", slow)
    chief, other = pair
    other.begin()
    chief.begin()
    assert (chief.end(), other.end()) == ("finished", "finished")


def test_all_workers_fail_if_the_chief_cannot_commit(pair: list[Worker]) -> None:
    chief, other = pair
    chief.error = SaveError("the disk is full")
    other.begin()
    chief.begin()
    assert chief.end() is chief.error
    error = other.end()
    assert isinstance(error, SaveError)
    assert "worker 0: SaveError: the disk is full" in str(error)
    assert "clear snapshots" not in other.calls  # all go back to one, perhaps


def test_all_workers_fail_if_one_cannot_write_its_part(pair: list[Worker]) -> None:
    chief, other = pair
    other.error = SaveError("no memory")
    other.begin()
    chief.begin()
    assert other.end() is other.error
    assert "worker 1: SaveError: no memory" in str(chief.end())


def in_place_of_final_save(
    monkeypatch: pytest.MonkeyPatch, worker: Worker, act: Callable[[], Any]
) -> None:
    """Replaces the final save of the worker by another function."""
    save = training_end._commit_final
    monkeypatch.setattr(
        training_end,
        "_commit_final",
        lambda here, run: act() if run is worker else save(here, run),
    )


def test_all_restart_if_a_worker_crashes_after_its_last_step(
    pair: list[Worker], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The platform restarts the worker, and the worker needs the chief."""
    chief, other = pair
    in_place_of_final_save(monkeypatch, other, threading.Event().wait)
    chief.in_commit = lambda: store.dead.add(1)
    other.begin()
    chief.begin()
    error = chief.end()
    assert isinstance(error, SystemExit)
    assert error.code == 143
    assert chief.reason.startswith("committed: worker 1 was lost in the final save (")
    assert "reports the worker as unreachable" in chief.reason


GONE = "stopped sending heartbeats):\n/job:worker/replica:0/task:1"


@pytest.mark.parametrize("has_told", [False, True])
def test_the_loss_of_a_noticed_worker_at_the_end_is_no_failure(
    pair: list[Worker], store: Store, has_told: bool
) -> None:
    """The worker trained to the end in its grace period, and ended in the save."""
    chief, _ = pair
    store.dead.add(1)
    chief.error = SaveError(f"Could not write step 12: unhealthy ({GONE}")
    if has_told:
        now = chief.session.coordinator.clock.monotonic()
        chief.session.coordinator.deadlines.shorten(now, 60.0)
    chief.begin()
    error = chief.end()
    assert isinstance(error, SystemExit if has_told else SaveError)
    said = chief.reason if has_told else "".join(getattr(error, "__notes__", []))
    assert "worker 1 stopped sending heartbeats in the final save" in said


def test_all_restart_if_the_chief_crashes_in_the_final_save(
    pair: list[Worker], store: Store
) -> None:
    chief, other = pair
    chief.in_commit = store.close
    other.begin()
    chief.begin()
    error = other.end()
    assert isinstance(error, SystemExit)
    assert error.code == 143
    assert other.reason.startswith("lost: worker 0 was lost in the final save")


def test_a_chief_that_is_frozen_is_waited_for_no_longer_than_it_may_be_silent(
    pair: list[Worker], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_end, "SILENT", 0.2)
    chief, other = pair
    insert = store.insert
    is_frozen = threading.Event()

    def hang(key: str, value: str) -> None:
        if is_frozen.is_set():
            threading.Event().wait()
        insert(key, value)

    monkeypatch.setattr(store, "insert", hang)

    def commit() -> None:
        is_frozen.set()
        threading.Event().wait()

    chief.in_commit = commit
    other.begin()
    chief.begin()
    assert isinstance(other.end(), SystemExit)
    assert other.reason.startswith("lost: worker 0 was lost in the final save")


@pytest.mark.parametrize("is_chief", [False, True])
def test_a_notice_that_leaves_time_for_the_final_commit_changes_no_end(
    pair: list[Worker], is_chief: bool
) -> None:
    """The notice comes to one worker during the chief's commit."""
    chief, other = pair
    may_go_on = held_in_commit(chief, other)
    notify((chief if is_chief else other).session, grace=3.0)
    threading.Event().wait(1.0)
    may_go_on.set()
    assert (chief.end(), other.end()) == ("finished", "finished")


def test_a_worker_without_time_inserts_lost_and_all_follow(
    pair: list[Worker],
) -> None:
    chief, other = pair
    may_go_on = held_in_commit(chief, other)
    deadlines = other.session.coordinator.deadlines  # the chief's host has more time
    deadlines.shorten(other.session.coordinator.clock.monotonic(), 1.0)
    assert isinstance(other.end(), SystemExit)
    assert other.reason.startswith("lost: worker 1 ran out of time")
    may_go_on.set()
    assert isinstance(chief.end(), SystemExit)
    assert chief.reason.startswith("committed: worker 1 ran out of time")


def test_a_worker_that_exits_early_is_not_missing(pair: list[Worker]) -> None:
    """A worker may exit early by `close(timeout)` or at the end of the interpreter.

    The worker chose this exit, and the platform does not restart it.
    """
    chief, other = pair
    other.limit = 0.2
    other.begin()
    assert other.end() == "finished"
    chief.begin()
    assert chief.end() == "finished"


def test_the_chief_cannot_leave_early(pair: list[Worker]) -> None:
    """All workers need the chief's commit."""
    chief, other = pair
    chief.limit = 0.2
    chief.begin()
    assert isinstance(chief.end(), SaveError)
    other.begin()
    assert "worker 0 did not wait for the workers that still train" in str(other.end())


def test_a_preempted_worker_does_not_hide_the_chiefs_full_disk(
    pair: list[Worker],
) -> None:
    """All workers, also the chief, exit with the restart code."""
    chief, other = pair
    may_go_on = held_in_commit(chief, other, SaveError("the disk is full"))
    deadlines = other.session.coordinator.deadlines
    deadlines.shorten(other.session.coordinator.clock.monotonic(), 1.0)
    assert isinstance(other.end(), SystemExit)
    may_go_on.set()
    assert isinstance(chief.end(), SystemExit)
    assert chief.reason.startswith("lost: worker 1 ran out of time")


def test_a_finished_worker_handles_a_notice_for_the_training_workers(
    pair: list[Worker],
) -> None:
    """Their exit functions return; the worker's own end comes later."""
    chief, other = pair
    for worker in pair:
        worker._exit = lambda *args, **more: None  # type: ignore[method-assign]
    other.begin()
    notify(chief.session)
    chief.session.step_flag.started += 1
    chief.session.wait_at_boundary()
    other.thread.join(0.3)
    assert other.ended is None
    chief.begin()
    assert (chief.end(), other.end()) == ("finished", "finished")


def test_a_running_chief_may_commit_without_a_time_limit(
    pair: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(final_vote, "MAX_TIMEOUTS", 0.05)
    chief, other = pair
    chief.in_commit = functools.partial(time.sleep, 1.0)
    other.begin()
    chief.begin()
    assert (chief.end(), other.end()) == ("finished", "finished")


def test_all_workers_fail_if_an_earlier_final_save_failed(
    pair: list[Worker],
) -> None:
    chief, other = pair
    first = FakeRun("first")
    for name in ("is_resumed", "is_unconfirmed"):
        setattr(first, name, False)
    first.error = SaveError("the disk is full")
    other.session.open(first)  # type: ignore[arg-type]
    with pytest.raises(SaveError):
        training_end.close(other.session, first)  # type: ignore[arg-type]
    other.begin()
    chief.begin()
    assert isinstance(other.end(), SaveError)
    assert "worker 1: SaveError: the disk is full" in str(chief.end())


@pytest.mark.parametrize("number", [0, 1])
def test_no_worker_waits_for_an_interrupted_worker(
    pair: list[Worker], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook, whose process lives on."""
    interrupted, left = pair[number], pair[1 - number]

    def interrupt() -> None:
        raise KeyboardInterrupt

    in_place_of_final_save(monkeypatch, interrupted, interrupt)
    left.begin()
    interrupted.begin()
    assert isinstance(interrupted.end(), KeyboardInterrupt)
    assert isinstance(left.end(), SystemExit)
    assert f"worker {number} stopped in the final save" in left.reason


def test_an_exit_function_that_returns_makes_no_success_of_a_loss(
    pair: list[Worker], store: Store
) -> None:
    chief, other = pair
    other._exit = lambda *args, **more: None  # type: ignore[method-assign]
    chief.in_commit = store.close
    other.begin()
    chief.begin()
    assert isinstance(other.end(), SaveError)
    assert other.reason.startswith("lost: ")
    assert "clear snapshots" not in other.calls


def test_an_exit_function_that_returns_is_called_once(
    pair: list[Worker], store: Store
) -> None:
    """Also if the other worker had announced its exit."""
    chief, _ = pair
    left: list[bool] = []
    chief._exit = lambda committed, *args, **more: left.append(committed)  # type: ignore[method-assign]
    store.dead.add(1)
    chief.error = SaveError(f"Could not write step 12: unhealthy ({GONE}")
    now = chief.session.coordinator.clock.monotonic()
    chief.session.coordinator.deadlines.shorten(now, 60.0)
    chief.begin()
    assert isinstance(chief.end(), SaveError)
    assert left == [False]
