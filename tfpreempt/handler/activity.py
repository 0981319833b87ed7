"""Activity of this process: its heartbeat, and its snapshot schedule.

The supervisor restarts a worker that makes no progress for too long. The allowed time
depends on the phase of the worker, such as the first steps or a wait for other workers,
so the heartbeat reports the phase. The chief requests a snapshot from all workers
whenever snapshots have cost less than a small fraction of the training time.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import statistics
import threading
import weakref
from collections.abc import Callable, Iterator

from tfpreempt.coordination.coordinator import Coordinator
from tfpreempt.coordination.protocol_types import MainThreadState
from tfpreempt.coordination.state_machine import STANDING, WAITS
from tfpreempt.core.heartbeat import Heartbeat, WorkerPhase, pid_seen_by_supervisor
from tfpreempt.handler.run import Run, Runs
from tfpreempt.handler.snapshots import TRIES, Snapshots, SnapshotTiming
from tfpreempt.handler.status_file import WorkerActivity

log = logging.getLogger(__name__)

SHARE = 0.008
"""Largest fraction of training time that snapshots may cost.

The documented promise is 0.01; the difference is a reserve for unmeasured cost.
"""

SHORTEST = 1.0
"""Shortest interval between snapshots, in seconds.

A shorter interval would reduce the training lost in a crash by less than this time."""

WARM_UP = 5.0
"""Latest time of the second snapshot, in seconds after the first snapshot."""

_COSTS = 3  # use the median cost of 3 snapshots: the machine may be busy once
_WINDOWS = 5  # use the median step time of 5 time spans without a snapshot
_FEWEST_STEPS = 2  # steps needed to measure the step time
# Tolerated difference between the count of intervals and the count of steps. The counts
# differ during a step: an interval is counted when it begins, a step when it is
# complete.
_SLACK = 2
_LOOKS = 0.1  # seconds between two checks whether a snapshot is due
_LOOKS_WHILE_WRITTEN = 0.02
_LATER = 30  # factor: each refused snapshot makes the next wait 30 times longer
# Shortest pause between two checks for the end of a step, in seconds. During a long
# step the pause grows: a pause is a tenth of the time waited so far.
_LOOKS_FOR_A_STEP = 0.005


@dataclasses.dataclass(eq=False)
class IntervalPolicy:
    """Chooses the interval between snapshots from their measured cost.

    Args:
        share: largest fraction of training time that snapshots may cost.
        shortest: shortest interval between snapshots, in seconds.
    """

    share: float = SHARE
    shortest: float = SHORTEST
    _is_first: bool = True
    _windows: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_WINDOWS)
    )

    _costs: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_COSTS)
    )

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step while no snapshot is written; None before a measurement."""
        return statistics.median(self._windows) if self._windows else None

    def undisturbed(self, seconds: float, steps: float) -> None:
        """Records a span of training during which no snapshot was written.

        Args:
            seconds: duration of the span.
            steps: number of steps in the span; a span without steps is ignored.
        """
        if seconds > 0 and steps > 0:
            self._windows.append(seconds / steps)

    def after(self, *, stood: float, beside: float, steps: float) -> float:
        """Computes the interval until the next snapshot from the cost of the newest
        snapshot.

        Args:
            stood: seconds for which training was stopped to capture the snapshot.
            beside: seconds after the capture in which training continued while the
                snapshot was written: until the end of the first step after the write.
            steps: number of steps made in the `beside` seconds.

        Returns:
            Seconds from the start of the newest snapshot to the start of the next
            snapshot.
        """
        step = self.step_seconds
        lost = beside if step is None else max(0.0, beside - steps * step)
        seconds = (stood + lost) / self.share
        if self._is_first:
            self._is_first = False
            seconds = min(seconds, WARM_UP)
        else:
            self._costs.append(seconds)
            seconds = statistics.median(self._costs)
        return max(self.shortest, seconds, stood + beside)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSample:
    """The progress of training at a point in time, for a comparison of two samples.

    An interval is the time between two boundaries (moments at which the process can
    save): usually a step.

    Attributes:
        at: time of the sample, in monotonic seconds.
        steps: number of completed steps.
        intervals: number of intervals that have begun.
        saved_at: value of `Run.saved_at`. Different values in two samples mean that a
            commit was made between the samples.
    """

    at: float
    steps: int
    intervals: int
    saved_at: int | None


