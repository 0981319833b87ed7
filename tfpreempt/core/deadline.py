"""Arithmetic of deadlines: functions on seconds.

Times are monotonic seconds of one process. Processes exchange the seconds remaining
until a deadline, and never the deadline itself, because their clocks differ.
"""

from __future__ import annotations

MESSAGE_DELAY_MARGIN = 0.5  # seconds that a notice from a peer may be delayed
LATEST_SHUTDOWN_SECONDS = (
    900.0  # seconds by which a termination may come later than announced
)
SAFETY = 1.5  # a save after a notice is assumed to take 1.5 times the last save


def remaining_after_delay(
    remaining: float, delay: float = MESSAGE_DELAY_MARGIN
) -> float:
    """Returns the seconds left of a grace period that another process has reported.

    The delay of the report is subtracted, but at most a fifth of the reported seconds:
    for a short grace period the margin must not take all the time.

    Args:
        remaining: reported seconds.
        delay: maximum age of the report in seconds.
    """
    return remaining - min(delay, 0.2 * remaining)


def needed_seconds(save_seconds: float, grace: float) -> float:
    """Returns the seconds to reserve for a save in a grace period, with margins.

    Args:
        save_seconds: duration of the save.
        grace: seconds of the grace period.
    """
    return SAFETY * save_seconds + min(2.0, 0.25 * grace)


def until_end(grace: float) -> float:
    """Returns the seconds from a notice until a process must have ended itself.

    The process ends shortly before the machine is terminated.

    Args:
        grace: seconds from the notice until the machine is terminated.
    """
    return grace - min(1.0, 0.1 * grace)
