"""Makes iterators, and finds the tf.data iterators inside of an iterator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfpreempt.core import private_api


def make_iterator(dataset: Any) -> Any:
    """Returns `iter(dataset)`; for a distributed dataset, returns a `HostIterator`.

    Args:
        dataset: a dataset, or the result of `strategy.experimental_distribute_dataset`
            or `distribute_datasets_from_function`.
    """
    kinds = (
        private_api.input_lib.DistributedDataset,
        private_api.input_lib.DistributedDatasetsFromFunction,
    )
    if not isinstance(dataset, kinds) or isinstance(
        dataset._strategy, tf.distribute.TPUStrategy
    ):
        return iter(dataset)
    from tfpreempt.data.host_iterator import host_iterator

    return host_iterator(dataset)


def read_locally(iterator: Any) -> None:
    """Reads this worker's part of a global batch, and drops the part.

    Other workers need not read at the same time.

    Args:
        iterator: result of `make_iterator`.

    Raises:
        StopIteration: the data have ended.
    """
    if hasattr(iterator, "read_locally"):
        iterator.read_locally()
    else:
        next(iterator)


def owned_iterators(iterator: Any) -> Iterator[Any]:
    """Yields the tf.data iterators whose states are the position, in a fixed order.

    Yields nothing if the position of `iterator` cannot be read.
    """
    if isinstance(iterator, tf.data.Iterator):
        yield iterator
    elif hasattr(iterator, "host_iterators"):
        yield from iterator.host_iterators
