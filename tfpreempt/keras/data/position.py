"""Where training is in its data, saved with the step and found again.

Within an iterator there are five ways, the best that the data allow (`choose`):

- the state of the tf.data iterator, put back in time that does not grow with the batch;
- the index into a PyDataset or Sequence (`sequence.py`);
- the state of a loader of other people (`loader.py`);
- the number of batches in arrays, which are not read again, only counted;
- reading the same batches again, for generators and pipelines without a state.

What the pipeline draws for epochs to come is in `pipeline.py`.
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
from tfpreempt.keras.interface import Fit

log = logging.getLogger(__name__)

AGAIN = (
    "the position in this input pipeline cannot be saved, so a resumed run reads the "
    "batches before it again, which takes as long as reading them took, and is exact "
    "only if they come in the same order again: seed what is random in it. A "
    "keras.utils.PyDataset or tfpreempt.data goes on at once"
)
"""Why batches are read again."""
_KEPT = 512
"""Number of fingerprints of batches that are kept: more than are read ahead."""
_DATA = "The training data"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where training is, as it is saved.

    Attributes:
        kind: the way: "iterator", "index", "sequence", "loader" or "replay".
        made: iterators of the dataset that were made before this one.
        read: those of them that were trained with.
        batches: batches that training has taken from this one.
        states: states of the local iterators below, each a list of parts. Empty for
            the other ways.
        more: what the way adds.
        is_shared: whether it is the place in global batches, the same on all workers.
        order: fingerprints of the order of the data; see `checkpoint.data_order`.
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
    def parse(cls, place: Any) -> Position | None:
        """The position that a commit tells of; None where it has none.

        Args:
            place: a position as a dict.

        Raises:
            CheckpointDamagedError: it is none, or another version's.
        """
        if place is None:
            return None
        with readable("a fit"):
            found = cls(**place)
            counts = found.made, found.read, found.batches
            is_told = all(type(each) is int and each >= 0 for each in counts)
            is_of_bytes = all(
                isinstance(part, bytes) for state in found.states for part in state
            )
            data_order.parse(found.order)
            # An earlier version saved a count there.
            is_counted = found.kind != "iterator" or type(found.more) in (int, NoneType)
            is_kind = isinstance(found.kind, str) and type(found.is_shared) is bool
            if not (is_kind and is_told and is_of_bytes and is_counted):
                raise ValueError(f"it is no place in data: {str(place)[:200]}")
        return found


@dataclasses.dataclass(eq=False)
class Tracker:
    """One way to know where training is, and to get there again. Main thread.

    Args:
        fit: the fit.
        data: its data.

    Attributes:
        kind: names the way in a `Position`.
        other_kinds: of positions of other ways from which the tracker resumes.
        is_shared: whether positions of this way are always in global batches, the same
            on all workers; otherwise the iterator says so.
    """

    kind = ""
    other_kinds: ClassVar[Sequence[str]] = ()
    is_shared = False
    fit: Fit
    data: CountedDataset

    def epoch_begins(self) -> None:
        """An epoch begins, before Keras turns to its data; or training is over."""

    def begins(self, iterator: Any) -> None:
        """The fit uses an iterator for the first time; nothing was read of it."""

    def save(self, iterator: Any, position: Position) -> Position:
        """What is known of the position already, with what the way adds."""
        return position

    def prepare(self, position: Position) -> Sequence[str]:
        """Called before the fit makes its iterators.

        Returns:
            The names of files that the position needs and that are missing. With such
            files the position cannot be restored.
        """
        return ()

    def restore(self, position: Position, iterator: Any) -> None:
        """Called with the iterator that the fit goes on with; nothing was read."""

    def extend(self, position: Position, iterator: Any) -> None:
        """Instead of `restore`, at the end of a fit that has more epochs now: the
        iterator becomes the one that would have followed."""


class IteratorTracker(Tracker):
    """By the state of the tf.data iterators below."""

    kind = "iterator"

    def begins(self, iterator: Any) -> None:
        roots = pipeline.roots(self.data.dataset)
        for owned in owned_iterators(iterator):
            keep_seeds(owned, *roots)
        self._seeds = seeds_of(*roots) if roots else ShuffleSeeds(())
        # At the end of an epoch Keras makes iterators that it does not read. A restart
        # that repeats the end of the epoch makes them again.
        self._seeds.release()
        self.data.before_next = self._seeds.hold

    def save(self, iterator: Any, position: Position) -> Position:
        if not position.batches:  # also at the end of the fit, which is not repeated
            self._seeds.release()
        try:
            states = _states(iterator)
        except tf.errors.OpError as error:  # known only now that it was read
            log.warning("tfpreempt: %s (%s).", AGAIN, error.message)
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
        # An earlier version also saved the states before the first batch, in front.
        states = position.states[-len(owned) :]
        for each, state in zip(owned, states, strict=True):
            try:
                each._restore_from_tensors({"_STATE": unpack(state)})
            except tf.errors.OpError as error:
                raise errors.CheckpointMismatchError(
                    "The position in the training data was saved for another tf.data "
                    f"pipeline than this one: {error.message}. Build the dataset as "
                    "the interrupted run did, or use another checkpoint directory."
                ) from error

    def extend(self, position: Position, iterator: Any) -> None:
        self.restore(position, self.data.spare())  # sets the seeds of the shuffles
        following = self.data.spare()
        self.begins(following)
        next_position = dataclasses.replace(position, states=_states(following))
        self.restore(next_position, iterator)


class IndexTracker(Tracker):
    """By the number of batches in arrays; the iterator is over what is left."""

    kind = "index"
    is_shared = True

    def prepare(self, position: Position) -> Sequence[str]:
        if position.batches:
            rest = self.fit.distribute_arrays(position.batches)
            self.data.instead = self.fit.first_iterator, rest
        return ()


class ReplayTracker(Tracker):
    """By reading everything again up to the position."""

    kind = "replay"

    def __init__(self, fit: Fit, data: CountedDataset) -> None:
        super().__init__(fit, data)
        self._read = 0  # batches of a Python generator, ahead of training
        self._elements: dict[int, int] = {}  # fingerprints of the newest of them
        fit.note_batches(self._note)

    def _note(self, batch: Any) -> None:
        """Takes the fingerprint of a batch; in the thread that reads the generator."""
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
        what = "reading again what was trained on"
        with Progress(console=Console(stderr=True)) as bar:
            for index in bar.track(range(position.batches), description=what):
                try:
                    read_locally(iterator)
                except StopIteration:
                    if index > position.batches - self.fit.steps_per_execution:
                        return  # the last step of an epoch may have had fewer
                    raise errors.CheckpointMismatchError(
                        f"The training data end after {index} batches, and the "
                        f"checkpoint was made after {position.batches}: the data have "
                        "become shorter. Use the data of the interrupted run, or "
                        "another checkpoint directory."
                    ) from None
        data_order.check(position.order, self._element(position.batches), _DATA)


def _states(iterator: Any) -> list[list[bytes]]:
    """Those of the ordinary tf.data iterators below; what their ops keep is left out.

    Raises:
        tf.errors.OpError: one has none.
    """
    return [pack(state_of(owned)) for owned in owned_iterators(iterator)]


# --- which way a pipeline allows -----------------------------------------------------

WAYS: dict[str, type[Tracker]] = {
    way.kind: way for way in (IteratorTracker, IndexTracker, ReplayTracker)
}
"""By the `kind` of a position. That of a sequence or loader stands from the start."""


def choose(fit: Fit, dataset: Any, iterator: Any) -> tuple[type[Tracker], str | None]:
    """The best way for this pipeline, by trying on an iterator that was not read.

    Args:
        fit: the fit.
        dataset: of its data.
        iterator: the first one that it trains with.

    Returns:
        The way, and what of an exact resume it cannot give, for people.
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
    """Why a state of the iterator cannot be had; None if it can."""
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
    """Why a resumed validation may differ in the last bits; None if it does not.

    Args:
        data: `validation_data` of the fit.
    """
    if hasattr(data, "__next__"):
        return _READ_ON
    is_pipeline = isinstance(data, tf.data.Dataset)
    return _SHUFFLED if is_pipeline and pipeline.shuffles(data) else None


_READ_ON = (
    "validation_data is a Python generator, which each validation reads on from; a "
    "restarted run begins it anew, so it validates with other batches than an "
    "undisturbed run. Pass arrays, a keras.utils.PyDataset or a tf.data.Dataset"
)
_SHUFFLED = (
    "validation_data are shuffled, and the order is not kept: val_loss of a restarted "
    "run differs in its last bits from an undisturbed run. Leave the shuffle out"
)
_RANDOM = (
    "the input pipeline has an op whose own state cannot be saved: a resumed run takes "
    "every sample once and in order, but what this op does differs from an undisturbed "
    "run. Use tf.random.stateless_* with a seed from the element, or augment in layers "
    "of the model"
)
_CACHED = (
    "the input pipeline caches in memory, and what it has cached becomes part of every "
    "commit in the middle of an epoch. Cache to a file (cache(path)) on storage that "
    "outlives the machine, or load the data before the pipeline, for instance with "
    "tfpreempt.data.from_arrays"
)
