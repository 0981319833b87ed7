"""When to commit without a notice: `save_freq` in terms of train steps."""

from __future__ import annotations

import datetime

NEVER = 1 << 62


class Schedule:
    """Every so many batches, or after each epoch.

    A `timedelta` is left to the handler, because the workers must agree on a step.

    Args:
        save_freq: as the user gave it.
    """

    def __init__(self, save_freq: str | int | datetime.timedelta | None) -> None:
        self._every = save_freq if isinstance(save_freq, int) else None
        self._each_epoch = save_freq == "epoch"
        self._epoch: int | None = None

    def goes_on_in(self, epoch: int) -> None:
        """Training goes on in an epoch whose beginning is committed."""
        self._epoch = epoch

    def is_due(self, epoch: int, steps: int, steps_per_execution: int) -> bool:
        """Whether to commit before the next step; asked once for each.

        Args:
            epoch: that the next step belongs to.
            steps: train steps so far, restarts included.
            steps_per_execution: batches of a train step.
        """
        if self._every is not None:
            return steps % _steps_of(self._every, steps_per_execution) == 0
        before, self._epoch = self._epoch, epoch
        return self._each_epoch and before not in (None, epoch)

    def steps_left(self, steps: int, steps_per_execution: int) -> int:
        """Train steps until `is_due` must be asked again, but for a new epoch."""
        if self._every is None:
            return NEVER
        each = _steps_of(self._every, steps_per_execution)
        return each - steps % each


def _steps_of(batches: int, steps_per_execution: int) -> int:
    """Train steps that train at least so many batches."""
    return -(-batches // steps_per_execution)
