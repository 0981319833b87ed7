"""The training data of one fit: its iterators, and where training is in them."""

from __future__ import annotations

import logging
from typing import Any

from tfpreempt.keras.data.counted_dataset import CountedDataset
from tfpreempt.keras.data.position import Position, Tracker
from tfpreempt.keras.data.position_choice import choose, tracker_of
from tfpreempt.keras.data.sequence import SequenceTracker
from tfpreempt.keras.interface import Fit

log = logging.getLogger(__name__)


class TrainingData:
    """See above. Main thread.

    Args:
        fit: makes its iterators by this from now on.
    """

    def __init__(self, fit: Fit) -> None:
        self._fit = fit
        self._dataset = CountedDataset(fit)
        self._tracker: Tracker | None = None
        if fit.sequence is not None:
            self._tracker = SequenceTracker(fit, self._dataset)
        self._iterator: Any = None  # the one that is trained with
        self._read = 0  # iterators that were trained with, this one included
        self._made_before = 0  # iterators made before a restart, and not since
        self._saved: Position | None = None  # where a restart goes on

    def is_mine(self, iterator: Any) -> bool:
        """Whether this fit made the iterator."""
        return self._dataset.number(iterator) is not None

    def any_iterator(self) -> Any:
        """One to look at, not to read: the one that is trained with, or another."""
        return self._dataset.spare() if self._iterator is None else self._iterator

    def epoch_begins(self) -> None:
        """An epoch begins, or training is over."""
        if self._tracker is not None:
            self._tracker.epoch_begins()

    def begins(self, iterator: Any) -> None:
        """The fit uses an iterator for the first time; nothing was read of it."""
        self._read += 1
        self._iterator = iterator
        if self._tracker is None:
            self._tracker = choose(self._fit, self._dataset, iterator)
        self._tracker.begins(iterator)

    def position(self, batches: int, *, is_at_end: bool) -> Position | None:
        """Where training is; None before the first step.

        Args:
            batches: that were taken from the iterator.
            is_at_end: whether the fit has come to its end.
        """
        if self._iterator is None or self._tracker is None:
            return None
        made = self._made_before + (self._dataset.number(self._iterator) or 0) - 1
        read = self._read - 1
        if is_at_end and not self._fit.keeps_iterator:
            made, read, batches = self._made_before + self._dataset.made, self._read, 0
        return self._tracker.save(self._iterator, made, read, batches)

    # --- the restart -----------------------------------------------------------------

    def prepare(self, saved: Position | None, batches: int) -> None:
        """Lets the fit make the iterator that it goes on with.

        Args:
            saved: this worker's position in the commit, if that has one.
            batches: to be read again without it: those of the epoch that are trained.
        """
        if saved is None:
            if batches:
                log.warning(
                    "tfpreempt: this worker's position in the data is not in the "
                    "checkpoint (it was made by another number of workers), so the %d "
                    "batches of the epoch are read again",
                    batches,
                )
            saved = Position(kind="replay", made=0, read=0, batches=batches)
        if saved.kind != SequenceTracker.kind:
            self._tracker = tracker_of(saved.kind, self._fit, self._dataset)
        assert self._tracker is not None
        self._tracker.prepare(saved, self._fit.first_iterator)
        self._saved = saved

    def restore(self, iterator: Any, *, extends: bool) -> int:
        """Goes to what was prepared, in the iterator that the fit goes on with.

        Args:
            iterator: nothing was read of it.
            extends: epochs are added to a fit that was complete.

        Returns:
            Batches that were taken from the iterator.
        """
        saved = self._saved
        assert saved is not None
        assert self._tracker is not None
        self._iterator = iterator
        self._read = saved.read + 1
        self._made_before = saved.made + 1 - (self._dataset.number(iterator) or 0)
        if extends and not self._fit.keeps_iterator:
            self._tracker.extend(saved, iterator)
            return 0
        self._tracker.restore(saved, iterator)
        return saved.batches
