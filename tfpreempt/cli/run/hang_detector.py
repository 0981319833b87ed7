"""Detects hung workers: workers without a step boundary within a time limit.

Decisions depend on the observed heartbeats and the times passed in; no clock is read
here.
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
_MOST_BETWEEN = 2.0  # between polls; in a longer gap the supervisor was suspended
_LONG_SECONDS = 3600.0  # for tracing and compiling, or with the interpreter lock held
_LEAST_SECONDS = 120.0
_STEPS = 20
_TRACES = 2  # a later step may be traced and compiled again
_KEPT = 101  # number of step times in the median
_TAKEN_BACK = (WorkerPhase.APART, WorkerPhase.WAITS)  # do not excuse a stopped process


@dataclasses.dataclass(eq=False)
class WorkerProgress:
    """Progress of a worker; times are in seconds.

    Args:
        timeout: seconds allowed without a boundary, or `AUTO`.

    Attributes:
        heartbeat: newest heartbeat; None before the first.
    """

    timeout: float
    heartbeat: Heartbeat | None = None
    _beat: int = -1
    _heard: float = 0.0  # time of the newest heartbeat
    _at: Heartbeat | None = None  # heartbeat at the newest boundary, or change of stage
    _since: float = 0.0  # time of that heartbeat
    _first: float = 0.0  # longest of the first steps, with the work before them
    _times: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_KEPT)
    )

    def see(self, now: float, beat: int, heartbeat: Heartbeat) -> None:
        """Takes in the newest heartbeat.

        Args:
            now: present time.
            beat: number of the heartbeat.
            heartbeat: contents of the heartbeat.
        """
        self.heartbeat = heartbeat
        if beat != self._beat:
            self._beat, self._heard = beat, now
        at = self._at
        if at and (at.boundaries, at.stage) == (heartbeat.boundaries, heartbeat.stage):
            return
        seconds, self._at, self._since = now - self._since, heartbeat, now
        if at is None:
            return
        steps = heartbeat.step - at.step  # 0 during validation: no step time
        if at.stage is WorkerPhase.FIRST or not at.boundaries:
            self._first = max(self._first, seconds)
        elif at.stage is WorkerPhase.STEPS and steps > 0:
            self._times.append(seconds / steps)

    @property
    def is_exempt(self) -> bool:
        """Whether the worker is in a phase without a step limit, or sent no heartbeat.

        Other workers may wait for such a worker.
        """
        return self.heartbeat is None or self.heartbeat.stage is WorkerPhase.APART

    @property
    def since(self) -> float:
        """Time from which the limit counts."""
        return self._heard if self.is_exempt else self._since

    @property
    def limit(self) -> float:
        """Seconds allowed without a boundary, or in `APART` without a heartbeat."""
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
    """A worker among several that hang together.

    Attributes:
        worker: index of the worker.
        step: newest step, over all restarts.
        is_behind: whether another worker has reached more boundaries.
        stage: stage of the worker.
        seconds: seconds since its newest boundary; in an `APART` phase, since its last
            heartbeat.
        state: state of its process as shown by the kernel, such as "T (stopped)".
    """

    worker: int
    step: int
    is_behind: bool
    stage: WorkerPhase
    seconds: float
    state: str


class HangDetector:
    """Detects hangs of a supervisor's workers. Main thread.

    Args:
        timeout: seconds without a boundary, or `AUTO`; None: no detection.
        workers: number of workers.
    """

    def __init__(self, timeout: float | None, workers: int) -> None:
        self._timeout = AUTO if timeout is None else timeout
        count = 0 if timeout is None else workers
        self._files = [HeartbeatFile() for _ in range(count)]
        self._lives: list[WorkerProgress] = []
        self._asked: list[int] = []
        self._now = self._looked = 0.0

    def to_environment(self, worker: int) -> Mapping[str, str]:
        """Returns the environment variables of a worker for its heartbeat."""
        return self._files[worker].to_environment() if self._files else {}

    def begin(self) -> None:
        """Clears the heartbeats before the workers are started."""
        for file in self._files:
            file.clear()
        self._lives = [WorkerProgress(self._timeout) for _ in self._files]
        self._asked = []

    def look(self, now: float, running: Sequence[int]) -> float | None:
        """Reads the heartbeats of the running workers.

        While a worker is in a phase without a step limit, the other workers may wait
        for it, so only workers in such a phase count then. A stopped process (state T)
        is in no such phase. Time in which the supervisor itself was suspended, with its
        machine or job, does not count.

        Args:
            now: monotonic seconds.
            running: indices of the running workers.

        Returns:
            The time at which the first worker exceeds its limit; None without a limit,
            or after the workers were asked for their stacks.
        """
        self._now += min(now - self._looked, _MOST_BETWEEN)
        self._looked = now
        if not self._files or not running or self._asked:
            return None
        for worker in running:
            if not (told := self._files[worker].read()):
                continue
            beat, heartbeat = told
            state = _state(heartbeat.pid)
            if not state:  # ended; the shell may start another program next
                self._files[worker].clear()
                self._lives[worker] = WorkerProgress(self._timeout)
                continue
            if heartbeat.stage in _TAKEN_BACK and state.startswith("T"):
                heartbeat = dataclasses.replace(heartbeat, stage=WorkerPhase.STEPS)
            self._lives[worker].see(self._now, beat, heartbeat)
        lives = [self._lives[worker] for worker in running]
        awaited = [life for life in lives if life.is_exempt] or lives
        due = min(life.since + life.limit for life in awaited)
        return None if due == math.inf else now + due - self._now

    @property
    def next_look(self) -> float | None:
        """Seconds until the next poll; None without hang detection."""
        return _LOOK_SECONDS if self._files else None

    def ask_for_stacks(self, running: Sequence[int]) -> list[Hang]:
        """Asks running workers for their stacks; returns the state of the workers."""
        heartbeats = {
            each: heartbeat
            for each in running
            if (heartbeat := self._lives[each].heartbeat)
        }
        ahead = max(heartbeat.boundaries for heartbeat in heartbeats.values())
        hangs = []
        for worker, heartbeat in heartbeats.items():
            life, state = self._lives[worker], _state(heartbeat.pid)
            hangs.append(
                Hang(
                    worker=worker,
                    step=heartbeat.step,
                    is_behind=heartbeat.boundaries < ahead,
                    stage=heartbeat.stage,
                    seconds=self._now - life.since,
                    state=state or "has ended",
                )
            )
            self._files[worker].ask_for_stacks(heartbeat.pid)
        self._asked = list(heartbeats)
        return hangs

    def stacks(self) -> dict[int, str]:
        """Returns the stacks by worker; empty text for a worker without stacks."""
        return {worker: self._files[worker].stacks() for worker in self._asked}

    def close(self) -> None:
        """Closes the heartbeat files."""
        for file in self._files:
            file.close()


def _state(pid: int) -> str:
    """Returns the state of a process; empty if the process has ended."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        state = status.partition("State:")[2].partition("\n")[0].strip()
        return "" if state.startswith(("Z", "X")) else state
    return ""