def _are_only_steps(steps: int, intervals: int) -> bool:
    """Returns whether a number of intervals contains only steps.

    An evaluation between steps would distort the measured duration of a step.

    Args:
        steps: number of steps completed in the intervals.
        intervals: number of intervals.
    """
    return abs(intervals - steps) <= _SLACK


@dataclasses.dataclass(eq=False)
class SnapshotScheduler:
    """Requests the snapshots of a run, until the run is closed.

    The session calls `look` once. Later calls of `look` come from the executor's alarm
    thread.

    Args:
        run: weak reference to the run.
        runs: the open runs.
        coordinator: coordinator that requests a snapshot from all workers. Its executor
            calls `look` at a given time, on the alarm thread.
        is_busy: function that returns whether an asynchronous commit is being written.
        interval: policy that chooses the interval between snapshots.
    """

    run: weakref.ref[Run]
    runs: Runs
    coordinator: Coordinator
    is_busy: Callable[[], bool]
    interval: IntervalPolicy = dataclasses.field(default_factory=IntervalPolicy)
    _due: float = 0.0
    _quiet: ProgressSample | None = None  # start of a span without a snapshot
    # (time, number of steps) at the first check that found the newest snapshot
    # complete.
    _written: tuple[float, int] | None = None
    _last: int = -1  # number of steps at the newest snapshot or request

    def look(self) -> None:
        """Requests a snapshot if a snapshot is due, and schedules the next call."""
        run = self.run()
        if run is None or run not in self.runs:
            return
        snapshots = run.snapshots
        if snapshots is None or snapshots.is_off:
            return
        taken = snapshots.taken
        if taken is None:
            seconds = self._ask_if_due(run, snapshots)
        else:
            seconds = self._watch(run, snapshots, taken)
        at = self.coordinator.clock.monotonic() + seconds
        self.coordinator.executor.call_at(at, self.look)

    def _sample(self, run: Run) -> ProgressSample:
        return ProgressSample(
            at=self.coordinator.clock.monotonic(),
            steps=run.steps_made,
            intervals=self.coordinator.step_flag.started,
            saved_at=run.saved_at,
        )

    def _ask_if_due(self, run: Run, snapshots: Snapshots) -> float:
        """Requests a snapshot if a snapshot is due. Returns the seconds until the next
        check."""
        now, steps = self.coordinator.clock.monotonic(), run.steps_made
        if self._quiet is None:
            if steps >= 1:  # the first step is slow, because it also traces
                self._quiet, self._due = self._sample(run), now + SHORTEST
            return _LOOKS
        if self.is_busy():  # a commit slows training, so measure again from now on
            self._quiet = self._sample(run)
        if now < self._due:
            return self._due - now
        is_known = self.interval.step_seconds is not None
        if not is_known and steps - self._quiet.steps < _FEWEST_STEPS:
            return _LOOKS
        if self._may_take(run) and self.coordinator.periodic(snapshot=True):
            wait = SHORTEST * _LATER ** min(snapshots.refused, TRIES)
            self._due, self._last = now + wait, run.steps_made
        return _LOOKS

    def _may_take(self, run: Run) -> bool:
        is_alone = [each for each in self.runs if each.is_armed] == [run]
        has_moved = run.has_moved and run.steps_made != self._last
        is_quiet = not (self.is_busy() or self.coordinator.preemption_pending)
        return is_alone and has_moved and is_quiet

    def _watch(self, run: Run, snapshots: Snapshots, taken: SnapshotTiming) -> float:
        """Measures the cost of the newest snapshot, and chooses the time of the next.

        The measurement ends with the first step that ends after the snapshot is
        written.

        Returns the seconds until the next call of `look`.
        """
        now, steps = self.coordinator.clock.monotonic(), run.steps_made
        if snapshots.is_busy:
            return _LOOKS_WHILE_WRITTEN
        if self._written is None:
            self._written = now, steps
        if steps == self._written[1]:
            return max(_LOOKS_FOR_A_STEP, (now - self._written[0]) / 10)
        stood = taken.left - taken.arrived
        if snapshots.is_dropped:
            period = max(SHORTEST, stood / SHARE)
        else:
            quiet, intervals = self._quiet, self.coordinator.step_flag.started
            if quiet is not None and quiet.saved_at == run.saved_at:
                made = taken.steps - quiet.steps
                if _are_only_steps(made, taken.intervals - quiet.intervals):
                    self.interval.undisturbed(taken.arrived - quiet.at, made)
            beside, made = now - taken.left, steps - taken.steps
            if not _are_only_steps(made, intervals - taken.intervals):
                beside, made = 0.0, 0
            period = self.interval.after(stood=stood, beside=beside, steps=made)
        of_step = f"of step {run.base + taken.steps}"
        log.debug(
            "the snapshot %s stopped training for %.3f s, and the %d steps "
            "after it took %.3f s; the next one in %.1f s",
            "that a commit broke off" if snapshots.is_dropped else of_step,
            stood,
            steps - taken.steps,
            now - taken.left,
            period,
        )
        self._due, self._quiet = taken.arrived + period, self._sample(run)
        self._last = taken.steps
        self._written = snapshots.taken = None
        return _LOOKS


