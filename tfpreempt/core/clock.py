"""Time as an argument: the clock that everything else is given."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where time comes from. Durations use `monotonic`, records also use `wall`."""

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back; its zero means nothing."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch, for records read by people only."""
        ...


class SystemClock:
    """The clock of this machine."""

    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)
