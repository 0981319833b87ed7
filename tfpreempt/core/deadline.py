"""What a told deadline is reckoned with: pure arithmetic on seconds.

All times are monotonic seconds of one process; a deadline never travels between
processes, only the seconds that remain until it do.
"""

from __future__ import annotations

TRAVEL_MARGIN = 0.5  # a notice from a peer is this much older than it says
LATE = 900.0  # a machine that was told to go may still be there this much later
SAFETY = 1.5  # a save under pressure takes this much longer than the last one


def after_travel(remaining: float, delay: float = TRAVEL_MARGIN) -> float:
    """What is left of a grace that was told somewhere else, some time ago.

    Args:
        remaining: seconds as told.
        delay: seconds that it may be old; of a short grace a fifth at most, because a
            margin must not use up what it protects.
    """
    return remaining - min(delay, 0.2 * remaining)


def needed_seconds(save_seconds: float, grace: float) -> float:
    """What a save of that length needs of a grace period, margins included."""
    return SAFETY * save_seconds + min(2.0, 0.25 * grace)


def until_end(grace: float) -> float:
    """When a process ends itself, rather than be killed: seconds after the notice.

    Args:
        grace: seconds from the notice until the machine goes.
    """
    return grace - min(1.0, 0.1 * grace)
