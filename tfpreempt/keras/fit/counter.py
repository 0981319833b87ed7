"""Counts the batches of one fit, in the epoch and from the iterator.

Both are kept as differences of the handler's runs, so that a step counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable


class BatchCounter:
    """See above.

    Args:
        runs: train steps of this process so far.
        steps_per_execution: batches of a train step.

    Attributes:
        epoch: the epoch that runs.
        steps_per_execution: see above; may change from epoch to epoch.
        limit: batches at which Keras cuts the last step of an epoch short; None: never.
    """

    def __init__(self, runs: Callable[[], int], steps_per_execution: int) -> None:
        self.epoch = 0
        self.steps_per_execution = steps_per_execution
        self.limit: int | None = None
        self._runs = runs
        self._mark = (0, 0)  # runs, batches of the epoch by then
        self._before_epoch = 0  # batches of the iterator before this epoch

    @property
    def epoch_batches(self) -> int:
        """Batches of this epoch that are trained."""
        batches = self.last_step + self.steps_per_execution
        return batches if self.limit is None else min(batches, self.limit)

    @property
    def last_step(self) -> int:
        """The first batch of the newest step in this epoch."""
        runs, batches = self._mark
        return batches + (self._runs() - runs - 1) * self.steps_per_execution

    @property
    def iterator_batches(self) -> int:
        """Batches that were taken from the current iterator."""
        return self._before_epoch + self.epoch_batches

    def epoch_begins(
        self, epoch: int, steps_per_execution: int, limit: int | None
    ) -> None:
        """No batch of it is trained yet."""
        self._before_epoch = self.iterator_batches
        self.epoch, self.limit = epoch, limit
        self.steps_per_execution = steps_per_execution
        self._mark = (self._runs(), 0)

    def epoch_stands_at(self, batches: int) -> None:
        """So many batches of the epoch are trained now."""
        self._mark = (self._runs(), batches)

    def iterator_stands_at(self, batches: int) -> None:
        """So many batches of the iterator are taken now."""
        self._before_epoch = batches - self.epoch_batches
