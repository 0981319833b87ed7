"""Inspects a tf.data pipeline: its datasets, its caches, the seeds of its shuffles.

A `shuffle` draws a new seed for every pass over the data. If a commit has the state of
an iterator, the state includes the seeds (see `checkpoint/tensors/shuffle_seeds.py`).
If a restart reads the trained batches again, the restart must first draw the seeds of
the earlier epochs:

- The last shuffle of a pipeline draws its seed when the iterator is made.
- A shuffle of which the elements pass through a later shuffle (for example a shuffle of
  files before a shuffle of records) draws its seed when the first element is read. To
  draw this seed without a read, make an iterator over only the first part of the
  pipeline, up to this shuffle.

Both rules were found by trials on TensorFlow 2.21; tests/keras/test_position.py repeats
the trials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfpreempt.checkpoint.state import data_order
from tfpreempt.checkpoint.tensors.shuffle_seeds import (
    is_memory_cache,
    parts,
    reshuffles,
)

_MANY = 1 << 20  # number of samples whose order takes too long to draw at a start


def roots(dataset: Any) -> list[Any]:
    """Returns the tf.data datasets from which a fit reads: the parts of a distributed
    dataset, or the dataset itself."""
    original = getattr(dataset, "_original_dataset", None)
    if original is not None:
        return [original]
    each_worker = getattr(dataset, "_datasets", [dataset])
    return [part for part in each_worker if isinstance(part, tf.data.Dataset)]


def shuffles(dataset: Any) -> bool:
    """Returns whether a pipeline has a new order in every pass."""
    return any(map(reshuffles, parts(*roots(dataset))))


def draw(
    node: Any,
    count: int,
    is_filled: Callable[[Any], bool] = lambda node: False,
    *,
    is_below: bool = False,
) -> None:
    """Draws the seeds that `count` iterators would draw if they were read to the end.

    Affects only shuffles that draw a seed when the first element is read. The other
    shuffles draw when an iterator is made, so the caller makes iterators for them. A
    shuffle before a complete cache draws no seed.

    Args:
        node: the last dataset of a pipeline; in a recursive call, one of its inputs.
        count: number of iterators.
        is_filled: function that returns whether a dataset is a complete cache.
        is_below: whether TensorFlow begins to read this dataset only when the first
            element is read, not when the iterator is made, because a later dataset of
            the pipeline is a shuffle or a concatenation.
    """
    if is_filled(node):
        return
    if (draws := reshuffles(node)) and is_below:
        for _ in range(count):
            iter(node)
    for number, part in enumerate(node._inputs()):
        is_next = number > 0 and _concatenates(node)
        draw(part, count, is_filled, is_below=is_below or draws or is_next)


def caches_in_memory(dataset: Any) -> bool:
    """Returns whether a pipeline caches elements in memory. If so, the state of an
    iterator over the pipeline contains the cached elements."""
    return any(map(is_memory_cache, parts(*roots(dataset))))


def permutation(datasets: Sequence[Any]) -> dict[str, int]:
    """Returns a fingerprint of the order in which Keras takes the samples of arrays.

    Keras' pipeline yields all indices of an epoch as one element, which a `flat_map`
    divides into batches. The indices are read from new iterators, so the iterators of
    the fit do not advance.

    Args:
        datasets: the pipelines that Keras made from the arrays.

    Returns:
        A dict with the key "permutation"; empty if the order differs between epochs, or
        if there are very many samples.
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
