"""Describes a tf.data pipeline: its roots, its caches, and the seeds of its shuffles.

If the state of an iterator is saved, the seeds are saved with the state (see
`checkpoint/tensors/shuffle_seeds.py`). If batches are read again instead, the shuffles
must draw the same seeds again as in the epochs before:

- A shuffle at the end of a pipeline draws when the iterator is made.
- A shuffle below another shuffle, as of files and then of records, draws when the
  first element is read. An iterator of that part of the pipeline alone draws the same
  seed, without a cost.

Both rules were found by trials on TensorFlow 2.21; tests/keras/test_position.py repeats
the trials.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfpreempt.checkpoint.tensors import data_order
from tfpreempt.checkpoint.tensors.shuffle_seeds import parts, reshuffles

_MANY = 1 << 20  # number of samples whose order takes too long to draw at a start


def roots(dataset: Any) -> list[Any]:
    """Returns the tf.data pipelines below a dataset, also of a distributed dataset."""
    original = getattr(dataset, "_original_dataset", None)
    if original is not None:
        return [original]
    each_worker = getattr(dataset, "_datasets", [dataset])
    return [part for part in each_worker if isinstance(part, tf.data.Dataset)]


def shuffles(dataset: Any) -> bool:
    """Whether a pipeline has a new order in every pass."""
    return any(map(reshuffles, parts(*roots(dataset))))


def draw(node: Any, count: int, *, is_below: bool = False) -> None:
    """Draws seeds of shuffles, as a full read of a number of iterators would draw.

    The seeds are the seeds of shuffles that draw when the shuffle is read, not when an
    iterator is made.

    Args:
        node: a pipeline, or a part of a pipeline.
        count: number of iterators.
        is_below: whether the node is read only when a node above is read.
    """
    if (draws := reshuffles(node)) and is_below:
        for _ in range(count):
            iter(node)
    for number, part in enumerate(node._inputs()):
        is_next = number > 0 and _concatenates(node)
        draw(part, count, is_below=is_below or draws or is_next)


def caches_in_memory(dataset: Any) -> bool:
    """Whether a pipeline caches elements in memory; the elements are in its state."""
    return any(
        type(node).__name__ == "CacheDataset" and not node._filename.numpy()
        for node in parts(*roots(dataset))
    )


def permutation(datasets: Sequence[Any]) -> dict[str, int]:
    """Returns the fingerprint of the order in which Keras takes arrays.

    Keras maps one element to the indices of an epoch, and cuts the indices in a
    `flat_map`. The indices are read from separate iterators; the iterators of a fit are
    not advanced.

    Args:
        datasets: the pipelines that Keras made from the arrays.

    Returns:
        "permutation"; empty if the order differs between epochs, or is very long.
    """
    for node in parts(*datasets):
        if type(node).__name__ == "_FlatMapDataset":
            (indices,) = node._inputs()
            spec = indices.element_spec
            if spec.dtype != tf.int64 or spec.shape.rank != 1 or spec.shape[0] > _MANY:
                break
            one, other = (data_order.of_indices(next(iter(indices))) for _ in range(2))
            return {"permutation": one} if one == other else {}
    return {}


def _concatenates(node: Any) -> bool:
    return type(node).__name__ == "_ConcatenateDataset"
