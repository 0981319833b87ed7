"""Where training is in its data, saved with the step and found again.

A `Feed` stands between `fit` and its dataset, so that the iterators can be counted and
told from those of others. Within an iterator there are three ways, the best that the
data allow:

- the state of the tf.data iterator, put back in time that does not grow with the batch;
- the index into a PyDataset or Sequence (`sequence.py`);
- reading the same batches again, for generators and pipelines without a state.

What the pipeline draws for epochs to come is in `pipeline.py`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import tensorflow as tf
from rich.console import Console
from rich.progress import Progress
from tensorflow.python.ops import gen_dataset_ops as _gen_dataset_ops

from tfpreempt import errors
from tfpreempt.checkpoint.iterator_state import pack, unpack
from tfpreempt.keras.data import pipeline
from tfpreempt.keras.data.host_iterator import (
    host_iterator,
    is_supported,
    owned_iterators,
    read_locally,
)
from tfpreempt.keras.interface import Fit

log = logging.getLogger(__name__)

_MARK = "_tfpreempt_made"

AGAIN = (
    "the position in this input pipeline cannot be saved, so a resumed run reads the "
    "batches before it again, which takes as long as reading them took, and is exact "
    "only if they come in the same order again: seed what is random in it. A "
    "keras.utils.PyDataset or tfpreempt.keras.data goes on at once"
)
"""Why batches are read again."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A position as it is saved.

    Attributes:
        kind: the way: "iterator", "index", "sequence" or "replay".
        made: iterators of the dataset that were made before this one.
        read: those of them that were trained with.
        batches: batches that training has taken from this one.
        states: states of the local iterators below, now and before the first batch;
            each a tuple of parts. Empty for the other ways.
        more: what the way adds; JSON.
    """

    kind: str
    made: int
    read: int
    batches: int
    states: tuple[tuple[bytes, ...], ...] = ()
    more: Any = None

    def to_json(self) -> dict[str, Any]:
        """All but the bytes."""
        return {
            "kind": self.kind,
            "made": self.made,
            "read": self.read,
            "batches": self.batches,
            "sizes": [len(state) for state in self.states],
            "more": self.more,
        }

    @property
    def parts(self) -> list[bytes]:
        """The bytes."""
        return [part for state in self.states for part in state]

    @staticmethod
    def from_json(record: Any, parts: Sequence[bytes]) -> Place:
        """What `to_json` and `parts` gave."""
        left = iter(parts)
        values = dict(record)
        sizes = values.pop("sizes")
        states = tuple(tuple(next(left) for _ in range(size)) for size in sizes)
        return Place(**values, states=states)


def place_or_replay(place: Place | None, batches: int, is_amid: bool) -> Place:
    """A worker's place; without one, the batches of the epoch are to be read again.

    Args:
        place: what was loaded.
        batches: batches of the epoch that are trained.
        is_amid: whether that is in the middle of the epoch.
    """
    if place is not None:
        return place
    if batches and is_amid:
        log.warning(
            "tfpreempt: this worker's position in the data is not in the checkpoint "
            "(it was made by another number of workers), so the %d batches of the "
            "epoch are read again",
            batches,
        )
    return Place(kind="replay", made=0, read=0, batches=batches)


class Feed:
    """The training data of one fit; `fit` makes its iterators of this.

    Args:
        fit: takes this in place of its dataset.

    Attributes:
        dataset: what it stands for.
        made: iterators that the fit has made.
    """

    def __init__(self, fit: Fit) -> None:
        self.made = 0
        self.dataset = fit.dataset
        self._instead: tuple[int, Any] | None = None
        fit.dataset = self

    def __iter__(self) -> Iterator[Any]:
        self.made += 1
        dataset = self.dataset
        if self._instead is not None and self._instead[0] == self.made:
            dataset = self._instead[1]
        iterator: Any = _iterator(dataset)
        setattr(iterator, _MARK, (self, self.made))
        return iterator  # type: ignore[no-any-return]  # TensorFlow is untyped

    def number(self, iterator: Any) -> int | None:
        """The number of an iterator of this feed; None for one from elsewhere."""
        feed, number = getattr(iterator, _MARK, (None, None))
        return number if feed is self else None

    def spare(self) -> Any:
        """An iterator that the fit does not know of."""
        return _iterator(self.dataset)

    def replace(self, number: int, dataset: Any) -> None:
        """Another dataset for one iterator: what is left of its data."""
        self._instead = (number, dataset)


def _iterator(dataset: Any) -> Any:
    return host_iterator(dataset) if is_supported(dataset) else iter(dataset)


class Position(Protocol):
    """One way to save where training is. Main thread."""

    def epoch_begins(self) -> None:
        """An epoch begins, before Keras turns to its data; or training is over."""

    def begins(self, iterator: Any) -> None:
        """The fit uses an iterator for the first time; nothing was read of it."""

    def save(self, iterator: Any, made: int, read: int, batches: int) -> Place:
        """The place to go on from; the arguments are those of `Place`."""

    def prepare(self, place: Place, first: int) -> None:
        """Called before the fit makes its iterators, of which `first` is the number of
        the one that it goes on with."""

    def restore(self, place: Place, iterator: Any) -> None:
        """Called with that iterator before anything is read of it."""

    def extend(self, place: Place, iterator: Any) -> None:
        """Instead of `restore`, at the end of a fit that has more epochs now: the
        iterator becomes the one that would have followed."""


class IteratorPosition:
    """By the state of the tf.data iterators below.

    Args:
        feed: the data.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._before: tuple[tuple[bytes, ...], ...] = ()

    def epoch_begins(self) -> None:
        pass

    def begins(self, iterator: Any) -> None:
        self._before = _states(iterator)

    def save(self, iterator: Any, made: int, read: int, batches: int) -> Place:
        try:
            now = _states(iterator) if batches else ()
        except tf.errors.OpError as error:  # known only now that it was read
            log.warning("tfpreempt: %s (%s).", AGAIN, error.message)
            return Place(kind="replay", made=made, read=read, batches=batches)
        return Place(
            kind="iterator",
            made=made,
            read=read,
            batches=batches,
            states=(*self._before, *now),
            more=self._feed.made - (self._feed.number(iterator) or 0),
        )

    def prepare(self, place: Place, first: int) -> None:
        pipeline.draw(self._feed.dataset, place.read + (place.batches > 0))

    def extend(self, place: Place, iterator: Any) -> None:
        _set_states(self._feed.spare(), place.states)
        for _ in range(place.more):  # they were made after the one that was read last
            self._feed.spare()
        self._before = _states(self._feed.spare())
        _set_states(iterator, self._before)

    def restore(self, place: Place, iterator: Any) -> None:
        count = len(list(owned_iterators(iterator)))
        self._before, now = place.states[:count], place.states[count:]
        _set_states(iterator, now or self._before)
        # Data without an end repeat their shuffle within the iterator, and it goes on
        # drawing; else another iterator follows, and draws the next seed.
        if now and not pipeline.is_endless(self._feed.dataset):
            _set_states(self._feed.spare(), self._before)


