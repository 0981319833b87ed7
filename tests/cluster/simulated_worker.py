"""One worker of a simulated cluster: the real coordinator, and a training loop.

The loop acts like the session and the handler at boundaries, saves and ends. The loop
is a generator that yields wherever the real main thread waits. No other part of the
real code is imitated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from tests.cluster.reports import Ending, Marker, Save, WorkerReport
from tests.cluster.simulated_store import SimulatedExecutor
from tests.cluster.timeline import Process, milliseconds
from tfpreempt.coordination import protocol_types as ev
from tfpreempt.coordination.coordinator import FOREVER, Coordinator
from tfpreempt.coordination.protocol_types import CommitKind, Key
from tfpreempt.core.events import Decision, Event, Notice, Outcome

if TYPE_CHECKING:
    from tests.cluster.simulation import SimulatedCluster

Resume = Callable[[Any], None]
Pause = Callable[[Resume], None]
Main = Generator[Pause, Any, None]
Verdicts = Generator[Pause, Any, ev.Directive]
Settled = Generator[
    Pause, Any, type[ev.Proceed | ev.ExitDirective | ev.Resume | ev.Raise]
]


class _LeavesError(Exception):
    """The process ends; stands for SystemExit."""


class _RaisesError(Exception):
    """The user's program fails; stands for all other exceptions."""


