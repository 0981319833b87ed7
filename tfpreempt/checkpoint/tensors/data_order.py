"""The fingerprints of tf.data pipelines; see `checkpoint/state/data_order.py`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import IO, Any

import tensorflow as tf

from tfpreempt.checkpoint.state.data_order import Order, check, of_indices, parse
from tfpreempt.checkpoint.state.encoding import readable
from tfpreempt.checkpoint.state.state import State
from tfpreempt.checkpoint.tensors.shuffle_seeds import parts
from tfpreempt.checkpoint.tensors.variables import Attached
from tfpreempt.core import private_api

_PERMUTATION = "_tfpreempt_permutation"


def with_permutation(dataset: tf.data.Dataset, indices: Any) -> tf.data.Dataset:
    """Marks a dataset with the fingerprint of its order; returns the dataset.

    Args:
        dataset: the pipeline. From the mark, `of_pipeline` knows the order without
            reading the pipeline.
        indices: the first sample indices of the first epoch.
    """
    setattr(dataset, _PERMUTATION, of_indices(indices))
    return dataset


def of_pipeline(*datasets: Any, has_seeds: bool) -> dict[str, int]:
    """Returns the fingerprints of tf.data pipelines by kind, without reading any
    element.

    Args:
        datasets: the pipelines.
        has_seeds: whether the result includes "seeds".
    """
    found: dict[str, int] = {}
    nodes = list(parts(*datasets))
    marks = [mark for node in nodes if (mark := vars(node).get(_PERMUTATION))]
    if marks:
        found["permutation"] = of_indices(marks)
    seeds = [
        int(number)
        for node in nodes
        if has_seeds and isinstance(node, private_api.shuffle_op._ShuffleDataset)
        for number in (node._seed, node._seed2, node._buffer_size)
    ]
    if seeds:
        found["seeds"] = of_indices(seeds)
    return found


class OrderState(State):
    """Saves the fingerprints of a worker's `tfpreempt.data` iterators in a Checkpoint.

    Other pipelines are left out: a training loop may create a dataset for each epoch,
    with different seeds, and restore the state of an earlier dataset into a later
    dataset.
    """

    _is_reserved = True

    def __init__(self, attached: Attached) -> None:
        super().__init__("tfpreempt.data_order", per_worker=True, registry=None)
        self._attached = attached

    def should_save(self) -> bool:
        return bool(self._orders())

    def save(self, fileobj: IO[bytes]) -> None:
        fileobj.write(json.dumps(self._orders()).encode())

    def load(self, fileobj: IO[bytes]) -> None:
        with readable(self):
            saved = {
                path: parse(order) for path, order in json.loads(fileobj.read()).items()
            }
        for path, order in self._orders().items():
            check(saved.get(path, {}), order, f"The data of the iterator {path!r}")

    def reshard(
        self, files: Sequence[IO[bytes] | None], worker: int, num_workers: int
    ) -> None:
        """Compares the order with the chief's: with a different number of workers,
        every worker takes over the chief's position."""
        if files[0] is not None:
            self.load(files[0])

    def _orders(self) -> dict[str, Order]:
        return {
            path: order
            for path, iterator in self._attached.iterators.items()
            if (order := of_iterator(iterator))
        }


def of_iterator(iterator: Any) -> Order:
    """Returns the fingerprints of the `tfpreempt.data` pipeline of an iterator."""
    dataset: Iterable[Any] | None = iterator._dataset
    return {} if dataset is None else of_pipeline(dataset, has_seeds=False)
