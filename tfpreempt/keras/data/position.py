"""The position of training in its data, saved with the step and restored.

There are five ways to save a position; `choose` selects the best for the data:

- the state of the tf.data iterator; restoring it takes equally long at any batch;
- the index into a PyDataset or Sequence (`sequence.py`);
- the state of a third-party loader (`loader.py`);
- the number of trained batches, if the data are arrays: they are skipped, not read;
- reading the trained batches again, for generators and pipelines without a state.

`pipeline.py` handles the shuffle seeds that a pipeline draws in every epoch.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from types import NoneType
from typing import Any, ClassVar

import tensorflow as tf
from rich.console import Console
from rich.progress import Progress

from tfpreempt import errors
from tfpreempt.checkpoint.state.encoding import readable
from tfpreempt.checkpoint.state.unfinished_caches import clear_abandoned
from tfpreempt.checkpoint.tensors import data_order
from tfpreempt.checkpoint.tensors.data_order import Order
from tfpreempt.checkpoint.tensors.iterator_state import (
    cache_paths,
    hidden_state,
    keep_seeds,
    pack,
    prepare_cache_files,
    reads_generator,
    unpack,
)
from tfpreempt.checkpoint.tensors.shuffle_seeds import ShuffleSeeds, seeds_of
from tfpreempt.checkpoint.tensors.variables import plain_message
from tfpreempt.data.iterators import owned_iterators, read_locally
from tfpreempt.data.read_ahead import state_of
from tfpreempt.keras.data import pipeline
from tfpreempt.keras.data.counted_dataset import CountedDataset
from tfpreempt.keras.fit_protocol import Fit

log = logging.getLogger(__name__)

AGAIN = (
    "the position in this input pipeline cannot be saved. A resumed run reads the "
    "batches before the position again, which takes as long as the first time, and "
    "is exact only if the batches have the same order: set a seed for all random "
    "operations of the pipeline. To resume at the position without this, use a "
    "keras.utils.PyDataset or tfpreempt.data"
)
"""Reason for reading batches again, for a warning."""
_KEPT = 512
"""Number of fingerprints of batches that are kept: more than are read ahead."""
_DATA = "The training data"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The position of training in its data, in the saved form.

    Attributes:
        kind: way in which the position was saved: "iterator", "index", "sequence",
            "loader" or "replay".
        made: number of iterators made from the dataset before the current iterator.
        read: number of those iterators used for training.
        batches: number of batches that training has taken from the current iterator.
        states: for the kind "iterator", the states of this worker's tf.data iterators,
            each as a list of bytes; else empty.
        more: additional values; their form depends on the kind.
        is_shared: whether the position counts global batches, and is the same on every
            worker.
        order: fingerprints of the order of the data, to detect other data; see
            `checkpoint.tensors.data_order`.
    """

    kind: str
    made: int
    read: int
    batches: int
    states: Sequence[Sequence[bytes]] = ()
    more: Any = None
    is_shared: bool = False
    order: Order = dataclasses.field(default_factory=dict)

    @classmethod
    def parse(cls, value: Any) -> Position | None:
        """Returns the position in a commit; None if the commit has no position.

        Args:
            value: a position as a dict.

        Raises:
            CheckpointCorruptedError: the value is not a position of this version.
        """
        if value is None:
            return None
        with readable("model.fit"):
            found = cls(**value)
            counts = found.made, found.read, found.batches
            are_counts = all(type(each) is int and each >= 0 for each in counts)
            is_of_bytes = all(
                isinstance(part, bytes) for state in found.states for part in state
            )
            data_order.parse(found.order)
            # An earlier version saved a count in `more`.
            is_counted = found.kind != "iterator" or type(found.more) in (int, NoneType)
            is_kind = isinstance(found.kind, str) and type(found.is_shared) is bool
            if not (is_kind and are_counts and is_of_bytes and is_counted):
                raise ValueError(f"expected a position in data, got {str(value)[:200]}")
        return found


