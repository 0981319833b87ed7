"""Where training is in its data, saved with the step and found again.

Within an iterator there are four ways, the best that the data allow:

- the state of the tf.data iterator, put back in time that does not grow with the batch;
- the index into a PyDataset or Sequence (`sequence.py`);
- the number of batches in arrays, which are not read again, only counted;
- reading the same batches again, for generators and pipelines without a state.

What the pipeline draws for epochs to come is in `pipeline.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from rich.console import Console
from rich.progress import Progress
from tensorflow.python.ops import gen_dataset_ops as _gen_dataset_ops

from tfpreempt import errors
from tfpreempt.checkpoint.iterator_state import pack, unpack
from tfpreempt.keras.data import pipeline
from tfpreempt.keras.data.counted_dataset import CountedDataset
from tfpreempt.keras.data.host_iterator import owned_iterators, read_locally
from tfpreempt.keras.interface import Fit

log = logging.getLogger(__name__)

AGAIN = (
    "the position in this input pipeline cannot be saved, so a resumed run reads the "
    "batches before it again, which takes as long as reading them took, and is exact "
    "only if they come in the same order again: seed what is random in it. A "
    "keras.utils.PyDataset or tfpreempt.keras.data goes on at once"
)
"""Why batches are read again."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where training is, as it is saved.

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
        return {**dataclasses.asdict(self), "states": [*map(len, self.states)]}

    @property
    def parts(self) -> list[bytes]:
        """The bytes."""
        return list(itertools.chain.from_iterable(self.states))

    @staticmethod
    def from_json(record: Any, parts: Iterator[bytes]) -> Position:
        """What `to_json` and `parts` gave."""
        states = (tuple(itertools.islice(parts, size)) for size in record["states"])
        return Position(**{**record, "states": tuple(states)})


class Tracker:
    """One way to know where training is, and to get there again. Main thread.

    Attributes:
        kind: names the way in a `Position`.
    """

    kind: str

    def epoch_begins(self) -> None:
        """An epoch begins, before Keras turns to its data; or training is over."""

    def begins(self, iterator: Any) -> None:
        """The fit uses an iterator for the first time; nothing was read of it."""

    def save(self, iterator: Any, made: int, read: int, batches: int) -> Position:
        """The position to go on from; the arguments are those of `Position`."""
        return Position(kind=self.kind, made=made, read=read, batches=batches)

    def prepare(self, position: Position, first: int) -> None:
        """Called before the fit makes its iterators, of which `first` is the number of
        the one that it goes on with."""

    def restore(self, position: Position, iterator: Any) -> None:
        """Called with that iterator before anything is read of it."""

    def extend(self, position: Position, iterator: Any) -> None:
        """Instead of `restore`, at the end of a fit that has more epochs now: the
        iterator becomes the one that would have followed."""


class IteratorTracker(Tracker):
    """By the state of the tf.data iterators below.

    Args:
        data: the data.
    """

    kind = "iterator"

    def __init__(self, data: CountedDataset) -> None:
        self._data = data
        self._before: tuple[tuple[bytes, ...], ...] = ()

    def begins(self, iterator: Any) -> None:
        self._before = _states(iterator)

    def save(self, iterator: Any, made: int, read: int, batches: int) -> Position:
        try:
            now = _states(iterator) if batches else ()
        except tf.errors.OpError as error:  # known only now that it was read
            log.warning("tfpreempt: %s (%s).", AGAIN, error.message)
            return Position(kind="replay", made=made, read=read, batches=batches)
        return Position(
            kind=self.kind,
            made=made,
            read=read,
            batches=batches,
            states=(*self._before, *now),
            more=self._data.made - (self._data.number(iterator) or 0),
        )

    def prepare(self, position: Position, first: int) -> None:
        pipeline.draw(self._data.dataset, position.read + (position.batches > 0))

    def extend(self, position: Position, iterator: Any) -> None:
        _set_states(self._data.spare(), position.states)
        for _ in range(position.more):  # made after the one that was read last
            self._data.spare()
        self._before = _states(self._data.spare())
        _set_states(iterator, self._before)

    def restore(self, position: Position, iterator: Any) -> None:
        count = len(list(owned_iterators(iterator)))
        self._before, now = position.states[:count], position.states[count:]
        _set_states(iterator, now or self._before)
        # Data without an end repeat their shuffle within the iterator, and it goes on
        # drawing; else another iterator follows, and draws the next seed.
        if now and not pipeline.is_endless(self._data.dataset):
            _set_states(self._data.spare(), self._before)


class IndexTracker(Tracker):
    """By the number of batches in arrays; the iterator is over what is left.

    Args:
        fit: makes a dataset of what is left.
        data: the data.
    """

    kind = "index"

    def __init__(self, fit: Fit, data: CountedDataset) -> None:
        self._fit = fit
        self._data = data

    def prepare(self, position: Position, first: int) -> None:
        if position.batches:
            rest = self._fit.distribute_arrays(position.batches)
            self._data.replace(first, rest)


class ReplayTracker(Tracker):
    """By reading everything again up to the position.

    Args:
        fit: the fit.
        data: its data.
    """

    kind = "replay"

    def __init__(self, fit: Fit, data: CountedDataset) -> None:
        self._data = data
        self._batches_of_step = fit.steps_per_execution

    def prepare(self, position: Position, first: int) -> None:
        pipeline.draw(self._data.dataset, position.read)
        for _ in range(position.made - (first - 1)):
            self._data.spare()

    def restore(self, position: Position, iterator: Any) -> None:
        if not position.batches:
            return
        what = "reading again what was trained on"
        with Progress(console=Console(stderr=True)) as bar:
            for index in bar.track(range(position.batches), description=what):
                try:
                    read_locally(iterator)
                except StopIteration:
                    if index > position.batches - self._batches_of_step:
                        return  # the last step of an epoch may have had fewer
                    raise errors.CheckpointMismatchError(
                        f"The training data end after {index} batches, and the "
                        f"checkpoint was made after {position.batches}: the data have "
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