_TRAINS = (MainThreadState.TRAINING, MainThreadState.DETACHED)
"""States of a main thread that trains. A detached main thread, which has raised an
error, is included, so that the supervisor's timeout for steps ends a hang in the
exit."""

_STANDS = (*STANDING, MainThreadState.LEAVING)


@dataclasses.dataclass(eq=False)
class Activity:
    """Reports the activity of the main thread: training, saving or waiting.

    Any thread may call `heartbeat` and `now`.

    Args:
        coordinator: the coordinator of this worker.
        runs: the open runs.

    Attributes:
        traces: number of the newest interval in which a run may trace and compile a
            step, such as its first step. Only the main thread changes the number.
    """

    coordinator: Coordinator
    runs: Runs
    traces: int = 0
    _pauses: int = 0  # number of open contexts that pause hang detection

    def heartbeat(self) -> Heartbeat:
        """Returns the progress and the phase of the main thread.

        The supervisor's timeout depends on the phase. Between the steps of a fit there
        is no timeout, because an evaluation or callbacks of the program may be running.
        The first steps, which trace and compile, have the phase FIRST. A program that
        enters watch scopes without counting steps may trace in every step, and stays in
        the phase FIRST.
        """
        step_flag, armed = (
            self.coordinator.step_flag,
            [r for r in self.runs if r.is_armed],
        )
        main = self.coordinator.state.main
        is_between = any(each.amid for each in self.runs) and not step_flag.busy
        is_saving = self.coordinator.is_saving or main not in _TRAINS
        stage = WorkerPhase.STEPS
        if main in WAITS:
            stage = WorkerPhase.WAITS
        elif (
            not (armed and step_flag.started) or is_between or is_saving or self._pauses
        ):
            stage = WorkerPhase.APART
        elif self.traces == step_flag.started or not any(
            each.steps_made for each in armed
        ):
            stage = WorkerPhase.FIRST
        return Heartbeat(
            pid=pid_seen_by_supervisor(),
            boundaries=step_flag.started,
            step=sum(each.step for each in armed),
            stage=stage,
        )

    def now(self) -> WorkerActivity:
        """Returns the current activity of the main thread, for the status file."""
        main = self.coordinator.state.main
        if self.coordinator.is_saving or main not in (*_TRAINS, *_STANDS):
            return WorkerActivity.SAVING
        return WorkerActivity.WAITING if main in _STANDS else WorkerActivity.TRAINING

    @contextlib.contextmanager
    def hang_detection_paused(self) -> Iterator[None]:
        """Context manager: pauses hang detection, so the body may take any time."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    @contextlib.contextmanager
    def main_may_wait(self) -> Iterator[None]:
        """Context manager: pauses hang detection if the main thread runs the body.

        If another thread runs the body, hang detection continues, because the main
        thread may hang during the body.
        """
        is_main = threading.current_thread() is threading.main_thread()
        with self.hang_detection_paused() if is_main else contextlib.nullcontext():
            yield
