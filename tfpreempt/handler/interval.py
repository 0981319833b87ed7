"""How often to take a snapshot: as often as training does not notice it.

As CheckFreq (Mohan et al., FAST 2021) does, the interval follows from what a snapshot
costs here: the time for which training stands still, and what the steps lose that run
while it is written. Each snapshot is followed by a time that makes this at most a
hundredth, and is measured itself. The first one of a process says little: it also makes
what the others find made, and takes several times as long.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics

SHARE = 0.008
"""What snapshots may take of the time of training.

A hundredth is promised; the rest is for what measuring misses.
"""

SHORTEST = 1.0
"""Seconds between two snapshots, at least: to lose less is worth nothing."""

WARM_UP = 5.0
"""Seconds after the first snapshot at which there is a second one, at the latest."""

_COSTS = 3  # snapshots of which the middle one counts: one may meet a busy machine
_WINDOWS = 5  # times without a snapshot, over which the length of a step is known


@dataclasses.dataclass(eq=False)
class Interval:
    """Chooses when the next snapshot is due. Seconds are of any one clock.

    Args:
        share: what snapshots may cost of the time.
        shortest: the shortest interval.
    """

    share: float = SHARE
    shortest: float = SHORTEST
    _is_first: bool = True
    _windows: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_WINDOWS)
    )

    _costs: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_COSTS)
    )

    @property
    def step_seconds(self) -> float | None:
        """How long a step takes while no snapshot is written; None while unknown."""
        return statistics.median(self._windows) if self._windows else None

    def undisturbed(self, seconds: float, steps: float) -> None:
        """Training went on for a time in which no snapshot was written.

        Args:
            seconds: how long.
            steps: that were made in it; none says nothing.
        """
        if seconds > 0 and steps > 0:
            self._windows.append(seconds / steps)

    def after(self, *, stood: float, beside: float, steps: float) -> float:
        """The interval that one snapshot asks for.

        Args:
            stood: seconds for which training stood still.
            beside: seconds from then on, to the first end of a step after it was
                written.
            steps: that were made in that time.

        Returns:
            Seconds from the beginning of that snapshot to the beginning of the next.
        """
        step = self.step_seconds
        lost = beside if step is None else max(0.0, beside - steps * step)
        seconds = (stood + lost) / self.share
        if self._is_first:
            self._is_first = False
            seconds = min(seconds, WARM_UP)
        else:
            self._costs.append(seconds)
            seconds = statistics.median(self._costs)
        return max(self.shortest, seconds, stood + beside)