class IndexPosition:
    """By the number of batches in arrays; they are not read again, only counted.

    Args:
        fit: makes a dataset of what is left.
        feed: the data.
    """

    def __init__(self, fit: Fit, feed: Feed) -> None:
        self._fit = fit
        self._feed = feed

    def epoch_begins(self) -> None:
        pass

    def begins(self, iterator: Any) -> None:
        pass

    def save(self, iterator: Any, made: int, read: int, batches: int) -> Place:
        return Place(kind="index", made=made, read=read, batches=batches)

    def prepare(self, place: Place, first: int) -> None:
        if place.batches:
            rest = self._fit.distribute_arrays(place.batches)
            self._feed.replace(first, rest)

    def restore(self, place: Place, iterator: Any) -> None:
        pass  # the iterator is over what is left

    def extend(self, place: Place, iterator: Any) -> None:
        pass


class ReplayPosition:
    """By reading everything again up to the place.

    Args:
        fit: the fit.
        feed: its data.
    """

    def __init__(self, fit: Fit, feed: Feed) -> None:
        self._feed = feed
        self._batches_of_step = fit.steps_per_execution

    def epoch_begins(self) -> None:
        pass

    def begins(self, iterator: Any) -> None:
        pass

    def save(self, iterator: Any, made: int, read: int, batches: int) -> Place:
        return Place(kind="replay", made=made, read=read, batches=batches)

    def prepare(self, place: Place, first: int) -> None:
        pipeline.draw(self._feed.dataset, place.read)
        for _ in range(place.made - (first - 1)):
            self._feed.spare()

    def extend(self, place: Place, iterator: Any) -> None:
        pass  # `prepare` has made all that were made before it

    def restore(self, place: Place, iterator: Any) -> None:
        if not place.batches:
            return
        what = "reading again what was trained on"
        with Progress(console=Console(stderr=True)) as bar:
            for index in bar.track(range(place.batches), description=what):
                try:
                    read_locally(iterator)
                except StopIteration:
                    if index > place.batches - self._batches_of_step:
                        return  # the last step of an epoch may have had fewer
                    raise errors.CheckpointMismatchError(
                        f"The training data end after {index} batches, and the "
                        f"checkpoint was made after {place.batches}: the data have "
                        "become shorter. Use the data of the interrupted run, or "
                        "another checkpoint directory."
                    ) from None


def _states(iterator: Any) -> tuple[tuple[bytes, ...], ...]:
    return tuple(tuple(pack(serialize(owned))) for owned in owned_iterators(iterator))


def _set_states(iterator: Any, states: Sequence[Sequence[bytes]]) -> None:
    for owned, state in zip(owned_iterators(iterator), states, strict=True):
        resource = owned._iterator_resource
        try:
            with tf.device(resource.device):
                _gen_dataset_ops.deserialize_iterator(resource, unpack(state))
        except tf.errors.OpError as error:
            raise errors.CheckpointMismatchError(
                "The position in the training data was saved for another tf.data "
                f"pipeline than this one: {error.message}. Build the dataset as the "
                "interrupted run did, or use another checkpoint directory."
            ) from error


def serialize(iterator: Any) -> Any:
    """The state of an ordinary tf.data iterator; what ops in it keep is left out.

    Raises:
        tf.errors.OpError: it has none.
    """
    policy = tf.data.experimental.ExternalStatePolicy.IGNORE.value
    return _gen_dataset_ops.serialize_iterator(iterator._iterator_resource, policy)
