"""The training data of a fit: the iterators, and the position of training."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from tfpreempt import errors
from tfpreempt.checkpoint.state import data_order
from tfpreempt.keras.data.counted_dataset import CountedDataset
from tfpreempt.keras.data.loader import LoaderTracker, warn_of_states
from tfpreempt.keras.data.position import (
    IndexTracker,
    Position,
    ReplayTracker,
    Tracker,
)
from tfpreempt.keras.data.sequence import SequenceTracker
from tfpreempt.keras.fit_protocol import Fit

log = logging.getLogger(__name__)


class TrainingData:
    """Tracks the iterators of a fit, and saves and restores the position of training.

    Use on the main thread only.

    Args:
        fit: the fit. From now on the fit makes its iterators from `dataset`.

    Attributes:
        dataset: wrapper that replaces the fit's own dataset.
        tracker: saves and restores the position; its class is the chosen way to save
            positions (see `position.py`).
    """

    def __init__(self, fit: Fit) -> None:
        self._fit = fit
        self.dataset = CountedDataset(fit)
        way: type[Tracker] = Tracker
        if fit.sequence is not None:
            way = SequenceTracker
        elif fit.loader is not None:
            way = LoaderTracker
        self.tracker = way(fit, self.dataset)
        self._is_of_epoch = False  # whether the tracker serves only the resumed epoch
        self._iterator: Any = None  # the iterator used for training
        # Number of iterators used for training, including the current iterator.
        self._read = 0
        self._made_before = 0  # number of iterators that were made before the restart
        # The position where this process resumes.
        self._saved: Position | None = None
        # Fingerprints of the pipeline's order, with the same values in every epoch.
        self._order: dict[str, int] = {}

    def any_iterator(self) -> Any:
        """Returns an iterator of which the caller needs the element spec; the caller
        must not read the iterator.

        Returns the iterator used for training; before training, a new iterator.
        """
        return self.dataset.spare() if self._iterator is None else self._iterator

    def begins(self, iterator: Any) -> None:
        """Records the iterator that the fit is about to read for the first time, and
        chooses the way to save positions in the data, if no way is chosen yet."""
        self._read += 1
        self._iterator = iterator
        # Choose a way to save the position: there is none yet, or only a way for the
        # resumed epoch.
        if type(self.tracker) is Tracker or self._is_of_epoch:
            self._is_of_epoch = False
            way, problem = self._fit.pipelines.choose(
                self._fit, self.dataset.dataset, iterator
            )
            if problem is not None:
                log.warning("%s.", problem)
            self._choose(way)
        self.tracker.begins(iterator)

    def _choose(self, way: type[Tracker]) -> None:
        self.tracker = way(self._fit, self.dataset)
        self._order = self._fit.pipelines.order(self._fit, self.dataset.dataset)
        if way is ReplayTracker:
            warn_of_states()

    def position(self, batches: int, *, is_at_end: bool) -> Position | None:
        """Returns the position of training; before the first step, the restored
        position.

        Args:
            batches: number of batches taken from the iterator.
            is_at_end: whether the fit is complete.
        """
        if self._iterator is None:
            return self._saved
        made = self._made_before + self.dataset.number(self._iterator) - 1
        read = self._read - 1
        if is_at_end and not self._fit.keeps_iterator:
            made, read, batches = self._made_before + self.dataset.made, self._read, 0
        position = Position(
            kind=self.tracker.kind,
            made=made,
            read=read,
            batches=batches,
            is_shared=self.tracker.is_shared
            or getattr(self._iterator, "is_shared", False),
            order=self._order,
        )
        return self.tracker.save(self._iterator, position)

    # --- the restart -----------------------------------------------------------------

    def prepare(self, saved: Position | None, batches: int) -> None:
        """Prepares the iterator with which the fit resumes, before Keras makes it.

        Args:
            saved: this worker's position in the commit; None if the commit has no
                position for this worker.
            batches: number of trained batches of the epoch. Without a saved position
                these batches are read again.

        Raises:
            CheckpointMismatchError: the data are of another kind.
        """
        if saved is not None and saved.is_shared:
            is_counted = saved.kind in (IndexTracker.kind, SequenceTracker.kind)
            has_global_batches = self._fit.pipelines.has_global_batches
            if not is_counted and not has_global_batches(self.dataset.dataset):
                # This dataset has no global batches, so the count does not apply.
                saved = None
        if saved is None:
            if batches:
                log.warning(
                    "this worker's position in the data is not in the checkpoint "
                    "(the checkpoint was made by another number of workers or "
                    "replicas, which divided the data in another way), so the %d "
                    "batches of the epoch are read again",
                    batches,
                )
            saved = Position(kind="replay", made=0, read=0, batches=batches)
        if saved.kind not in (self.tracker.kind, *self.tracker.other_kinds):
            way, saved = self._fit.pipelines.way_of(self._fit, saved)
            if way is None:
                raise errors.CheckpointMismatchError(
                    "The position in the training data was saved for data of the kind "
                    f"{saved.kind!r}; this fit has data of another kind. Pass the data "
                    "of the interrupted run, or use another checkpoint directory."
                )
            if way is not Tracker:
                self._choose(way)
            # The other backend has drawn the order of the resumed epoch only: choose
            # another tracker for later epochs.
            is_other = self._fit.array_way not in (None, way.kind)
            self._is_of_epoch = is_other and saved.kind != ReplayTracker.kind
        if missing := self.tracker.prepare(saved):
            log.warning(
                "the training data are read from a cache, and files of the cache are "
                "missing: %s. The %d batches before the position are read again, and "
                "the cache is written again. Keep caches on storage that outlives the "
                "machine",
                ", ".join(missing),
                saved.batches,
            )
            saved = dataclasses.replace(saved, kind=ReplayTracker.kind, states=())
            self._choose(ReplayTracker)
            self.tracker.prepare(saved)
        self._saved = saved

    def complete(self) -> None:
        """Changes the data as the complete fit did, whose end is the prepared position.
        Later fits of the same data then have their own orders."""
        if self._saved is not None:
            self.tracker.complete(self._saved)

    def restore(self, iterator: Any, *, extends: bool) -> int:
        """Restores the prepared position in the iterator with which the fit resumes.

        Args:
            iterator: the iterator, before a read.
            extends: whether epochs are added to a complete fit.

        Returns:
            The number of batches taken from the iterator before the restart.

        Raises:
            CheckpointMismatchError: the data have another order.
        """
        saved = self._saved
        assert saved is not None
        # Check the order here rather than in `prepare`: `prepare` is also called for a
        # complete fit, where the order is irrelevant because no step is trained.
        data_order.check(saved.order, self._order, "The training data")
        self._iterator = iterator
        self._read = saved.read + 1
        self._made_before = saved.made + 1 - self.dataset.number(iterator)
        if type(self.tracker) is Tracker:
            self._read = saved.read
            self.begins(iterator)
            return 0
        if extends and not self._fit.keeps_iterator:
            self.tracker.extend(saved, iterator)
            return 0
        self.tracker.restore(saved, iterator)
        return saved.batches
