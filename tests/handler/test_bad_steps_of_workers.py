"""Bad steps of two workers in this process, whose steps wait for each other."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.handler.test_session import FakeRun, FakeSave
from tests.multiprocess.harness import wait_until
from tfpreempt.coordination.in_memory_store import InMemoryStore
from tfpreempt.core.clock import SystemClock
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.events import BadStep, Event, Notice, Outcome
from tfpreempt.core.journal import Journal
from tfpreempt.errors import (
    BadStepsError,
    CoordinationServiceUnavailableError,
    PeerTimeoutError,
    UsageError,
    WorkerMismatchError,
)
from tfpreempt.handler import bad_steps
from tfpreempt.handler.bad_steps import BadStepFinder, BadSteps, LoopBadSteps
from tfpreempt.handler.session import Session

pytestmark = pytest.mark.timeout(60)

LIMIT = 10.0
STEPS = 12


class KilledError(BaseException):
    """The worker is killed."""


class Worker(FakeRun):
    """A worker whose checks find given bad steps.

    Args:
        number: index of the worker.
        store: key-value store of the workers.
        folder: folder with the directories of all workers, which are separate.
        options: value of `on_bad_step`.
    """

    def __init__(
        self, number: int, store: InMemoryStore, folder: Path, options: BadSteps
    ) -> None:
        super().__init__()
        self.saves_async = False
        self.cluster = Cluster(worker=number, jobs=(("worker", 2),))
        self.journal = Journal(folder / f"{number}", number)
        self.session = Session(self.cluster, store, "test", 5.0, [])
        self.session.runs.add(self)  # type: ignore[arg-type]
        self.contents = SimpleNamespace(needs_every_worker=False)
        here: Any = self
        self.records = BadStepFinder(options, self.session, here)
        self.finds: dict[int, int] = {}  # bad step by the step after which it is found
        self.before: dict[int, Callable[[], None]] = {}  # calls, by step

    @property
    def directory(self) -> Any:
        fields = {"mirror": None, "contents": self.contents}
        return SimpleNamespace(**{**vars(super().directory), **fields})

    def record(self, event: Event) -> None:
        self.events.append(event)
        self.journal.record(event)

    def stage(self, name: str) -> FakeSave:
        if self.records.refusal is not None:
            raise self.records.refusal
        return super().stage(name)

    def train(self, all_reduce: threading.Barrier) -> None:
        """Trains until the exit function is called."""
        flag = self.session.step_flag
        for step in range(STEPS):
            self.before.get(step, lambda: None)()
            flag.started += 1
            if flag.flag:
                self.session.wait_at_boundary()
            if self.left_at is not None:
                return
            all_reduce.wait(LIMIT)
            self.steps_made += 1
            if step in self.finds and not self.records.is_stopping():
                self.records.end_because_of((1, 0, self.finds[step]), f"bad {step}")

    @property
    def bad_steps(self) -> list[tuple[int, str]]:
        return [
            (each.batch, each.reason)
            for each in self.events
            if isinstance(each, BadStep)
        ]

    @property
    def commits(self) -> list[str]:
        return [each for each in self.calls if each.startswith("commit")]


class Pair:
    """Two workers.

    Args:
        folder: folder with the directories of the workers.
        others: options of worker 1.
        chief: options of worker 0.
    """

    kind: type[Worker] = Worker

    def __init__(
        self,
        folder: Path,
        others: BadSteps | None = None,
        chief: BadSteps | None = None,
    ) -> None:
        store = InMemoryStore()
        self.workers = [
            self.kind(0, store, folder, chief or BadSteps()),
            self.kind(1, store, folder, others or BadSteps()),
        ]

    def stop(self) -> None:
        """Stops the threads of the workers."""
        for worker in self.workers:
            worker.session.executor.stop()

    def run(self, call: Callable[[Worker], Any]) -> list[BaseException | None]:
        """Calls a function for both workers at the same time; returns the errors."""
        errors: list[BaseException | None] = [None, None]

        def called(number: int) -> None:
            try:
                call(self.workers[number])
            except BaseException as error:
                errors[number] = error

        threads = [
            threading.Thread(target=called, args=(i,), daemon=True) for i in range(2)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join(LIMIT)
            assert not each.is_alive()
        return errors

    def train(self) -> list[BaseException | None]:
        all_reduce = threading.Barrier(2)
        return self.run(lambda worker: worker.train(all_reduce))


Start = Callable[..., Pair]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    pairs: list[Pair] = []

    def started(*args: Any) -> Pair:
        pairs.append(Pair(tmp_path, *args))
        return pairs[-1]

    yield started
    for pair in pairs:
        pair.stop()


def notice(worker: Worker, grace: float | None = None) -> None:
    """SIGTERM arrives."""
    worker.session.coordinator.notice(
        Notice(
            source="test",
            worker=worker.cluster.worker,
            grace_seconds=grace,
            received_at=SystemClock().monotonic(),
        )
    )


def request_save(chief: Worker) -> None:
    """A periodic save is due; has no effect in the round of a bad step."""
    chief.session.coordinator.periodic()


@pytest.mark.parametrize(
    ("finds", "expected"),
    [
        ([{}, {4: 4}], (4, "bad 4")),
        ([{4: 4}, {}], (4, "bad 4")),
        ([{4: 4}, {4: 4}], (4, "bad 4")),
        # The chief finds only the consequence: a later step.
        ([{5: 5}, {4: 4}], (4, "bad 4")),
    ],
)
@pytest.mark.parametrize("noticed", [None, 0, 1])
def test_all_workers_stop_without_a_commit(
    start: Start,
    finds: list[dict[int, int]],
    expected: tuple[int, str],
    noticed: int | None,
) -> None:
    """Also if a notice arrives at the same time."""
    pair = start()
    for worker, found in zip(pair.workers, finds, strict=True):
        worker.finds = found
    if noticed is not None:
        worker = pair.workers[noticed]
        worker.before[4] = lambda: notice(worker)
    assert pair.train() == [None, None]
    chief, other = pair.workers
    if noticed is None:
        assert chief.bad_steps == [expected]
    else:  # the notice may stop the workers before a step, or its round comes first
        assert chief.bad_steps in ([], [expected], [(5, "bad 5")])
    assert other.bad_steps == []
    is_found = bool(chief.bad_steps)
    for worker in pair.workers:
        assert worker.contents.needs_every_worker
        assert not (is_found and worker.commits)
        assert f"leave {not is_found} True" in worker.calls


def test_a_bad_step_found_in_the_round_of_a_notice_is_recorded(start: Start) -> None:
    pair = start()
    chief, other = pair.workers

    def find() -> None:
        notice(chief)
        flags = [each.session.step_flag for each in pair.workers]
        wait_until(lambda: all(each.flag for each in flags), "the notice", LIMIT)
        other.records.end_because_of((1, 0, 3), "bad")

    other.before[4] = find
    assert pair.train() == [None, None]
    assert chief.bad_steps == [(3, "bad")]
    for worker in pair.workers:
        assert worker.commits == []
        assert "leave False True" in worker.calls


def test_a_journal_that_cannot_be_read_ends_the_chief(start: Start) -> None:
    """Otherwise each start would find the step again."""
    pair = start()
    chief, other = pair.workers
    other.finds = {4: 4}
    other.session.coordinator.deadlines.peer_timeout = 0.5
    chief.journal.path.touch()
    chief.journal.path.chmod(0o666)
    error, none = pair.train()
    assert isinstance(error, BadStepsError)
    assert none is None
    assert other.commits == chief.commits == []
    assert "leave False True" in other.calls


def test_a_veto_keeps_its_reason_on_all_workers(start: Start) -> None:
    pair = start()
    pair.workers[1].finds = {3: 3}
    pair.train()
    why = "worker 1: bad 3 at batch 3 of epoch 0; the next start leaves this step out"
    for worker in pair.workers:
        [last] = [each for each in worker.events if hasattr(each, "outcome")]
        assert (last.outcome, last.detail) == (Outcome.LOST, why)  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="the exit_fn returned after a bad step"):
        pair.workers[1].records.is_stopping()


def test_the_next_start_of_each_worker_gets_the_records_of_the_chief(
    start: Start,
) -> None:
    """The chief is killed between the record and its exit."""
    pair = start()
    chief, other = pair.workers
    chief.finds = {3: 3}
    gone = CoordinationServiceUnavailableError("worker 0 was killed")

    def killed(name: str) -> FakeSave:
        other.session.coordinator.store_gone(gone)
        raise KilledError

    chief.stage = killed  # type: ignore[method-assign]
    dead, alive = pair.train()
    assert isinstance(dead, KilledError)
    assert alive is None
    assert other.commits == []
    assert "leave False True" in other.calls
    again = start()
    assert again.run(lambda worker: worker.records.read()) == [None, None]
    for worker in again.workers:
        assert worker.records.positions == [(1, 0, 3)]
        assert worker.records.search_end == (1, 0, 3)
    assert again.workers[1].journal.read_earlier(BadStep) == []


def test_other_options_of_a_worker_are_refused(start: Start) -> None:
    pair = start(BadSteps(limit=3))
    for error in pair.run(lambda worker: worker.records.read()):
        assert isinstance(error, WorkerMismatchError)
        assert "on_bad_step differs between the workers" in str(error)


def test_a_worker_without_options_is_named_as_a_possible_cause(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bad_steps, "START_TIMEOUT", 0.2)
    for worker in start().workers:
        with pytest.raises(PeerTimeoutError) as caught:
            worker.records.read()
        assert "on_bad_step must be given on every worker" in str(
            caught.value.__notes__
        )


@pytest.mark.parametrize("finder", [0, 1])
def test_all_workers_raise_the_error_of_the_limit(start: Start, finder: int) -> None:
    """Otherwise the error would be a failed step on the other workers, which their
    supervisors would restart."""
    for batch in (3, 5):
        pair = start(BadSteps(limit=1), BadSteps(limit=1))
        assert pair.run(lambda worker: worker.records.read()) == [None, None]
        pair.workers[finder].finds = {batch: batch}
        assert pair.train() == [None, None]
        assert pair.workers[0].bad_steps == [(batch, f"bad {batch}")]
    pair = start(BadSteps(limit=1), BadSteps(limit=1))
    for error in pair.run(lambda worker: worker.records.read()):
        assert isinstance(error, BadStepsError)
        assert "batch 3 of epoch 0, batch 5 of epoch 0. Raise limit=" in str(error)


@pytest.mark.parametrize("noticed", [0, 1])
@pytest.mark.parametrize("finder", [0, 1])
def test_a_bad_step_between_the_two_commits_of_a_notice(
    start: Start, noticed: int, finder: int
) -> None:
    """With a long grace period, training continues after the first commit."""
    pair = start()
    worker, bad = pair.workers[noticed], pair.workers[finder]

    def announced() -> None:
        notice(worker, 30.0)
        flags = [each.session.step_flag for each in pair.workers]
        wait_until(lambda: all(each.flag for each in flags), "the notice", LIMIT)

    worker.before[4] = announced
    bad.finds = {7: 7}
    assert pair.train() == [None, None]
    chief = pair.workers[0]
    assert chief.commits == ["commit preemption [0, 1]"]
    assert chief.bad_steps == [(7, "bad 7")]
    for each in pair.workers:
        assert "leave False True" in each.calls


@pytest.mark.parametrize("finder", [0, 1])
@pytest.mark.parametrize("found_at", [3, 4, 5])
def test_a_bad_step_near_a_periodic_save_is_recorded(
    start: Start, finder: int, found_at: int
) -> None:
    pair = start()
    chief = pair.workers[0]
    chief.before[4] = lambda: request_save(chief)
    pair.workers[finder].finds = {found_at: found_at}
    assert pair.train() == [None, None]
    assert chief.bad_steps == [(found_at, f"bad {found_at}")]
    for each in pair.workers:
        assert "leave False True" in each.calls


def test_a_bad_step_does_not_delay_an_open_periodic_round(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round of the bad step opens only after the periodic save, which needs the
    worker. A wait for the round would take the grace period of a notice."""
    monkeypatch.setattr(bad_steps, "OPENS_WITHIN", 2 * LIMIT)
    pair = start()
    chief, other = pair.workers
    flags = [each.session.step_flag for each in pair.workers]

    def find() -> None:
        wait_until(lambda: all(each.flag for each in flags), "the round", LIMIT)
        other.records.end_because_of((1, 0, 3), "bad")

    chief.before[4] = lambda: request_save(chief)
    other.before[4] = find
    assert pair.train() == [None, None]
    assert chief.bad_steps == [(3, "bad")]
    for worker in pair.workers:
        assert "leave False True" in worker.calls


