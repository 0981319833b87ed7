"""Virtual time: the queue of events of a simulation, and its clock.

Times are whole milliseconds, so that equal schedules give equal runs to the last event.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable


class Process:
    """Faults that a simulated machine can apply to all code of a process."""

    __slots__ = ("frozen_from", "frozen_until", "gone_at")

    def __init__(self) -> None:
        self.frozen_from = 0
        self.frozen_until = 0
        self.gone_at: int | None = None

    def silent_since(self, now: int) -> int | None:
        """Time of the last heartbeat; None: the process runs."""
        if self.gone_at is not None:
            return self.gone_at
        return self.frozen_from if now < self.frozen_until else None


class Timeline:
    """Events in the order of their times, equal times in the order of the calls.

    It is a `Clock` too: `monotonic` and `wall` show the virtual time in seconds.

    Attributes:
        now: the virtual time in milliseconds.
    """

    def __init__(self) -> None:
        self.now = 0
        self._queue: list[tuple[int, int, Callable[[], None], Process | None]] = []
        self._numbers = itertools.count()

    def monotonic(self) -> float:
        return self.now / 1000

    def wall(self) -> float:
        return self.now / 1000

    def at(
        self, when: int, call: Callable[[], None], process: Process | None = None
    ) -> None:
        """Calls `call` at a time, but never in the past.

        Args:
            when: time in milliseconds.
            call: the event.
            process: process of the event: the event is late if the process is frozen,
                and does not happen if the process has ended.
        """
        when = max(when, self.now)
        heapq.heappush(self._queue, (when, next(self._numbers), call, process))

    def after(
        self, wait: int, call: Callable[[], None], process: Process | None = None
    ) -> None:
        """Calls `call` so many milliseconds from now."""
        self.at(self.now + wait, call, process)

    def step(self, until: int) -> bool:
        """Lets the next event happen; False if there is none up to that time."""
        while self._queue and self._queue[0][0] <= until:
            when, number, call, process = heapq.heappop(self._queue)
            if process is not None:
                if process.gone_at is not None:
                    continue
                if when < process.frozen_until:
                    late = (process.frozen_until, number, call, process)
                    heapq.heappush(self._queue, late)
                    continue
            self.now = when
            call()
            return True
        return False


def milliseconds(seconds: float) -> int:
    """The first whole millisecond at which the clock shows at least this time."""
    found = math.floor(seconds * 1000) - 1
    while found / 1000 < seconds:
        found += 1
    return found