class _WakingCoordinator(Coordinator):
    """Wakes the simulated main thread, like `Coordinator.wait` the real thread."""

    def __init__(self, worker: Worker, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._worker = worker

    def dispatch(self, event: ev.ProtocolEvent) -> None:
        if isinstance(event, ev.DeadlinePassed):  # by main's own clock, or by the guard
            self._worker.overdue = True
        super().dispatch(event)
        self._worker.look_again()


class Worker(Process):
    """A process of the simulated cluster.

    Args:
        cluster: cluster of the process.
        index: number of the worker; worker 0 is the chief and runs the store.
    """

    __slots__ = (
        "_main",
        "_measured_from",
        "_open",
        "_save_started",
        "_wake",
        "cluster",
        "coordinator",
        "deadline_ms",
        "ending",
        "executor",
        "failing_saves",
        "index",
        "left",
        "outcome",
        "overdue",
        "raises_at",
        "saves",
        "step_flag",
    )

    def __init__(self, cluster: SimulatedCluster, index: int) -> None:
        super().__init__()
        self.cluster = cluster
        self.index = index
        self.ending: Ending | None = None
        self.outcome: Outcome | None = None
        self.overdue = False
        self.left = False  # about to exit
        self.saves: list[Save] = []
        self.failing_saves = 0
        self.raises_at: set[int] = set()
        self.deadline_ms: int | None = None  # when its own machine goes
        self._open = True  # its handler
        self._wake: Callable[[], None] | None = None
        self._measured_from: tuple[int, int] | None = None
        self._save_started = 0

    def start(self) -> None:
        """Makes the coordinator and begins to train."""
        cluster, schedule = self.cluster, self.cluster.schedule
        self.executor = SimulatedExecutor(
            cluster.timeline,
            self,
            cluster.store,
            cluster.reported_dead,
            lambda error: self.coordinator.store_gone(error),
        )
        self.coordinator = _WakingCoordinator(
            self,
            ev.ProtocolConfig(
                self.index,
                cluster.world,
                schedule.collectives,
                not schedule.collective_save,
            ),
            "0",
            self.executor,
            cluster.timeline,
            peer_timeout=schedule.save_timeout_ms / 1000,
            step_seconds=self._step_seconds,
            record=self._record,
            on_overrun=self._overrun,
        )
        self.step_flag = self.coordinator.step_flag
        self.coordinator.start()
        self._main = self._live()
        cluster.timeline.after(
            cluster.draw(schedule.start_ms), lambda: self._resume(None), self
        )

    def report(self) -> WorkerReport:
        """Returns the result of the worker."""
        return WorkerReport(
            worker=self.index,
            ending=self.ending or Ending.HUNG,
            outcome=self.outcome,
            ended_at_ms=self.gone_at,
            machine_gone_at_ms=self.deadline_ms,
            saves=tuple(self.saves),
            is_overdue=self.overdue,
            was_frozen=self.frozen_until > 0,
        )

    # --- what happens to it ----------------------------------------------------------

    def receive(self, grace_seconds: float | None) -> None:
        """A source of this machine sees a notice."""
        now = self.cluster.timeline.now
        if grace_seconds:
            gone = now + milliseconds(grace_seconds)
            self.deadline_ms = min(gone, self.deadline_ms or gone)
        self.coordinator.notice(
            Notice(
                source="simulated",
                worker=self.index,
                grace_seconds=grace_seconds,
                received_at=self.cluster.timeline.monotonic(),
            )
        )

    def end(self, ending: Ending) -> None:
        """Ends the process."""
        self.ending = ending
        self.gone_at = self.cluster.timeline.now
        if ending is Ending.KILLED:
            self.outcome = None
        self.cluster.process_ended(self)

    def _record(self, event: Event) -> None:
        if isinstance(event, Decision):
            self.cluster.decided.setdefault(self.index, self.cluster.timeline.now)

    def _overrun(self, why: str) -> None:
        if not self.left and self._open:
            self.outcome = Outcome.LOST
            self.end(Ending.OVERRUN)

    # --- the main thread, as a generator ---------------------------------------------

    def _resume(self, value: Any) -> None:
        self._wake = None
        try:
            pause = self._main.send(value)
        except StopIteration:
            self.end(Ending.LEFT)
        except _LeavesError:
            self.end(Ending.LEFT)
        except _RaisesError:
            self.end(Ending.RAISED)
        else:
            pause(self._resume)

    def _sleep(self, span: tuple[int, int]) -> Pause:
        wait = self.cluster.draw(span)

        def pause(resume: Resume) -> None:
            self.cluster.timeline.after(wait, functools.partial(resume, None), self)

        return pause

    def _together(self, tag: tuple[str, int], span: tuple[int, int]) -> Pause:
        return functools.partial(
            self.cluster.collectives.enter, self, tag, self.cluster.draw(span)
        )

    def _live(self) -> Main:
        schedule = self.cluster.schedule
        for _ in range(schedule.fits):
            self._open, self.outcome = True, None
            for _ in range(schedule.lengths[self.index]):
                self.step_flag.started += 1
                yield self._sleep(schedule.gap_ms)
                if self.step_flag.flag:
                    yield from self._look()
                if self._measured_from is None:
                    self._measured_from = (
                        self.cluster.timeline.now,
                        self.step_flag.started,
                    )
                self.cluster.interval_begins(self)
                yield from self._interval()
            yield from self._finish()
            self._open = False
        yield self._sleep(schedule.exit_ms)

    def _interval(self) -> Main:
        schedule, number = self.cluster.schedule, self.step_flag.started
        span = schedule.step_ms[self.index % len(schedule.step_ms)]
        if not schedule.collectives:
            yield self._sleep(span)
        elif not (yield self._together(("step", number), span)):
            yield from self._step_failed()
        if number in self.raises_at:
            self.coordinator.dispatch(ev.Detached())
            yield from self._raise()

    def _look(self) -> Main:
        while self.step_flag.flag:
            self.step_flag.started -= 1
            verdict = yield from self._settle()
            self.step_flag.started += 1
            if verdict is ev.Proceed:
                return

    def _finish(self) -> Main:
        while (yield from self._settle(last=True)) is not ev.ExitDirective:
            pass

    def _settle(self, last: bool = False) -> Settled:
        c = self.coordinator
        staged = False
        c.dispatch(ev.Boundary(self.step_flag.started, last))
        while True:
            match (yield from self._verdict()):
                case ev.SaveDirective(boundary, alone, repeat):
                    self._save_started = self.cluster.timeline.now
                    state = c.state
                    save = Save(state.round, boundary, alone, repeat)
                    self.saves.append(save)
                    staged = not repeat
                    ok = repeat or (yield from self._stage(state.round, alone))
                    c.dispatch(ev.Saved(ok))
                case ev.WriteMarker(workers):
                    shares = ()
                    if staged and self.cluster.schedule.shares:
                        shares = yield from self._complete(workers)
                    yield self._sleep(self.cluster.schedule.marker_ms)
                    c.dispatch(ev.Committed(self._mark(staged, workers, shares)))
                case ev.ExitDirective(outcome):
                    yield from self._leave(outcome)
                    c.dispatch(ev.NextRound(served=outcome is not Outcome.FINISHED))
                    return ev.ExitDirective
                case verdict:
                    return type(verdict)

    def _stage(self, round: int, alone: bool) -> Generator[Pause, Any, bool]:
        schedule = self.cluster.schedule
        ok: bool = True
        more = schedule.save_more_ms[self.index % len(schedule.save_more_ms)]
        span = (schedule.save_ms[0] + more, schedule.save_ms[1] + more)
        if schedule.collective_save and not alone:
            ok = yield self._together(("save", round), span)
        else:
            yield self._sleep(span)
        if self.failing_saves:
            self.failing_saves -= 1
            ok = False
        if ok and schedule.shares:
            spent = self.cluster.timeline.now - self._save_started
            self.coordinator.deadlines.share_seconds = spent / 1000
            self.cluster.shares[round, self.index] = self.coordinator.state.at
        return ok

    def _complete(
        self, workers: tuple[int, ...]
    ) -> Generator[Pause, Any, tuple[int, ...]]:
        """Takes the shares of workers as the chief, and writes missing shares."""
        round, at = self.coordinator.state.round, self.coordinator.state.at
        shares = []
        for j in range(self.cluster.world):
            share = self.cluster.shares.get((round, j), -1)
            if j not in workers or share != at:  # a repeated save has no share
                yield self._sleep(self.cluster.schedule.save_ms)
                share = at
            shares.append(share)
        return tuple(shares)

    def _mark(
        self, staged: bool, workers: tuple[int, ...], shares: tuple[int, ...]
    ) -> CommitKind:
        c = self.coordinator
        if staged:
            spent = self.cluster.timeline.now - self._save_started
            took = c.deadlines.planned(spent / 1000, c.deadlines.share_seconds)
            c.deadlines.save_seconds = took
            c.extra[Key.COMMIT] = {"save_seconds": took}
        kind = c.commit_kind()
        self.cluster.markers.append(
            Marker(c.state.round, c.state.at, kind, workers, shares)
        )
        return kind

    def _leave(self, outcome: Outcome) -> Main:
        self.outcome = outcome
        if outcome is Outcome.FINISHED:
            return
        self.left = True
        yield self._sleep(self.cluster.schedule.exit_ms)
        raise _LeavesError

    def _step_failed(self) -> Main:
        self.coordinator.dispatch(ev.StepFailed())
        verdict = yield from self._verdict()
        if isinstance(verdict, ev.ExitDirective):
            yield from self._leave(verdict.outcome)
        yield from self._raise()

    def _raise(self) -> Main:
        self.outcome = None
        yield self._sleep(self.cluster.schedule.raise_ms)
        raise _RaisesError

    # --- waiting, as Coordinator.wait does -------------------------------------------

    def _verdict(self) -> Verdicts:
        c, timeline = self.coordinator, self.cluster.timeline
        while True:
            verdict = c.wait(0.0)
            if verdict is not None:
                return verdict
            now, end = timeline.monotonic(), c.main_deadline()
            if end is not None and now >= end:
                c.dispatch(ev.DeadlinePassed())
                continue
            yield functools.partial(self._wait, now + FOREVER if end is None else end)

    def _wait(self, until: float, resume: Resume) -> None:
        """Sleeps until something was fed, or until then."""

        def wake() -> None:
            if self._wake is wake:
                resume(None)

        self._wake = wake
        self.cluster.timeline.at(milliseconds(until), wake, self)

    def look_again(self) -> None:
        """Something was fed to the coordinator."""
        if self._wake is not None:
            self.cluster.timeline.after(0, self._wake, self)

    def _step_seconds(self) -> float:
        if self._measured_from is None:
            return 0.0
        since, first = self._measured_from
        intervals = max(1, self.step_flag.started - first)
        return (self.cluster.timeline.now - since) / 1000 / intervals
