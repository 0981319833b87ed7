"""The interface of clocks, and the clock of the machine.

Every package receives the clock as an argument, so that tests can pass another clock.
"""

from __future__ import annotations

import os
import time
from typing import Protocol


class Clock(Protocol):
    """A time source: `monotonic` for durations, `wall` for the dates of records."""

    def monotonic(self) -> float:
        """Returns the seconds since an arbitrary moment; the value never decreases."""
        ...

    def wall(self) -> float:
        """Returns the seconds since the Unix epoch.

        The value is only for records that people read, because it may jump.
        """
        ...


class SystemClock:
    """The clock of this machine."""

    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)


def process_seconds(pid: int | None = None) -> float | None:
    """Returns the seconds since a process of this machine started.

    Args:
        pid: id of the process; None: this process.

    Returns:
        The seconds; None if there is no such process, or /proc is not readable.
    """
    try:
        with open(f"/proc/{pid or 'self'}/stat", "rb") as file:
            # Fields after the process name: it is in parentheses, and may have spaces.
            fields = file.read().rpartition(b")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, ValueError, IndexError, AttributeError):
        return None