class LoopWorker(Worker):
    """A worker with a custom loop.

    Attributes:
        losses: the losses, by step; other losses are 0.
        base: number of steps before this start.
    """

    def __init__(
        self, number: int, store: InMemoryStore, folder: Path, options: BadSteps
    ) -> None:
        super().__init__(number, store, folder, options)
        self.losses: dict[int, float] = {}
        self.base, self.stop_at, self.candidate = 0, 0, None
        self.before_save: Callable[[], Exception | None] = lambda: None
        self.options = options

    @property
    def step(self) -> int:  # type: ignore[override]
        return self.base + self.steps_made

    def stage(self, name: str) -> FakeSave:
        """Like `Run.capture`."""
        refusal = self.before_save()
        if refusal is not None:
            raise refusal
        return FakeRun.stage(self, name)

    def train(self, all_reduce: threading.Barrier) -> None:
        """Like `PreemptionCheckpointHandler.run`."""
        here: Any = self
        guard = LoopBadSteps(self.options, self.session, here, None)
        self.left_out: list[int] = []
        flag = self.session.step_flag
        while self.step < STEPS:
            self.before.get(self.step, lambda: None)()
            leaves_out = guard.leaves_out((self.step,), {})
            flag.started += 1
            guard.check()
            if flag.flag:
                self.session.wait_at_boundary()
            if self.left_at is not None:
                return
            if leaves_out:
                self.left_out.append(self.step)
                self.base += 1
                continue
            all_reduce.wait(LIMIT)
            self.steps_made += 1
            guard.add(self.losses.get(self.step - 1, 0.0))


