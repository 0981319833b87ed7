"""What this process does, and how long its steps take.

The supervisor restarts a worker whose heartbeat stops, so the heartbeat says how long
the current step or phase may take. The chief asks all workers for a snapshot when
snapshots have cost training less than a small share of its time.
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

from tfpreempt.coordination.agreement import STANDING, WAITS
from tfpreempt.coordination.coordinator import Coordinator
from tfpreempt.coordination.events import Main
from tfpreempt.coordination.runtime import Runtime
from tfpreempt.core.clock import Clock
from tfpreempt.core.life import Sign, Stage, pid_seen_by_supervisor
from tfpreempt.handler.run import Run, Runs
from tfpreempt.handler.snapshots import TRIES, Snapshots, Taken
from tfpreempt.handler.status_file import Doing

log = logging.getLogger(__name__)

SHARE = 0.008
"""What snapshots may take of the time of training.

A hundredth is promised; the rest is for what measuring misses.
"""

SHORTEST = 1.0
"""Seconds between two snapshots, at least: to lose less is worth nothing."""

WARM_UP = 5.0
"""Seconds after the first snapshot at which there is a second one, at the latest."""

_COSTS = 3  # snapshots of which the middle one counts: one may meet a busy machine
_WINDOWS = 5  # times without a snapshot, over which the length of a step is known
_FEWEST_STEPS = 2  # that tell how long a step takes
_SLACK = 2  # intervals that are counted before their step is
_LOOKS = 0.1  # seconds between two looks for what comes by itself
_LOOKS_WHILE_WRITTEN = 0.02
_LATER = 30  # times as long until the next try, after each that a worker refused
_LOOKS_FOR_A_STEP = 0.005  # at first; then a tenth of what was waited already


@dataclasses.dataclass(eq=False)
class IntervalPolicy:
    """Chooses when the next snapshot is due. Seconds are of any one clock.

    Args:
        share: what snapshots may cost of the time.
        shortest: the shortest interval.
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
        """How long a step takes while no snapshot is written; None while unknown."""
        return statistics.median(self._windows) if self._windows else None

    def undisturbed(self, seconds: float, steps: float) -> None:
        """Training went on for a time in which no snapshot was written.

        Args:
            seconds: how long.
            steps: that were made in it; none says nothing.
        """
        if seconds > 0 and steps > 0:
            self._windows.append(seconds / steps)

    def after(self, *, stood: float, beside: float, steps: float) -> float:
        """The interval that one snapshot asks for.

        Args:
            stood: seconds for which training stood still.
            beside: seconds from then on, to the first end of a step after it was
                written.
            steps: that were made in that time.

        Returns:
            Seconds from the beginning of that snapshot to the beginning of the next.
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
    """Where training was at a time.

    Attributes:
        at: monotonic seconds.
        steps: that were made.
        intervals: that were, or had begun.
        saved_at: see `Run`; it differs where there was a commit.
    """

    at: float
    steps: int
    intervals: int
    saved_at: int | None

    def has_only_steps(self, steps: int, intervals: int) -> bool:
        """Whether it has been nothing but steps until there were so many."""
        others = (intervals - self.intervals) - (steps - self.steps)
        return abs(others) <= _SLACK


@dataclasses.dataclass(eq=False)
class SnapshotScheduler:
    """Schedules the snapshots of one run while the run is open. Thread of the alarms.

    Args:
        run: the run, held weakly.
        runs: the open runs.
        coordinator: asks all workers for a snapshot.
        runtime: calls `look` at a time.
        clock: time source.
        is_busy: whether a commit is being written.
    """

    run: weakref.ref[Run]
    runs: Runs
    coordinator: Coordinator
    runtime: Runtime
    clock: Clock
    is_busy: Callable[[], bool]
    interval: IntervalPolicy = dataclasses.field(default_factory=IntervalPolicy)
    _due: float = 0.0
    _quiet: ProgressSample | None = None  # from where on no snapshot was written
    _written: tuple[float, int] | None = None  # when that was seen, and the step then
    _last: int = -1  # steps that were made at the last one, or when it was asked for

    def look(self) -> None:
        """Looks now, and again when there may be something to do."""
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
        self.runtime.at(self.clock.monotonic() + seconds, self.look)

    def _sample(self, run: Run) -> ProgressSample:
        return ProgressSample(
            at=self.clock.monotonic(),
            steps=run.steps_made,
            intervals=self.coordinator.gate.started,
            saved_at=run.saved_at,
        )

    def _ask_if_due(self, run: Run, snapshots: Snapshots) -> float:
        """Asks for a snapshot, if one is due; returns seconds to the next look."""
        now, steps = self.clock.monotonic(), run.steps_made
        if self._quiet is None:
            if steps >= 1:  # the first one also traces
                self._quiet, self._due = self._sample(run), now + SHORTEST
            return _LOOKS
        if self.is_busy():  # what goes on beside a commit is not quiet
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
        is_quiet = not (self.is_busy() or self.coordinator.is_told_to_go)
        return is_alone and has_moved and is_quiet

    def _watch(self, run: Run, snapshots: Snapshots, taken: Taken) -> float:
        """Waits for the end of the first step after it was written."""
        now, steps = self.clock.monotonic(), run.steps_made
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
            quiet, after = self._quiet, self._sample(run)
            if (
                quiet is not None
                and quiet.saved_at == after.saved_at
                and quiet.has_only_steps(taken.steps, taken.intervals)
            ):
                seconds = taken.arrived - quiet.at
                self.interval.undisturbed(seconds, taken.steps - quiet.steps)
            before = dataclasses.replace(
                after, steps=taken.steps, intervals=taken.intervals
            )
            beside, made = now - taken.left, steps - taken.steps
            if not before.has_only_steps(after.steps, after.intervals):
                beside, made = 0.0, 0
            period = self.interval.after(stood=stood, beside=beside, steps=made)
        of_step = f"of step {run.base + taken.steps}"
        log.info(
            "tfpreempt: the snapshot %s stopped training for %.3f s, and the %d steps "
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


_TRAINS = (Main.TRAINING, Main.DETACHED)
"""A detached worker counts too: if it hangs in its exit, nothing else ends it."""

_STANDS = (*STANDING, Main.LEAVING)


@dataclasses.dataclass(eq=False)
class Activity:
    """Whether the main thread trains, saves or waits; any thread may ask.

    Args:
        coordinator: the coordinator of this worker.
        runs: the open runs.

    Attributes:
        traces: the newest interval that is one of a run's first intervals, which trace
            and compile; the main thread writes the number.
    """

    coordinator: Coordinator
    runs: Runs
    traces: int = 0
    _pauses: int = 0  # contexts in which hang detection is paused

    def heartbeat(self) -> Sign:
        """The number of boundaries so far, and whether a timeout holds for the next.

        In a fit only steps are watched: between steps an evaluation, or the callbacks
        of others, may run. The first steps trace and compile. A program that counts no
        steps, but enters watch scopes, may trace in each of its steps.
        """
        gate, armed = self.coordinator.gate, [r for r in self.runs if r.is_armed]
        main = self.coordinator.state.main
        is_between = any(each.amid for each in self.runs) and not gate.busy
        is_saving = self.coordinator.is_saving or main not in _TRAINS
        stage = Stage.STEPS
        if main in WAITS:
            stage = Stage.WAITS
        elif not (armed and gate.started) or is_between or is_saving or self._pauses:
            stage = Stage.APART
        elif self.traces == gate.started or not any(each.steps_made for each in armed):
            stage = Stage.FIRST
        return Sign(
            pid=pid_seen_by_supervisor(),
            boundaries=gate.started,
            step=sum(each.step for each in armed),
            stage=stage,
        )

    def now(self) -> Doing:
        """The activity of the main thread, for the status file."""
        main = self.coordinator.state.main
        if self.coordinator.is_saving or main not in (*_TRAINS, *_STANDS):
            return Doing.SAVING
        return Doing.WAITING if main in _STANDS else Doing.TRAINING

    @contextlib.contextmanager
    def hang_detection_paused(self) -> Iterator[None]:
        """The body may take any time, and the process is not taken for hung."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    @contextlib.contextmanager
    def main_may_wait(self) -> Iterator[None]:
        """Pauses hang detection in the body, if the main thread runs the body.

        While another thread waits, the main thread may hang beside it.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with self.hang_detection_paused():
            yield


@dataclasses.dataclass(eq=False)
class StepTimer:
    """The mean duration of a step, without the evaluations between steps.

    Main thread; any thread may ask. Boundaries are counted as in the gate: by the
    intervals that were started.

    Args:
        clock: time source.
    """

    clock: Clock
    _since: float | None = None
    _apart: float = 0.0  # seconds since then, and intervals, that are no step's
    _no_steps: int = 0
    _checked: tuple[int, float] | None = None  # the newest check, and when

    def begin(self, started: int) -> None:
        """Measures from now on: the first step, which traces its function, is over.

        Args:
            started: intervals so far.
        """
        self._since, self._no_steps, self._apart = self.clock.monotonic(), started, 0.0

    def check(self, started: int) -> None:
        """A boundary that no step follows; between two of these nothing is a step's.

        Args:
            started: intervals so far, that one included.
        """
        now, before = self.clock.monotonic(), self._checked
        self._checked = started, now
        self._no_steps += 1
        if before is not None and before[0] == started - 1:
            self._apart += now - before[1]

    def step_seconds(self, started: int) -> float:
        """Mean seconds of a step so far; 0 while there was none.

        Args:
            started: intervals so far.
        """
        if self._since is None:
            return 0.0
        passed = self.clock.monotonic() - self._since - self._apart
        return passed / max(1, started - self._no_steps)