@dataclasses.dataclass(eq=False)
class Tracker:
    """A way to save and restore the position of training. Use on the main thread.

    Args:
        fit: the fit.
        data: dataset of the fit.

    Attributes:
        kind: the `kind` of the positions that the tracker saves.
        other_kinds: further kinds of positions that the tracker can restore.
        is_shared: whether the positions always count global batches, so that they are
            equal on every worker. If False, it depends on the iterator.
    """

    kind = ""
    other_kinds: ClassVar[Sequence[str]] = ()
    is_shared = False
    fit: Fit
    data: CountedDataset

    def epoch_begins(self) -> None:
        """Called before Keras reads an epoch's data; also at the end of training."""

    def begins(self, iterator: Any) -> None:
        """Called when the fit uses an iterator for the first time, before a read."""

    def save(self, iterator: Any, position: Position) -> Position:
        """Returns the position, with the values of this tracker added.

        Args:
            iterator: the iterator used for training.
            position: the position without the values.
        """
        return position

    def prepare(self, position: Position) -> Sequence[str]:
        """Prepares the restore of a position, before the fit makes its iterators.

        Args:
            position: the position to restore.

        Returns:
            The names of cache files that the position needs and that are missing. If
            any is missing, the position cannot be restored.
        """
        return ()

    def restore(self, position: Position, iterator: Any) -> None:
        """Restores a position in the iterator with which the fit resumes.

        Args:
            position: the position to restore.
            iterator: the iterator, before a read.
        """

    def extend(self, position: Position, iterator: Any) -> None:
        """Begins the next epoch; called instead of `restore` to extend a complete fit.

        The iterator is put into the state that the next epoch's iterator would have had
        if the fit had not ended.

        Args:
            position: the position at the end of the complete fit.
            iterator: the iterator, before a read.
        """


class IteratorTracker(Tracker):
    """Saves the states of this worker's tf.data iterators."""

    kind = "iterator"

    def begins(self, iterator: Any) -> None:
        roots = pipeline.roots(self.data.dataset)
        for owned in owned_iterators(iterator):
            keep_seeds(owned, *roots)
        self._seeds = seeds_of(*roots) if roots else ShuffleSeeds(())
        # At the end of an epoch Keras makes iterators without reading. `hold` keeps the
        # seeds from before, because a restart repeats the end of the epoch, and makes
        # the same iterators again.
        self._seeds.release()
        self.data.before_next = self._seeds.hold

    def save(self, iterator: Any, position: Position) -> Position:
        # At the end of the fit the seeds are released too: a restart does not repeat
        # the end.
        if not position.batches:
            self._seeds.release()
        try:
            states = _states(iterator)
        # Some pipelines fail only after the first read.
        except tf.errors.OpError as error:
            log.warning("%s (%s).", AGAIN, error.message)
            return dataclasses.replace(position, kind="replay")
        return dataclasses.replace(position, states=states)

    def prepare(self, position: Position) -> Sequence[str]:
        paths = cache_paths(*pipeline.roots(self.data.dataset))
        return [
            file
            for state in position.states
            for file in prepare_cache_files(unpack(state), paths)
        ]

    def restore(self, position: Position, iterator: Any) -> None:
        self.begins(iterator)
        owned = list(owned_iterators(iterator))
        # Earlier versions of tfpreempt also saved the states before the first batch, at
        # the front of the list.
        states = position.states[-len(owned) :]
        for each, state in zip(owned, states, strict=True):
            try:
                each._restore_from_tensors({"_STATE": unpack(state)})
            except tf.errors.OpError as error:
                raise errors.CheckpointMismatchError(
                    "The position in the training data was saved for another tf.data "
                    f"pipeline: {error.message}. Build the dataset as the interrupted "
                    "run did, or use another checkpoint directory."
                ) from error

    def extend(self, position: Position, iterator: Any) -> None:
        self.restore(position, self.data.spare())  # only to set the shuffle seeds
        following = self.data.spare()
        self.begins(following)
        next_position = dataclasses.replace(position, states=_states(following))
        self.restore(next_position, iterator)


class IndexTracker(Tracker):
    """Saves the number of trained batches; a restart skips them in the arrays."""

    kind = "index"
    is_shared = True

    def prepare(self, position: Position) -> Sequence[str]:
        if position.batches:
            rest = self.fit.distribute_arrays(position.batches)
            self.data.instead = self.fit.first_iterator, rest
        return ()


