"""A simulated cluster: real coordinators, virtual time, faults on schedule.

Every worker is the shipped `Coordinator` with a training loop that follows the
session's; the store, the messages, the collectives and the machines are simulated,
event by event, in one thread. Equal schedules give equal runs, so a schedule that fails
can be replayed:

    report = SimulatedCluster(
        Schedule(lengths=(10, 10), faults=(Preempt(worker=1, at_step=4),))
    ).run()
    assert {w.outcome for w in report.workers} == {Outcome.COMMITTED}
"""

from __future__ import annotations

import dataclasses
import functools
import random

from tests.cluster.collectives import Collectives
from tests.cluster.reports import Ending, Marker, RunReport, Save, WorkerReport
from tests.cluster.simulated_store import SimulatedStore
from tests.cluster.simulated_worker import Worker
from tests.cluster.timeline import Timeline

__all__ = [
    "AskToSave",
    "Ending",
    "FailSave",
    "Fault",
    "Freeze",
    "Kill",
    "Marker",
    "Preempt",
    "Raise",
    "RunReport",
    "Save",
    "Schedule",
    "SimulatedCluster",
    "SlowStore",
    "Span",
    "WorkerReport",
]

Span = tuple[int, int]
"""The shortest and the longest time in milliseconds; each is drawn between them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that happens to a worker: at a time, or as it starts an interval.

    Attributes:
        worker: whom.
        at_ms: when, in milliseconds; or
        at_step: when its count of started intervals reaches this.
    """

    worker: int = 0
    at_ms: int | None = None
    at_step: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preempt(Fault):
    """A notice for the machine, with a grace period in seconds; None: unknown."""

    grace_seconds: float | None = 30.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AskToSave(Fault):
    """The worker asks all workers for a periodic commit."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kill(Fault):
    """The process ends without a message."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Freeze(Fault):
    """The process does not run for a while, while time passes."""

    lasts_ms: int = 5000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Raise(Fault):
    """The user's program raises an error in the next interval that ends."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FailSave(Fault):
    """The next save of the worker cannot be written."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlowStore(Fault):
    """Every message to and from the store takes longer for a while."""

    lasts_ms: int = 5000
    extra_ms: int = 500


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """All parameters of a simulated run.

    Attributes:
        lengths: number of intervals of each worker in one fit; one number for each
            worker.
        fits: number of fits in sequence.
        collectives: whether each interval has a collective of all workers.
        collective_save: whether each save has a collective of all workers.
        shares: whether workers write shares of the common state; the chief writes the
            missing shares.
        step_ms: duration of an interval for each worker; repeats from the first value.
        save_ms: duration of staging a save.
        save_more_ms: additional duration for each worker; repeats from the first value.
        marker_ms: duration of making a save durable.
        store_ms: travel time of one message to or from the store.
        store_rate: messages that the store serves in a millisecond; None: no limit.
        gap_ms: time between counting an interval and reading the flag.
        start_ms: time at which a worker starts to train.
        exit_ms: duration of the end of a process.
        raise_ms: duration of the end of a process after an error.
        failure_ms: time from a crash to the failure of a collective.
        heartbeat_ms: time from a crash to the report of the service.
        save_timeout_ms: timeout of the coordinator.
        faults: faults and notices of the run.
        seed: seed of all random numbers.
    """

    lengths: tuple[int, ...]
    fits: int = 1
    collectives: bool = True
    collective_save: bool = True
    shares: bool = False
    step_ms: tuple[Span, ...] = ((50, 150),)
    save_ms: Span = (100, 300)
    save_more_ms: tuple[int, ...] = (0,)
    marker_ms: Span = (10, 50)
    store_ms: Span = (0, 5)
    store_rate: int | None = None
    gap_ms: Span = (0, 1)
    start_ms: Span = (0, 100)
    exit_ms: Span = (0, 50)
    raise_ms: Span = (0, 3000)
    failure_ms: Span = (0, 10_000)
    heartbeat_ms: int = 10_000
    save_timeout_ms: int = 30_000
    faults: tuple[Fault, ...] = ()
    seed: int = 0


