"""Time as an argument: the clock passed to every other package."""

from __future__ import annotations

import os
import time
from typing import Protocol


class Clock(Protocol):
    """A time source. Durations use `monotonic`, records also use `wall`."""

    def monotonic(self) -> float:
        """Returns seconds on a clock that never goes back; the zero has no meaning."""
        ...

    def wall(self) -> float:
        """Returns seconds since the Unix epoch, for records read by people only."""
        ...


class SystemClock:
    """The clock of this machine."""

    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)


def process_seconds() -> float | None:
    """Returns the age of the process in seconds; None without /proc."""
    try:
        with open("/proc/self/stat", "rb") as file:
            # The process name, in parentheses, may have spaces.
            fields = file.read().rpartition(b")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, ValueError, IndexError, AttributeError):
        return None
