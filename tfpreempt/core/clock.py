"""Time as an argument: the clock that everything else is given."""

from __future__ import annotations

import os
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


def process_seconds() -> float | None:
    """How long this process has been there; None where the system does not say."""
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # its name may have spaces
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, ValueError, IndexError, AttributeError):
        return None
