"""What this process does, for supervisor and status file; how long a step takes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from tfpreempt.coordination.agreement import STANDING, WAITS
from tfpreempt.coordination.coordinator import Coordinator
from tfpreempt.coordination.events import Main
from tfpreempt.core.clock import Clock
from tfpreempt.core.life import Sign, Stage, pid_seen_by_supervisor
from tfpreempt.handler.now import Doing
from tfpreempt.handler.run import Members

_TRAINS = (Main.TRAINING, Main.DETACHED)
"""A detached worker counts too: if it hangs in its exit, nothing else ends it."""

_STANDS = (*STANDING, Main.LEAVING)


class Activity:
    """Whether the main thread trains, saves or waits; any thread may ask.

    Args:
        coordinator: of this worker.
        members: the open members.

    Attributes:
        traces: the newest interval that is one of a member's first intervals, which
            trace and compile; the main thread writes it.
    """

    def __init__(self, coordinator: Coordinator, members: Members) -> None:
        self.traces = 0
        self._coordinator = coordinator
        self._members = members
        self._pauses = 0  # contexts in which hang detection is paused

    def heartbeat(self) -> Sign:
        """The number of boundaries so far, and whether a timeout holds for the next.

        In a fit only steps are watched: between steps an evaluation, or the callbacks
        of others, may run. The first steps trace and compile. A program that counts no
        steps, but enters watch scopes, may trace in each of its steps.
        """
        gate, armed = self._coordinator.gate, [m for m in self._members if m.is_armed]
        main = self._coordinator.state.main
        is_between = any(each.amid for each in self._members) and not gate.busy
        is_saving = self._coordinator.is_saving or main not in _TRAINS
        stage = Stage.STEPS
        if main in WAITS:
            stage = Stage.WAITS
        elif not (armed and gate.started) or is_between or is_saving or self._pauses:
            stage = Stage.APART
        elif self.traces == gate.started or not any(each.runs for each in armed):
            stage = Stage.FIRST
        return Sign(
            pid=pid_seen_by_supervisor(),
            boundaries=gate.started,
            step=sum(each.step for each in armed),
            stage=stage,
        )

    def now(self) -> Doing:
        """The activity of the main thread, for the status file."""
        main = self._coordinator.state.main
        if self._coordinator.is_saving or main not in (*_TRAINS, *_STANDS):
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


class StepTimer:
    """The mean duration of a step, without the evaluations between steps.

    Main thread; any thread may ask. Boundaries are counted as in the gate: by the
    intervals that were started.

    Args:
        clock: measures.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: float | None = None
        self._apart = 0.0  # seconds since then, and intervals, that are no step's
        self._no_steps = 0
        self._checked: tuple[int, float] | None = None  # the newest check, and when

    def begin(self, started: int) -> None:
        """Measures from now on: the first step, which traces its function, is over.

        Args:
            started: intervals so far.
        """
        self._since, self._no_steps, self._apart = self._clock.monotonic(), started, 0.0

    def check(self, started: int) -> None:
        """A boundary that no step follows; between two of these nothing is a step's.

        Args:
            started: intervals so far, that one included.
        """
        now, before = self._clock.monotonic(), self._checked
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
        passed = self._clock.monotonic() - self._since - self._apart
        return passed / max(1, started - self._no_steps)