class ReplayTracker(Tracker):
    """Saves the number of trained batches; a restart reads these batches again."""

    kind = "replay"

    def __init__(self, fit: Fit, data: CountedDataset) -> None:
        super().__init__(fit, data)
        # Number of batches read from a Python generator; includes batches read ahead.
        self._read = 0
        self._elements: dict[int, int] = {}  # fingerprints of the newest batches
        fit.note_batches(self._note)

    def _note(self, batch: Any) -> None:
        """Stores a batch's fingerprint; runs on the thread that reads the generator."""
        self._read += 1
        self._elements[self._read] = data_order.of_batch(batch)
        self._elements.pop(self._read - _KEPT, None)

    def begins(self, iterator: Any) -> None:
        self._read = 0
        self._elements.clear()

    def save(self, iterator: Any, position: Position) -> Position:
        order = {**position.order, **self._element(position.batches)}
        return dataclasses.replace(position, order=order)

    def _element(self, batches: int) -> Order:
        element = self._elements.get(batches)
        return {} if element is None else {"element": element}

    def prepare(self, position: Position) -> Sequence[str]:
        for root in pipeline.roots(self.data.dataset):
            pipeline.draw(root, position.read)
        for _ in range(position.made - (self.fit.first_iterator - 1)):
            self.data.spare()
        return ()

    def restore(self, position: Position, iterator: Any) -> None:
        if not position.batches:
            return
        what = "reading trained batches again"
        with Progress(console=Console(stderr=True)) as bar:
            for index in bar.track(range(position.batches), description=what):
                try:
                    read_locally(iterator)
                except StopIteration:
                    if index > position.batches - self.fit.steps_per_execution:
                        return  # the last step of an epoch may have had fewer batches
                    raise errors.CheckpointMismatchError(
                        f"The training data end after {index} batches, but the "
                        f"checkpoint was made after {position.batches} batches, so the "
                        "data are shorter than in the interrupted run. Use the data of "
                        "the interrupted run, or another checkpoint directory."
                    ) from None
        data_order.check(position.order, self._element(position.batches), _DATA)


def _states(iterator: Any) -> list[list[bytes]]:
    """Returns the states of the tf.data iterators of a (distributed) iterator.

    Raises:
        tf.errors.OpError: an iterator has no state.
    """
    return [pack(state_of(owned)) for owned in owned_iterators(iterator)]


# --- which way a pipeline allows -----------------------------------------------------

WAYS: dict[str, type[Tracker]] = {
    way.kind: way for way in (IteratorTracker, IndexTracker, ReplayTracker)
}
"""Trackers by the `kind` of a position. A sequence or loader has a fixed tracker."""


def choose(fit: Fit, dataset: Any, iterator: Any) -> tuple[type[Tracker], str | None]:
    """Returns the best way to save positions in a pipeline.

    Args:
        fit: the fit.
        dataset: dataset of the fit's data.
        iterator: the first iterator used for training, not read yet; the function tries
            to get its state.

    Returns:
        The class of the tracker, and a warning if a resume will not be exact or is
        slow; else None.
    """
    if fit.array_way == "index":
        return IndexTracker, None
    roots = pipeline.roots(dataset)
    clear_abandoned(cache_paths(*roots))
    if again := _reason_to_replay(fit, dataset, roots, iterator):
        return ReplayTracker, f"{AGAIN} ({again})"
    if fit.array_way is None and (problem := hidden_state(*roots)):
        return IteratorTracker, f"{_RANDOM} ({problem})"
    return IteratorTracker, _CACHED if pipeline.caches_in_memory(dataset) else None


def _reason_to_replay(
    fit: Fit, dataset: Any, roots: Sequence[Any], iterator: Any
) -> str | None:
    """Returns why the iterator's state cannot be saved; None if it can be saved."""
    if fit.array_way == "replay":
        return 'shuffle="batch"'
    if not list(owned_iterators(iterator)):
        return type(iterator).__name__
    if reads_generator(*roots):
        return "a Python generator"
    try:
        _states(iterator)
    except tf.errors.OpError as error:
        return plain_message(error)
    return None


def validation_problem(data: Any) -> str | None:
    """Returns a warning if a restarted run may have other validation results, or None.

    Args:
        data: `validation_data` of the fit.
    """
    if hasattr(data, "__next__"):
        return _READ_ON
    is_pipeline = isinstance(data, tf.data.Dataset)
    return _SHUFFLED if is_pipeline and pipeline.shuffles(data) else None


_READ_ON = (
    "validation_data is a Python generator, and each validation continues the "
    "generator. A restarted run starts the generator from the beginning, and "
    "validates with other batches than an uninterrupted run. Pass arrays, a "
    "keras.utils.PyDataset or a tf.data.Dataset"
)
_SHUFFLED = (
    "validation_data are shuffled, and the order is not saved: val_loss of a "
    "restarted run differs in its last bits from an uninterrupted run. Remove the "
    "shuffle"
)
_RANDOM = (
    "the input pipeline has an op whose state cannot be saved: a resumed run reads "
    "every sample once and in order, but the results of this op differ from an "
    "uninterrupted run. Use tf.random.stateless_* with a seed from the element, or "
    "augment in layers of the model"
)
_CACHED = (
    "the input pipeline caches in memory, and every commit inside an epoch includes "
    "the cached elements. Cache to a file (cache(path)) on storage that outlives the "
    "machine, or load the data before the pipeline, for instance with "
    "tfpreempt.data.from_arrays"
)
