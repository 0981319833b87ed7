"""Training data on JAX: iterators whose position can be saved, if possible.

Implements `fit_protocol.Pipelines` for fits on JAX, and chooses the best way to save
the position. On JAX, Keras reads all data by generators in Python. For a tf.data
pipeline the state of TensorFlow's iterator is saved, as on TensorFlow
(`tensorflow_data.py`).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfpreempt.core import frameworks, lazy_import, private_api
from tfpreempt.keras.data.arrays import ArrayTracker
from tfpreempt.keras.data.counted_dataset import CountedDataset
from tfpreempt.keras.data.position import (
    AGAIN,
    READ_ON,
    IndexTracker,
    Position,
    ReplayTracker,
    Tracker,
)
from tfpreempt.keras.fit_protocol import Fit

log = logging.getLogger(__name__)

_END = object()
_ToDevices = Callable[[Iterator[Any]], Iterator[Any]]


class Batches:
    """A dataset of a fit on JAX: makes iterators over batches.

    Args:
        open: function returning an iterator over the batches of a pass.
    """

    def __init__(self, open: Callable[[], Iterator[Any]]) -> None:
        self._open = open

    def __iter__(self) -> BatchIterator:
        return BatchIterator(self._open)


class BatchIterator:
    """An iterator over batches, which opens the data at the first read.

    Args:
        open: function returning an iterator over the batches of a pass.
    """

    def __init__(self, open: Callable[[], Iterator[Any]]) -> None:
        self._open = open
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = self._open()
        return next(self._batches)

    def begin(self) -> None:
        """Reads the first batch, and keeps the batch for the next call of `next`.

        Keras draws the order of an epoch at the first read.
        """
        first = next(self, _END)
        if first is not _END:
            self._batches = itertools.chain([first], self._batches or ())


class PipelineBatches(Batches):
    """The batches of a tf.data pipeline, whose iterator has a state.

    Args:
        adapter: Keras' adapter of the pipeline.
        to_devices: function that puts the batches of an iterator on the devices.
    """

    def __init__(self, adapter: Any, to_devices: _ToDevices) -> None:
        self._adapter = adapter
        self._to_devices = to_devices
        self._datasets = [adapter._dataset]  # read by `pipeline.roots`

    def __iter__(self) -> PipelineIterator:
        return PipelineIterator(self._adapter, self._to_devices)


class PipelineIterator(BatchIterator):
    """An iterator over a tf.data pipeline, which makes TensorFlow's iterator at the
    first use.

    Keras also makes iterators that are never read. If TensorFlow's iterator were made
    at once, an unused iterator would draw seeds for the pipeline's shuffles.

    Args:
        adapter: Keras' adapter of the pipeline.
        to_devices: function that puts the batches of an iterator on the devices.
    """

    def __init__(self, adapter: Any, to_devices: _ToDevices) -> None:
        super().__init__(self._converted)
        self._adapter = adapter
        self._to_devices = to_devices

    @functools.cached_property
    def host_iterators(self) -> Sequence[Any]:
        """The tf.data iterator over the pipeline, as the only item of a list.

        `owned_iterators` reads this attribute to find the iterators whose state is the
        position.
        """
        return [iter(self._adapter._dataset)]

    def _converted(self) -> Iterator[Any]:
        adapter = copy.copy(self._adapter)
        [adapter._dataset] = self.host_iterators
        return self._to_devices(adapter.get_jax_iterator())


# --- functions of `Pipelines` --------------------------------------------------------


def is_seeded() -> bool:
    """Returns whether the program has called `keras.utils.set_random_seed`; False if
    Keras does not know, as before 3.10."""
    seed = getattr(private_api.keras_rng, "get_random_seed", None)
    return seed is not None and seed() is not None


def make_iterator(dataset: Any) -> Any:
    """Returns an iterator over `Batches`."""
    return iter(dataset)


def read(iterator: Any) -> None:
    """Reads a batch of an iterator and drops the batch."""
    next(iterator)


def choose(fit: Fit, dataset: Any, iterator: Any) -> tuple[type[Tracker], str | None]:
    """Returns the best tracker to save positions in a dataset, and a warning or
    None."""
    if fit.array_way is not None:
        return ArrayTracker, None
    if isinstance(dataset, PipelineBatches):
        return _of_tensorflow().choose(fit, dataset, iterator)  # type: ignore[no-any-return]
    return ReplayTracker, f"{AGAIN} ({type(fit.adapter).__name__})"


def way_of(fit: Fit, position: Position) -> tuple[type[Tracker] | None, Position]:
    """Returns the tracker that restores a position, and the position to restore."""
    kind = position.kind
    if fit.array_way is None:
        ways = {ReplayTracker.kind: ReplayTracker}
        return ways.get(kind) or _of_tensorflow().way_of(fit, position)[0], position
    # The position may have been saved on TensorFlow, where an op draws the order of an
    # epoch. Inside a shuffled epoch, a resume needs this order.
    shuffle = fit.arguments["shuffle"]
    is_needed = position.batches and shuffle and shuffle != "batch"
    if is_needed and kind != IndexTracker.kind:
        if position.states and lazy_import.has_tensorflow():
            return _of_tensorflow().ArraysTracker, position
        log.warning("%s.", _NEW_ORDER)
    if kind in ("iterator", ReplayTracker.kind):
        # If the order is not needed, the batches are the same on both backends, so the
        # number of batches is sufficient as a position.
        kind = IndexTracker.kind
        position = dataclasses.replace(position, kind=kind, states=())
    return (ArrayTracker if kind == IndexTracker.kind else None), position


def order(fit: Fit, dataset: Any) -> dict[str, int]:
    """Returns fingerprints of the order of a dataset. The values of these fingerprints
    are the same in every epoch."""
    if not isinstance(dataset, PipelineBatches):
        return {}
    found: dict[str, int] = _of_tensorflow().order(fit, dataset)
    return found


def draw_again(fit: Fit, data: CountedDataset, position: Position) -> None:
    """Draws the shuffle seeds that earlier iterators of a tf.data pipeline drew, and
    reads the first pass again for a cache behind a shuffle."""
    if isinstance(data.dataset, PipelineBatches):
        made = _of_tensorflow().draw_for(data, position.read)
        for _ in range(position.read - made):
            _ = data.spare().host_iterators


def has_global_batches(dataset: Any) -> bool:
    """Returns True: every process reads its part of each global batch."""
    return True


def check_shares(fit: Fit, dataset: Any) -> None:
    """Does nothing: Keras divides the batches, and raises an error itself."""


def validation_problem(data: Any) -> str | None:
    """Returns a warning if validation results may differ after a restart, or None."""
    if hasattr(data, "__next__"):
        return READ_ON
    if not frameworks.is_imported("tensorflow"):
        return None
    found: str | None = _of_tensorflow().validation_problem(data)
    return found


def validation_caches(data: Any) -> list[str]:
    """Returns the paths of the file caches in the pipeline of validation data."""
    if not frameworks.is_imported("tensorflow"):
        return []
    found: list[str] = _of_tensorflow().validation_caches(data)
    return found


def _of_tensorflow() -> Any:
    """Returns the module `tensorflow_data`; called only if tf.data is needed.

    If the program has not imported TensorFlow, TensorFlow may use no GPU.
    """
    is_of_program = frameworks.is_imported("tensorflow")
    from tfpreempt.keras.data import tensorflow_data

    if not is_of_program:
        tensorflow_data.leave_gpus()
    return tensorflow_data


_NEW_ORDER = (
    "the epoch was interrupted on TensorFlow, which has drawn the order of the "
    "samples. Without TensorFlow this order cannot be restored, so the rest of the "
    "epoch has a new order: some samples of this epoch are trained twice and other "
    "samples not at all. To continue in the old order, install TensorFlow for this "
    "start"
)
