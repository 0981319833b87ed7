"""What a tf.data pipeline is built of: its generators, and the seeds of its shuffles.

A dataset that reshuffles draws a new seed for each iterator, and keeps the count in a
resource that nobody can read or set. Restoring an iterator sets the count of those
shuffles that are alive in the saved state; the others must be brought to the same:

- A shuffle at the end of a pipeline draws when the iterator is made. The state of an
  iterator that was not read yet holds the count, so that state is saved too, and is
  restored into an iterator that is thrown away. (Restoring makes one more draw where
  the shuffle has come to its end, which this undoes.)
- A shuffle below another one, as of files and then of records, draws when the first
  element is read. An iterator of that part of the pipeline alone draws the same seed,
  and costs nothing.
- A shuffle in the second part of a concatenation draws when the first part has come to
  its end. Nothing tells from outside whether it has, so such a pipeline is read again.

Found by trying on TensorFlow 2.21; tests/keras/test_position.py tries again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfpreempt.checkpoint import data_order
from tfpreempt.checkpoint.iterator_state import parts
from tfpreempt.core import seams

_MANY = 1 << 20  # samples whose order takes longer to draw than a start may wait


def roots(dataset: Any) -> list[Any]:
    """The tf.data pipelines below a dataset, which may be a distributed one."""
    original = getattr(dataset, "_original_dataset", None)
    if original is not None:
        return [original]
    each_worker = getattr(dataset, "_datasets", [dataset])
    return [part for part in each_worker if isinstance(part, tf.data.Dataset)]


def shuffles(dataset: Any) -> bool:
    """Whether a pipeline gives another order each time that it is read."""
    return any(map(_reshuffles, parts(*roots(dataset))))


def draw(node: Any, count: int, *, is_below: bool = False) -> None:
    """Draws the seeds of shuffles that draw when they are read, not when an iterator is
    made, as reading all of so many iterators did.

    Args:
        node: a pipeline, or what it is built of.
        count: of the iterators.
        is_below: whether the node is read only when something above it is.
    """
    if (reshuffles := _reshuffles(node)) and is_below:
        for _ in range(count):
            iter(node)
    for number, part in enumerate(node._inputs()):
        is_next = number > 0 and _concatenates(node)
        draw(part, count, is_below=is_below or reshuffles or is_next)


def is_endless(*nodes: Any) -> bool:
    """Whether one iterator serves all epochs: no end of any of them is ever met."""
    for node in nodes:
        count = int(node.cardinality())
        if count == tf.data.UNKNOWN_CARDINALITY:  # of a filter, say
            if not is_endless(*node._inputs()):
                return False
        elif count != tf.data.INFINITE_CARDINALITY:
            return False
    return bool(nodes)


def repeated_shuffles(dataset: Any) -> bool:
    """Whether a shuffle is repeated a finite number of times within an iterator.

    Then the seeds drawn depend on how far each iterator was read, which is not kept.
    """
    return any(
        int(node._count) > 1 and any(map(_reshuffles, parts(node)))
        for node in parts(*roots(dataset))
        if type(node).__name__ == "_RepeatDataset"
    )


def concatenated_shuffles(dataset: Any) -> bool:
    """Whether a shuffle begins only where another part of the data has ended."""
    return any(
        any(map(_reshuffles, parts(node._inputs()[1])))
        for node in parts(*roots(dataset))
        if _concatenates(node)
    )


def caches_in_memory(dataset: Any) -> bool:
    """Whether a pipeline keeps its elements in memory; they are in its state."""
    return any(
        type(node).__name__ == "CacheDataset" and not node._filename.numpy()
        for node in parts(*roots(dataset))
    )


def permutation(datasets: Sequence[Any]) -> dict[str, int]:
    """Returns the fingerprint of the order in which Keras takes arrays.

    Keras maps one element to the indices of an epoch, and cuts them in a `flat_map`.
    The indices are read from iterators of their own; those of a fit are not advanced.

    Args:
        datasets: the pipelines that Keras made of the arrays.

    Returns:
        "permutation"; nothing if it differs between epochs, or is very long.
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


def _reshuffles(node: Any) -> bool:
    is_shuffle = isinstance(node, seams.shuffle_op._ShuffleDataset)
    return is_shuffle and node._reshuffle_each_iteration is not False


def _concatenates(node: Any) -> bool:
    return type(node).__name__ == "_ConcatenateDataset"
