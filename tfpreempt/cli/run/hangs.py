"""Whether the workers get on: a boundary is a sign of life, and each is due in a time.

What it has seen, and when, decides; nobody here reads a clock.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfpreempt.core.life import LifeFile, Sign, Stage

AUTO = -1.0
"""As long as steps take, many times over."""

SHORTEST = 2.0
"""Seconds that can be told from looking late."""

_LOOK_SECONDS = 0.5
_MOST_BETWEEN = 2.0  # two looks; all the rest the supervisor itself stood still
_LONG_SECONDS = 3600.0  # to trace and compile; and to hold the interpreter's lock
_LEAST_SECONDS = 120.0
_STEPS = 20
_TRACES = 2  # a step may have to be traced and compiled again
_KEPT = 101  # step times
_TAKEN_BACK = (Stage.APART, Stage.WAITS)  # where the process is stopped


@dataclasses.dataclass(eq=False)
class Life:
    """What is known of how one worker gets on; times are seconds.

    Args:
        timeout: without a boundary, or `AUTO`.

    Attributes:
        sign: the newest.
    """

    timeout: float
    sign: Sign | None = None
    _beat: int = -1
    _heard: float = 0.0  # the newest beat: the process runs
    _at: Sign | None = None  # of the newest boundary, or change of stage
    _since: float = 0.0  # that was
    _first: float = 0.0  # the longest of the first steps, and what was before them
    _times: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_KEPT)
    )

    def see(self, now: float, beat: int, sign: Sign) -> None:
        """The newest sign is looked at.

        Args:
            now: when.
            beat: its number.
            sign: says how far the worker is.
        """
        self.sign = sign
        if beat != self._beat:
            self._beat, self._heard = beat, now
        at = self._at
        if at and (at.boundaries, at.stage) == (sign.boundaries, sign.stage):
            return
        seconds, self._at, self._since = now - self._since, sign, now
        if at is None:
            return
        steps = sign.step - at.step  # none in a validation: it tells nothing of them
        if at.stage is Stage.FIRST or not at.boundaries:
            self._first = max(self._first, seconds)
        elif at.stage is Stage.STEPS and steps > 0:
            self._times.append(seconds / steps)

    @property
    def is_apart(self) -> bool:
        """Whether it may take as long as it takes; others may wait for it then."""
        return self.sign is None or self.sign.stage is Stage.APART

    @property
    def since(self) -> float:
        """From when on its limit counts."""
        return self._heard if self.is_apart else self._since

    @property
    def limit(self) -> float:
        """How long it may give no sign: no boundary, or where it is apart no beat."""
        if self.sign is None or self.sign.stage is Stage.WAITS:
            return math.inf
        if self.sign.stage is not Stage.STEPS:
            return max(_LONG_SECONDS, self.timeout)
        if self.timeout != AUTO:
            return self.timeout
        median = statistics.median(self._times or [0.0])
        return max(_LEAST_SECONDS, _STEPS * median, _TRACES * self._first)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """One of the workers that hang together.

    Attributes:
        worker: its index.
        step: that it has made, over all restarts.
        is_behind: whether another one has come to more boundaries.
        stage: what it is in.
        seconds: since its newest boundary; where it is apart, since it told anything.
        state: of its process, as the kernel says it, such as "T (stopped)".
    """

    worker: int
    step: int
    is_behind: bool
    stage: Stage
    seconds: float
    state: str


class Watch:
    """Looks after the workers of a supervisor. Main thread.

    Args:
        timeout: seconds without a boundary, or `AUTO`; None looks after none.
        workers: how many there are.
    """

    def __init__(self, timeout: float | None, workers: int) -> None:
        self._timeout = AUTO if timeout is None else timeout
        count = 0 if timeout is None else workers
        self._files = [LifeFile() for _ in range(count)]
        self._lives: list[Life] = []
        self._asked: list[int] = []
        self._now = self._looked = 0.0

    def to_environment(self, worker: int) -> Mapping[str, str]:
        """What a worker is told."""
        return self._files[worker].to_environment() if self._files else {}

    def begin(self) -> None:
        """The workers are about to be started."""
        for file in self._files:
            file.clear()
        self._lives = [Life(self._timeout) for _ in self._files]
        self._asked = []

    def look(self, now: float, running: Sequence[int]) -> float | None:
        """Looks at those that run.

        Where one is in what takes as long as it takes, the others may wait for it; one
        that is stopped is in nothing. Time in which this process itself stood still, as
        with a machine or a job that is suspended, does not count.

        Returns:
            When the first of them will have had its time; None where that is open, or
            they were asked for their stacks.
        """
        self._now += min(now - self._looked, _MOST_BETWEEN)
        self._looked = now
        if not self._files or not running or self._asked:
            return None
        for worker in running:
            if not (told := self._files[worker].read()):
                continue
            beat, sign = told
            state = _state(sign.pid)
            if not state:  # another program may follow in the same shell
                self._files[worker].clear()
                self._lives[worker] = Life(self._timeout)
                continue
            if sign.stage in _TAKEN_BACK and state.startswith("T"):
                sign = dataclasses.replace(sign, stage=Stage.STEPS)
            self._lives[worker].see(self._now, beat, sign)
        lives = [self._lives[worker] for worker in running]
        awaited = [life for life in lives if life.is_apart] or lives
        due = min(life.since + life.limit for life in awaited)
        return None if due == math.inf else now + due - self._now

    @property
    def next_look(self) -> float | None:
        """Seconds until it; None where there is nobody to look after."""
        return _LOOK_SECONDS if self._files else None

    def ask_for_stacks(self, running: Sequence[int]) -> list[Hang]:
        """Those that run write their stacks, if they can; returns how they hang."""
        signs = {each: sign for each in running if (sign := self._lives[each].sign)}
        ahead = max(sign.boundaries for sign in signs.values())
        hangs = []
        for worker, sign in signs.items():
            life, state = self._lives[worker], _state(sign.pid)
            hangs.append(
                Hang(
                    worker=worker,
                    step=sign.step,
                    is_behind=sign.boundaries < ahead,
                    stage=sign.stage,
                    seconds=self._now - life.since,
                    state=state or "has ended",
                )
            )
            self._files[worker].ask_for_stacks(sign.pid)
        self._asked = list(signs)
        return hangs

    def stacks(self) -> dict[int, str]:
        """What those wrote that were asked, by worker; empty where one could not."""
        return {worker: self._files[worker].stacks() for worker in self._asked}

    def close(self) -> None:
        """Takes back what was lent."""
        for file in self._files:
            file.close()


def _state(pid: int) -> str:
    """Of a process; empty where it has ended."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        state = status.partition("State:")[2].partition("\n")[0].strip()
        return "" if state.startswith(("Z", "X")) else state
    return ""
