"""Detects hung workers: workers that reach no step boundary within a time limit.

A boundary is the moment between two steps. Workers report boundaries in heartbeats. The
detector reads no clock: the caller passes the time.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfpreempt.core.heartbeat import Heartbeat, HeartbeatFile, WorkerPhase

AUTO = -1.0
"""Value of a timeout that is computed from the measured step times."""

SHORTEST = 2.0
"""Shortest timeout in seconds. A shorter timeout could pass only because a poll of the
heartbeats was late."""

_LOOK_SECONDS = 0.5
# If more seconds pass between two polls, the supervisor was suspended, and the further
# seconds do not count.
_MOST_BETWEEN = 2.0
# Timeout for phases in which tracing, compiling or C code takes long.
_LONG_SECONDS = 3600.0
_LEAST_SECONDS = 120.0  # AUTO allows at least so many seconds
_STEPS = 20  # AUTO allows so many times the median step time
_TRACES = 2  # AUTO allows twice the first step, since a later step may be traced again
_KEPT = 101  # number of step times for the median
# In these phases the timeout for steps is off, unless the kernel has stopped the
# process (state T).
_NOT_EXEMPT_IF_STOPPED = (WorkerPhase.APART, WorkerPhase.WAITS)


@dataclasses.dataclass(eq=False)
class WorkerProgress:
    """The progress of a worker, computed from its heartbeats. Times are in seconds.

    Args:
        timeout: maximum seconds between two boundaries, or `AUTO`.

    Attributes:
        heartbeat: newest heartbeat; None before the first heartbeat.
    """

    timeout: float
    heartbeat: Heartbeat | None = None
    _number: int = -1
    _received_at: float = 0.0  # time of the newest heartbeat
    _at: Heartbeat | None = None  # heartbeat at the newest boundary or change of phase
    _since: float = 0.0  # time of `_at`
    _first: float = 0.0  # longest first step, including the program's work before it
    _times: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_KEPT)
    )

    def see(self, now: float, number: int, heartbeat: Heartbeat) -> None:
        """Processes the newest heartbeat of the worker.

        Args:
            now: current time, in seconds.
            number: number of the heartbeat; each heartbeat has a new number.
            heartbeat: contents of the heartbeat.
        """
        self.heartbeat = heartbeat
        if number != self._number:
            self._number, self._received_at = number, now
        at = self._at
        if at and (at.boundaries, at.stage) == (heartbeat.boundaries, heartbeat.stage):
            return
        seconds, self._at, self._since = now - self._since, heartbeat, now
        if at is None:
            return
        # During a validation no step is trained, and no step time is measured.
        steps = heartbeat.step - at.step
        if at.stage is WorkerPhase.FIRST or not at.boundaries:
            self._first = max(self._first, seconds)
        elif at.stage is WorkerPhase.STEPS and steps > 0:
            self._times.append(seconds / steps)

    @property
    def is_exempt(self) -> bool:
        """Whether the worker is in a phase without steps, so the step timeout is off.

        True in the phase `APART`, and before the first heartbeat. Other workers may
        have to wait for such a worker.
        """
        return self.heartbeat is None or self.heartbeat.stage is WorkerPhase.APART

    @property
    def since(self) -> float:
        """Time from which `limit` counts: the newest boundary.

        In a phase without steps: the newest heartbeat.
        """
        return self._received_at if self.is_exempt else self._since

    @property
    def limit(self) -> float:
        """Maximum seconds between two boundaries; in `APART`, between heartbeats."""
        if self.heartbeat is None or self.heartbeat.stage is WorkerPhase.WAITS:
            return math.inf
        if self.heartbeat.stage is not WorkerPhase.STEPS:
            return max(_LONG_SECONDS, self.timeout)
        if self.timeout != AUTO:
            return self.timeout
        median = statistics.median(self._times or [0.0])
        return max(_LEAST_SECONDS, _STEPS * median, _TRACES * self._first)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """The state of one worker when a hang was detected.

    Attributes:
        worker: index of the worker.
        step: newest step of the worker, over all restarts.
        is_behind: whether another worker has reached more boundaries.
        stage: phase of the worker.
        seconds: seconds since the worker's newest boundary; in the phase `APART`, since
            the last heartbeat.
        state: the kernel's state of the process, such as "T (stopped)".
    """

    worker: int
    step: int
    is_behind: bool
    stage: WorkerPhase
    seconds: float
    state: str


class HangDetector:
    """Detects hangs of a supervisor's workers. Use on the main thread only.

    Args:
        timeout: maximum seconds between two boundaries, or `AUTO`; None: no detection.
        workers: number of workers.
    """

    def __init__(self, timeout: float | None, workers: int) -> None:
        self._timeout = AUTO if timeout is None else timeout
        count = 0 if timeout is None else workers
        self._files = [HeartbeatFile() for _ in range(count)]
        self._progress: list[WorkerProgress] = []
        self._asked: list[int] = []
        self._now = self._looked = 0.0

    def to_environment(self, worker: int) -> Mapping[str, str]:
        """Returns the environment variables with which a worker sends heartbeats."""
        return self._files[worker].to_environment() if self._files else {}

    def begin(self) -> None:
        """Clears the heartbeats before the workers are started."""
        for file in self._files:
            file.clear()
        self._progress = [WorkerProgress(self._timeout) for _ in self._files]
        self._asked = []

    def look(self, now: float, running: Sequence[int]) -> float | None:
        """Reads the heartbeats of the running workers, and computes the next timeout.

        While a worker is in a phase without steps (`WorkerProgress.is_exempt`), other
        workers may be waiting for this worker. So as long as there is such a worker,
        only such workers are checked, with the longer timeout of these phases. A
        process that the kernel has stopped (state T) never counts as being in such a
        phase. Time in which the supervisor was suspended does not count.

        Args:
            now: current time on the monotonic clock.
            running: indices of the running workers.

        Returns:
            The time on the monotonic clock at which the first timeout passes, if no
            worker makes progress. None if no timeout applies, or if a hang was already
            detected and the stacks were requested.
        """
        self._now += min(now - self._looked, _MOST_BETWEEN)
        self._looked = now
        if not self._files or not running or self._asked:
            return None
        for worker in running:
            if not (found := self._files[worker].read()):
                continue
            number, heartbeat = found
            state = _state(heartbeat.pid)
            if not state:  # the process has ended; a shell may start another program
                self._files[worker].clear()
                self._progress[worker] = WorkerProgress(self._timeout)
                continue
            if heartbeat.stage in _NOT_EXEMPT_IF_STOPPED and state.startswith("T"):
                heartbeat = dataclasses.replace(heartbeat, stage=WorkerPhase.STEPS)
            self._progress[worker].see(self._now, number, heartbeat)
        workers = [self._progress[worker] for worker in running]
        awaited = [progress for progress in workers if progress.is_exempt] or workers
        due = min(progress.since + progress.limit for progress in awaited)
        return None if due == math.inf else now + due - self._now

    @property
    def next_look(self) -> float | None:
        """Seconds until the next poll; None without hang detection."""
        return _LOOK_SECONDS if self._files else None

    def ask_for_stacks(self, running: Sequence[int]) -> list[Hang]:
        """Makes the running workers write their stacks; returns the workers' states."""
        heartbeats = {
            each: heartbeat
            for each in running
            if (heartbeat := self._progress[each].heartbeat)
        }
        ahead = max(heartbeat.boundaries for heartbeat in heartbeats.values())
        hangs = []
        for worker, heartbeat in heartbeats.items():
            progress, state = self._progress[worker], _state(heartbeat.pid)
            hangs.append(
                Hang(
                    worker=worker,
                    step=heartbeat.step,
                    is_behind=heartbeat.boundaries < ahead,
                    stage=heartbeat.stage,
                    seconds=self._now - progress.since,
                    state=state or "has ended",
                )
            )
            self._files[worker].ask_for_stacks(heartbeat.pid)
        self._asked = list(heartbeats)
        return hangs

    def stacks(self) -> dict[int, str]:
        """Returns the stacks that every worker has written; "" if none."""
        return {worker: self._files[worker].stacks() for worker in self._asked}

    def close(self) -> None:
        """Closes the heartbeat files."""
        for file in self._files:
            file.close()


def _state(pid: int) -> str:
    """Returns the kernel's state of a process; "" if the process has ended."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        state = status.partition("State:")[2].partition("\n")[0].strip()
        return "" if state.startswith(("Z", "X")) else state
    return ""
