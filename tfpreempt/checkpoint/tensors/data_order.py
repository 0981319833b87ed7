"""Computes fingerprints of the sample order of tf.data pipelines.

`checkpoint/state/data_order.py` defines the fingerprints and compares them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import IO, Any

import tensorflow as tf

from tfpreempt.checkpoint.state.data_order import Order, check, of_indices, parse
from tfpreempt.checkpoint.state.encoding import readable
from tfpreempt.checkpoint.tensors.shuffle_seeds import parts
from tfpreempt.checkpoint.tensors.variables import AttachedState
from tfpreempt.core import private_api

_PERMUTATION = "_tfpreempt_permutation"


def with_permutation(dataset: tf.data.Dataset, indices: Any) -> tf.data.Dataset:
    """Stores the fingerprint of a dataset's sample order in the dataset; returns the
    dataset.

    Args:
        dataset: the pipeline. `of_pipeline` uses the stored fingerprint, so the
            pipeline need not be read.
        indices: indices of the first samples of the first epoch, in the order of the
            epoch.
    """
    setattr(dataset, _PERMUTATION, of_indices(indices))
    return dataset


def of_pipeline(*datasets: Any, has_seeds: bool) -> dict[str, int]:
    """Returns the fingerprints of the sample order of tf.data pipelines, by kind:
    "permutation" (from `with_permutation`) and "seeds". Reads no element.

    Args:
        datasets: the pipelines.
        has_seeds: whether the result includes "seeds", the fingerprint of the seeds and
            buffer sizes of all `shuffle` operations.
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


class OrderState(AttachedState):
    """Saves, on every worker, the order fingerprints of the iterators of
    `tfpreempt.data` that a Checkpoint tracks; `load` compares the fingerprints.

    Other pipelines have no fingerprint, because a different order need not be an error:
    a training loop may create a dataset for each epoch, with different seeds, and
    restore the state of an earlier dataset into a later dataset.
    """

    _name = "tfpreempt.data_order"

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
        """Compares this worker's order with the order that the chief (worker 0) saved:
        if the number of workers has changed, every worker resumes at the chief's
        position."""
        if files[0] is not None:
            self.load(files[0])

    def _orders(self) -> dict[str, Order]:
        return {
            path: order
            for path, iterator in self._attached.iterators.items()
            if (order := of_iterator(iterator))
        }


def of_iterator(iterator: Any) -> Order:
    """Returns the fingerprints of an iterator's sample order, by kind as in
    `of_pipeline`; empty if the iterator's pipeline is not from `tfpreempt.data`."""
    dataset: Iterable[Any] | None = iterator._dataset
    return {} if dataset is None else of_pipeline(dataset, has_seeds=False)
