"""The position of training in its data, saved with the step and restored.

There are five ways to save a position; the framework's module (`tensorflow_data.py`,
`jax_data.py`) selects the best for the data:

- the state of the tf.data iterator; the time of its restore does not depend on the
  number of trained batches;
- the index into a PyDataset or Sequence (`sequence.py`);
- the state of a third-party loader (`loader.py`);
- the number of trained batches, if the data are arrays; a restart skips these batches
  without a read;
- the number of trained batches, for generators and pipelines without a state; a restart
  reads these batches again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import NoneType
from typing import Any, ClassVar

from rich.console import Console
from rich.progress import Progress

from tfpreempt import errors
from tfpreempt.checkpoint.state import data_order
from tfpreempt.checkpoint.state.data_order import Order
from tfpreempt.checkpoint.state.encoding import readable
from tfpreempt.keras.data.counted_dataset import CountedDataset
from tfpreempt.keras.fit_protocol import Fit

AGAIN = (
    "the position in this input pipeline cannot be saved. A resumed run reads the "
    "batches before the position again, which takes as long as the first time, and "
    "is exact only if the batches have the same order: set a seed for all random "
    "operations of the pipeline. To resume at the position without this, use a "
    "keras.utils.PyDataset or tfpreempt.data"
)
"""Warning that a restart reads the trained batches again."""
READ_ON = (
    "validation_data is a Python generator, and each validation continues the "
    "generator. A restarted run starts the generator from the beginning, and "
    "validates with other batches than an uninterrupted run. Pass arrays, a "
    "keras.utils.PyDataset or a tf.data.Dataset"
)
"""Warning about validation data that are a Python generator."""
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
        read: number of iterators used for training before the current iterator.
        batches: number of batches that training has taken from the current iterator.
        states: for the kind "iterator", the states of this worker's tf.data iterators,
            each as a list of bytes; else empty.
        more: additional values; their form depends on the kind.
        is_shared: whether the position counts global batches, and is the same on every
            worker.
        order: fingerprints of the order of the data, to detect other data; see
            `checkpoint.state.data_order`.
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
            equal on every worker. If False, whether a position counts global batches
            depends on the iterator.
    """

    kind = ""
    other_kinds: ClassVar[Sequence[str]] = ()
    is_shared = False
    fit: Fit
    data: CountedDataset

    def epoch_begins(self) -> None:
        """Prepares the tracker for an epoch, before Keras reads data. Called at the end
        of training, too."""

    def steps_end(self) -> None:
        """Handles the end of the steps of an epoch, before a validation."""

    def epoch_ends(self) -> None:
        """Handles the end of an epoch, after the user's callbacks."""

    def begins(self, iterator: Any) -> None:
        """Prepares the tracker for an iterator that the fit is about to read for the
        first time."""

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
        """Prepares an iterator for the next epoch; called in place of `restore` if
        epochs are added to a complete fit.

        The iterator gets the state that the next epoch's iterator would have had if the
        fit had not ended.

        Args:
            position: the position at the end of the complete fit.
            iterator: the iterator, before a read.
        """

    def complete(self, position: Position) -> None:
        """Changes the data as a complete fit did, because a later fit may read the same
        data. Called in a restart that trains no step of the complete fit.

        Args:
            position: the position at the end of the complete fit.
        """


class IndexTracker(Tracker):
    """Saves the number of trained batches; a restart skips these batches in the
    arrays."""

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
        self.fit.pipelines.draw_again(self.fit, self.data, position)
        return ()

    def restore(self, position: Position, iterator: Any) -> None:
        if not position.batches:
            return
        what = "reading trained batches again"
        with Progress(console=Console(stderr=True)) as bar:
            for index in bar.track(range(position.batches), description=what):
                try:
                    self.fit.pipelines.read(iterator)
                except StopIteration:
                    if index > position.batches - self.fit.steps_per_execution:
                        # The saved position counts the last step of an epoch as a full
                        # step, but the step may have had fewer batches.
                        return
                    raise errors.CheckpointMismatchError(
                        f"The training data end after {index} batches, but the "
                        f"checkpoint was made after {position.batches} batches, so the "
                        "data are shorter than in the interrupted run. Use the data of "
                        "the interrupted run, or another checkpoint directory."
                    ) from None
        data_order.check(position.order, self._element(position.batches), _DATA)
