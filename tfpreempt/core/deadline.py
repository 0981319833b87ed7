"""By when things must happen: pure arithmetic on seconds.

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


def guard(deadline: float, total: float) -> float:
    """When the process ends itself although no boundary came.

    Args:
        deadline: when the machine goes.
        total: seconds from the notice to the deadline.
    """
    return deadline - min(1.0, 0.1 * total)


def counts_by(now: float, deadline: float, save: float | None, limit: float) -> float:
    """When the gatherer stops waiting for a worker's count.

    Counts come from threads that wait for nothing, so a late one means a dead or frozen
    worker; the rest of the time belongs to the save.

    Args:
        now: when gathering starts.
        deadline: when the machine goes.
        save: measured seconds of a save; None if unknown.
        limit: `save_timeout`; no wait for a peer is longer, however long the grace.
    """
    total = max(0.0, min(deadline - now, limit))
    reserve = total / 2 if save is None else min(SAFETY * save + 1.0, 0.8 * total)
    return now + max(0.1 * total, min(total - reserve, 0.4 * total))


def dones_by(now: float, deadline: float, limit: float) -> float:
    """When the chief stops waiting for the shards of the others."""
    total = max(0.0, min(deadline - now, limit))
    return now + 0.7 * total


def byes_by(now: float, deadline: float | None) -> float:
    """When the store's host stops waiting for the others to have left."""
    longest = 10.0
    return now + (
        longest if deadline is None else max(0.5, min(deadline - now, longest))
    )
