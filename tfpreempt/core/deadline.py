"""Arithmetic of deadlines: functions on seconds.

A process stores a deadline as a time on its monotonic clock. Processes exchange the
seconds that remain until a deadline, never the deadline, because their clocks differ.
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

    The result is `remaining - delay`, but at least 0.8 times `remaining`, because the
    subtraction must not use up a short grace period.

    Args:
        remaining: seconds left when the other process sent the report.
        delay: maximum seconds between the sending and the receipt of the report.
    """
    return remaining - min(delay, 0.2 * remaining)


def needed_seconds(save_seconds: float, grace: float) -> float:
    """Returns the seconds to reserve for a save in a grace period.

    The result is longer than the save: a save may be slower after a notice.

    Args:
        save_seconds: expected duration of the save.
        grace: length of the grace period in seconds.
    """
    return SAFETY * save_seconds + min(2.0, 0.25 * grace)


def until_end(grace: float) -> float:
    """Returns the seconds after a notice at which the process must have exited.

    This moment is shortly before the machine is terminated.

    Args:
        grace: seconds from the notice until the machine is terminated.
    """
    return grace - min(1.0, 0.1 * grace)