class LoopPair(Pair):
    kind = LoopWorker


@pytest.mark.parametrize("bad", [[{}, {4: 4}], [{4: 4}, {}], [{4: 4}, {4: 4}]])
@pytest.mark.parametrize("noticed", [None, 0, 1])
def test_the_workers_of_a_loop_leave_the_same_step_out(
    tmp_path: Path, bad: list[dict[int, int]], noticed: int | None
) -> None:
    def start() -> LoopPair:
        pair = LoopPair(tmp_path)
        for each, found in zip(pair.workers, bad, strict=True):
            assert isinstance(each, LoopWorker)
            each.losses = dict.fromkeys(found, math.nan)
        return pair

    pair = start()
    if noticed is not None:
        worker = pair.workers[noticed]
        worker.before[5] = lambda: notice(worker)
    try:
        assert pair.train() == [None, None]
        chief, other = pair.workers
        assert [step for step, _ in chief.bad_steps] == [4]
        assert other.bad_steps == []
        for each in pair.workers:
            assert isinstance(each, LoopWorker)
            assert each.commits == []
            assert "leave False True" in each.calls
            assert each.contents.needs_every_worker
        again = start()
        pair.stop()
        pair = again
        assert pair.train() == [None, None]
        assert [each.left_out for each in pair.workers] == [[4], [4]]  # type: ignore[attr-defined]
        assert [each.step for each in pair.workers] == [STEPS, STEPS]
    finally:
        pair.stop()
