"""Arithmetic of deadlines: pure functions on seconds.

Times are monotonic seconds of one process. A deadline never travels between processes,
only the seconds remaining until the deadline do.
"""

from __future__ import annotations

MESSAGE_DELAY_MARGIN = 0.5  # seconds of delay of a notice from a peer
LATEST_SHUTDOWN_SECONDS = (
    900.0  # seconds by which a termination may come later than announced
)
SAFETY = 1.5  # factor by which a save under pressure exceeds the last save


def remaining_after_delay(
    remaining: float, delay: float = MESSAGE_DELAY_MARGIN
) -> float:
    """Returns the remaining seconds of a grace period reported by another process.

    Args:
        remaining: reported seconds.
        delay: maximum age of the report in seconds. At most a fifth of a short grace
            period is subtracted, because a margin must not use up the time that it
            protects.
    """
    return remaining - min(delay, 0.2 * remaining)


def needed_seconds(save_seconds: float, grace: float) -> float:
    """Returns the seconds of a grace period needed for a save, margins included.

    Args:
        save_seconds: duration of the save.
        grace: seconds of the grace period.
    """
    return SAFETY * save_seconds + min(2.0, 0.25 * grace)


def until_end(grace: float) -> float:
    """Returns the seconds from a notice until a process ends itself to avoid a kill.

    Args:
        grace: seconds from the notice until the machine is terminated.
    """
    return grace - min(1.0, 0.1 * grace)
