"""Detects hung workers: workers that reach no step boundary within a time limit.

A boundary is the moment between two steps. Workers report boundaries in heartbeats.
Decisions depend only on the heartbeats and on the times given by the caller.
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
"""Timeout derived from the measured step times."""

SHORTEST = 2.0
"""Shortest timeout in seconds; a shorter delay may be caused by a late poll."""

_LOOK_SECONDS = 0.5
# A longer gap between polls means that the supervisor was suspended.
_MOST_BETWEEN = 2.0
# Limit for phases in which tracing, compiling or C code takes long.
_LONG_SECONDS = 3600.0
_LEAST_SECONDS = 120.0
_STEPS = 20
_TRACES = 2  # times the first step: a later step may be traced and compiled again
_KEPT = 101  # number of step times for the median
# Phases that do not excuse a process that is stopped (state T).
_NOT_EXEMPT_IF_STOPPED = (WorkerPhase.APART, WorkerPhase.WAITS)


@dataclasses.dataclass(eq=False)
class WorkerProgress:
    """The progress of a worker, from its heartbeats. Times are in seconds.

    Args:
        timeout: seconds allowed without a boundary, or `AUTO`.

    Attributes:
        heartbeat: newest heartbeat; None before the first heartbeat.
    """

    timeout: float
    heartbeat: Heartbeat | None = None
    _number: int = -1
    _received_at: float = 0.0  # time of the newest heartbeat
    _at: Heartbeat | None = None  # heartbeat at the newest boundary or change of phase
    _since: float = 0.0  # time of `_at`
    _first: float = 0.0  # longest first step, with the work of the program before
    _times: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_KEPT)
    )

    def see(self, now: float, number: int, heartbeat: Heartbeat) -> None:
        """Processes the newest heartbeat of the worker.

        Args:
            now: present time.
            number: number of the heartbeat.
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
        steps = heartbeat.step - at.step  # 0 in a validation, which gives no step time
        if at.stage is WorkerPhase.FIRST or not at.boundaries:
            self._first = max(self._first, seconds)
        elif at.stage is WorkerPhase.STEPS and steps > 0:
            self._times.append(seconds / steps)

    @property
    def is_exempt(self) -> bool:
        """Whether the limit for steps does not apply to the worker now.

        True in a phase without steps (`APART`), and before the first heartbeat. Other
        workers may have to wait for this worker.

        Other workers may wait for such a worker.
        """
        return self.heartbeat is None or self.heartbeat.stage is WorkerPhase.APART

    @property
    def since(self) -> float:
        """Time when the limit begins."""
        return self._received_at if self.is_exempt else self._since

    @property
    def limit(self) -> float:
        """Seconds allowed without a boundary; in `APART`, without a heartbeat."""
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
        step: newest step, over all restarts.
        is_behind: whether another worker has reached more boundaries.
        stage: phase of the worker.
        seconds: seconds since the worker's newest boundary; in the phase `APART`, since
            the last heartbeat.
        state: state of the process according to the kernel, such as "T (stopped)".
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
        timeout: seconds without a boundary, or `AUTO`; None: no detection.
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
        """Returns the environment variables of a worker for its heartbeat."""
        return self._files[worker].to_environment() if self._files else {}

    def begin(self) -> None:
        """Clears the heartbeats before the workers are started."""
        for file in self._files:
            file.clear()
        self._progress = [WorkerProgress(self._timeout) for _ in self._files]
        self._asked = []

    def look(self, now: float, running: Sequence[int]) -> float | None:
        """Reads the heartbeats of the running workers, and computes when a hang is due.

        While some worker is exempt from the step limit (`WorkerProgress.is_exempt`),
        other workers may be waiting for it, so only exempt workers are checked, with
        their own limit. A stopped process (state T) is never exempt. Time in which the
        supervisor was suspended does not count.

        Args:
            now: monotonic seconds.
            running: indices of the running workers.

        Returns:
            The monotonic time when the first worker exceeds its limit. None if no limit
            applies, or if a hang was already detected and the stacks were requested.
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
        """Requests the stacks of the running workers; returns the workers' states."""
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
        """Returns the written stacks by worker; "" if a worker has written none."""
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
