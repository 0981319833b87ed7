"""The training data of one fit: its iterators, and where training is in them."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import tensorflow as tf

from tfpreempt import errors
from tfpreempt.checkpoint.tensors import data_order
from tfpreempt.data.slices import batch_size, check_shares, global_batches
from tfpreempt.keras.data import pipeline
from tfpreempt.keras.data.counted_dataset import CountedDataset
from tfpreempt.keras.data.loader import LoaderTracker, warn_of_states
from tfpreempt.keras.data.position import (
    WAYS,
    IndexTracker,
    Position,
    ReplayTracker,
    Tracker,
    choose,
)
from tfpreempt.keras.data.sequence import SequenceTracker
from tfpreempt.keras.interface import Fit

log = logging.getLogger(__name__)


class TrainingData:
    """See above. Main thread.

    Args:
        fit: makes its iterators by `dataset` from now on.

    Attributes:
        dataset: stands for the fit's own.
        tracker: the way in which the position is kept.
    """

    def __init__(self, fit: Fit) -> None:
        self._fit = fit
        self.dataset = CountedDataset(fit)
        # Under a TPUStrategy iterators are read from before anybody says which begins.
        strategy = fit.model.distribute_strategy
        has_place = not isinstance(strategy, tf.distribute.TPUStrategy)
        way: type[Tracker] = Tracker
        if fit.sequence is not None:
            way = SequenceTracker
        elif fit.loader is not None and has_place:
            way = LoaderTracker
        self.tracker = way(fit, self.dataset)
        self._iterator: Any = None  # the one that is trained with
        self._read = 0  # iterators that were trained with, this one included
        self._made_before = 0  # iterators made before a restart, and not since
        self._saved: Position | None = None  # where a restart goes on
        # The fingerprints of each epoch's order that the pipeline gives.
        self._order: dict[str, int] = {}

    def any_iterator(self) -> Any:
        """One to look at, not to read: the one that is trained with, or another."""
        return self.dataset.spare() if self._iterator is None else self._iterator

    def begins(self, iterator: Any) -> None:
        """The fit uses an iterator for the first time; nothing was read of it."""
        self._read += 1
        self._iterator = iterator
        if type(self.tracker) is Tracker:  # none is chosen yet
            way, problem = choose(self._fit, self.dataset.dataset, iterator)
            if problem is not None:
                log.warning("tfpreempt: %s.", problem)
            self._choose(way)
        self.tracker.begins(iterator)

    def _choose(self, way: type[Tracker]) -> None:
        self.tracker = way(self._fit, self.dataset)
        roots = pipeline.roots(self.dataset.dataset)
        self._order = data_order.of_pipeline(*roots, has_seeds=True)
        if self._fit.array_way is not None:
            self._order |= pipeline.permutation(roots)
        if way is ReplayTracker:
            warn_of_states()

    def position(self, batches: int, *, is_at_end: bool) -> Position | None:
        """Where training is; before the first step, what a restart was to go on with.

        Args:
            batches: that were taken from the iterator.
            is_at_end: whether the fit has come to its end.
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

    def check_shares(self) -> None:
        """Before a restart of what another number of workers saved.

        Raises:
            ConfigurationError: the replicas of now cannot share a batch equally.
        """
        replicas = self._fit.model.distribute_strategy.num_replicas_in_sync
        size: int | None = None
        if self._fit.sequence is not None:
            size = len(tf.nest.flatten(self._fit.sequence.data[0])[0])
        elif (shared := global_batches(self.dataset.dataset)) is not None:
            size = self._fit.array_batch or batch_size(shared[0])
        if size is not None:
            check_shares(size, replicas)

    def prepare(self, saved: Position | None, batches: int) -> None:
        """Lets the fit make the iterator that it goes on with.

        Args:
            saved: this worker's position in the commit, if that has one.
            batches: to be read again without it: those of the epoch that are trained.

        Raises:
            CheckpointMismatchError: the data are of another kind.
        """
        if saved is not None and saved.is_shared:
            is_counted = saved.kind in (IndexTracker.kind, SequenceTracker.kind)
            if not is_counted and global_batches(self.dataset.dataset) is None:
                saved = None  # here a position of this kind is not in global batches
        if saved is None:
            if batches:
                log.warning(
                    "tfpreempt: this worker's position in the data is not in the "
                    "checkpoint (it was made by another number of workers or "
                    "replicas, which shared these data in another way), so the %d "
                    "batches of the epoch are read again",
                    batches,
                )
            saved = Position(kind="replay", made=0, read=0, batches=batches)
        if saved.kind not in (self.tracker.kind, *self.tracker.other_kinds):
            if saved.kind not in WAYS:
                raise errors.CheckpointMismatchError(
                    "The position in the training data was saved for data of another "
                    f"kind ({saved.kind}), of which the fit has none now. Pass the "
                    "data of the interrupted run, or use another checkpoint directory."
                )
            self._choose(WAYS[saved.kind])
        if missing := self.tracker.prepare(saved):
            log.warning(
                "tfpreempt: files of the cache that the training data are read from "
                "are missing: %s. The %d batches before the position are read again, "
                "and the cache is written again. A cache must lie on storage that "
                "outlives the machine",
                ", ".join(missing),
                saved.batches,
            )
            saved = dataclasses.replace(saved, kind=ReplayTracker.kind, states=())
            self._choose(ReplayTracker)
            self.tracker.prepare(saved)
        self._saved = saved

    def restore(self, iterator: Any, *, extends: bool) -> int:
        """Goes to what was prepared, in the iterator that the fit goes on with.

        Args:
            iterator: nothing was read of it.
            extends: epochs are added to a fit that was complete.

        Returns:
            Batches that were taken from the iterator.

        Raises:
            CheckpointMismatchError: the data come in another order.
        """
        saved = self._saved
        assert saved is not None
        # Not in `prepare`: a fit that was complete trains nothing, in whatever order.
        data_order.check(saved.order, self._order, "The training data")
        self._iterator = iterator
        self._read = saved.read + 1
        self._made_before = saved.made + 1 - self.dataset.number(iterator)
        if extends and not self._fit.keeps_iterator:
            self.tracker.extend(saved, iterator)
            return 0
        self.tracker.restore(saved, iterator)
        return saved.batches