class SimulatedCluster:
    """A cluster that executes one event at a time.

    Args:
        schedule: parameters of the run. Between events a test may `apply` a fault, or
            read `workers`.

    Attributes:
        timeline: the virtual clock.
        workers: the processes, with their coordinators.
        markers: durable saves so far.
        shares: the boundary of each written share, by round and worker.
        decided: time at which each worker first knew a decision, in milliseconds.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.world = len(schedule.lengths)
        self.timeline = Timeline()
        self.markers: list[Marker] = []
        self.shares: dict[tuple[int, int], int] = {}
        self.decided: dict[int, int] = {}
        self._random = random.Random(schedule.seed)
        self._slow: list[tuple[int, int]] = []  # (until, extra)
        self._left = self.world
        self.workers = [Worker(self, i) for i in range(self.world)]
        self.store = SimulatedStore(
            self.timeline,
            self.workers[0],
            self._store_delay,
            lambda: self._random.random() < 0.5,
            schedule.store_rate,
        )
        self.collectives = Collectives(
            self.timeline, self.workers, lambda: self.draw(schedule.failure_ms)
        )
        self._at_step: dict[tuple[int, int], list[Fault]] = {}
        for fault in schedule.faults:
            self._plan(fault)
        for worker in self.workers:
            worker.start()

    def run(self, limit_ms: int = 7_200_000) -> RunReport:
        """Executes all events until all processes have ended, or until a time."""
        while self._left and self.timeline.step(limit_ms):
            pass
        return self.report()

    def step(self) -> bool:
        """Executes the next event; returns False if all processes have ended."""
        return bool(self._left) and self.timeline.step(self.timeline.now + 10**9)

    def report(self) -> RunReport:
        """Returns the results of the workers so far."""
        return RunReport(
            workers=tuple(worker.report() for worker in self.workers),
            markers=tuple(self.markers),
            store=dict(self.store.values),
            torn=tuple(self.collectives.torn),
            lasted_ms=self.timeline.now,
        )

    def apply(self, fault: Fault) -> None:
        """Makes a fault happen now."""
        worker = self.workers[fault.worker]
        if worker.gone_at is not None:
            return
        match fault:
            case Preempt(grace_seconds=grace):
                worker.receive(grace)
            case AskToSave():
                worker.coordinator.periodic()
            case Kill():
                worker.end(Ending.KILLED)
            case Freeze(lasts_ms=lasts):
                worker.frozen_from = self.timeline.now
                worker.frozen_until = self.timeline.now + lasts
            case Raise():
                worker.raises_at.add(worker.step_flag.started)
            case FailSave():
                worker.failing_saves += 1
            case SlowStore(lasts_ms=lasts, extra_ms=extra):
                self._slow.append((self.timeline.now + lasts, extra))

    # --- for workers and the store ---------------------------------------------------

    def draw(self, span: Span) -> int:
        """A time between two, from the schedule's seed."""
        shortest, longest = span
        return shortest + int(self._random.random() * (longest - shortest + 1))

    def reported_dead(self) -> frozenset[int]:
        """The workers that have been silent for longer than the heartbeat allows."""
        now, heartbeat = self.timeline.now, self.schedule.heartbeat_ms
        return frozenset(
            worker.index
            for worker in self.workers
            if (since := worker.silent_since(now)) is not None
            and now - since >= heartbeat
        )

    def interval_begins(self, worker: Worker) -> None:
        """Applies the faults that wait for this step."""
        for fault in self._at_step.pop((worker.index, worker.step_flag.started), ()):
            self.timeline.after(0, functools.partial(self.apply, fault), worker)

    def process_ended(self, worker: Worker) -> None:
        """Peers, and the store, will notice."""
        self._left -= 1
        self.collectives.process_ended(worker)
        if worker.index == 0:
            self.store.close()

    def _store_delay(self) -> int:
        delay = self.draw(self.schedule.store_ms)
        for until, extra in self._slow:
            if self.timeline.now < until:
                delay += extra
        return delay

    def _plan(self, fault: Fault) -> None:
        worker = self.workers[fault.worker]
        if fault.at_step is not None:
            key = (fault.worker, fault.at_step)
            self._at_step.setdefault(key, []).append(fault)
        else:
            when = fault.at_ms or 0
            self.timeline.at(when, lambda: self.apply(fault), worker)
