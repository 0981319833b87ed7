"""The clock, which every package receives as an argument, so that tests can set it."""

from __future__ import annotations

import os
import time
from typing import Protocol


class Clock(Protocol):
    """A time source: `monotonic` for durations, `wall` for the times of records."""

    def monotonic(self) -> float:
        """Returns seconds on a clock that never goes back, from an arbitrary zero."""
        ...

    def wall(self) -> float:
        """Returns seconds since the Unix epoch, for records read by people only."""
        ...


class SystemClock:
    """The clock of this machine."""

    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)


def process_seconds() -> float | None:
    """Returns the age of the process in seconds; None if there is no /proc."""
    try:
        with open("/proc/self/stat", "rb") as file:
            # Fields after the process name: it is in parentheses, and may have spaces.
            fields = file.read().rpartition(b")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, ValueError, IndexError, AttributeError):
        return None
