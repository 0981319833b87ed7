"""Cuts global batches into slices for the replicas of this process.

`strategy.experimental_distribute_dataset` cuts global batches inside the dataset, so
the position counts slices. Such a position depends on the number of replicas, and
TensorFlow 2.21 cannot save the position with symbolic checkpoints. With this module the
dataset yields global batches, and a step cuts the batch into the same slices. So the
position counts global batches: it is equal on every worker, and valid for any number of
workers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfpreempt import errors
from tfpreempt.core import private_api

_READ_AHEAD = 2
"""Number of global batches to read ahead while a step runs, as in TensorFlow."""

_CUTTABLE = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)
_UNKNOWN = -1  # returned by TensorFlow for an unknown batch size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplit:
    """The rule by which a global batch is cut for this process's replicas.

    Attributes:
        spec: element spec of a global batch.
        local: indices of this process's replicas, among all replicas.
        replicas: number of replicas of all processes.
        is_filled: whether the first replicas get full slices, and the last replicas
            fewer samples or none. If False, the sizes of slices differ by at most one
            sample.
        is_ahead: whether the slices are copied to the devices before a step needs them.
    """

    spec: Any
    local: tuple[int, ...]
    replicas: int
    is_filled: bool
    is_ahead: bool

    def slice_of(self, number: int, batch: Any) -> Any:
        """Returns the slice of a batch for a local replica.

        Args:
            number: index of the replica in `local`.
            batch: the global batch.
        """
        if self.replicas == 1:
            return batch
        return tf.nest.map_structure(
            functools.partial(self._rows, self.local[number]), batch
        )

    def general(self, others: Sequence[BatchSplit]) -> BatchSplit | None:
        """Returns a BatchSplit whose element spec covers those of several BatchSplits.

        Args:
            others: BatchSplits to combine with this BatchSplit.

        Returns:
            The combined BatchSplit; None if the BatchSplits cut differently, or if no
            spec covers all specs.
        """
        for other in others:
            if dataclasses.replace(other, spec=self.spec) != self:
                return None
        spec = tf.nest.map_structure(
            lambda first, *rest: first.most_specific_common_supertype(rest),
            *(each.spec for each in (self, *others)),
        )
        if None in tf.nest.flatten(spec):
            return None
        return dataclasses.replace(self, spec=spec)

    def _rows(self, replica: int, part: Any) -> Any:
        size = _length(part)
        if self.is_filled:
            each = (size + self.replicas - 1) // self.replicas
            begin = _least(replica * each, size)
            return _slice(part, begin, _least(begin + each, size))
        each, more = size // self.replicas, size % self.replicas
        begin, end = (n * each + _least(n, more) for n in (replica, replica + 1))
        return _slice(part, begin, end)


def global_batches(distributed: Any) -> tuple[tf.data.Dataset, BatchSplit] | None:
    """Returns the dataset of global batches of a distributed dataset.

    Args:
        distributed: result of `strategy.experimental_distribute_dataset`.

    Returns:
        A dataset that yields global batches and reads ahead, and the rule by which to
        cut them into the slices that TensorFlow would make. None if TensorFlow's slices
        are no slices of global batches: every worker reads different files, every
        worker reads all data, or TensorFlow fills an incomplete batch from the next
        batch.
    """
    whole = getattr(distributed, "_original_dataset", None)
    if whole is None:
        return None
    replicas = distributed._num_replicas_in_sync or 1
    context = distributed._input_context
    workers = context.num_input_pipelines if context else 1
    # DATA: every worker reads every file, and takes a part of every batch.
    policy = whole.options().experimental_distribute.auto_shard_policy
    is_by_batch = policy == tf.data.experimental.AutoShardPolicy.DATA
    if workers > 1 and not is_by_batch:
        return None
    spec = whole.element_spec
    if not all(isinstance(part, _CUTTABLE) for part in tf.nest.flatten(spec)):
        return None
    is_filled = True
    # With DATA, slices do not depend on the batch size.
    if replicas > 1 and not is_by_batch:
        batch = int(private_api.data_distribute.compute_batch_size(whole))
        is_filled = batch == _UNKNOWN or not _is_always(batch, spec)
        is_symbolic = whole.options().experimental_symbolic_checkpoint
        if is_filled and batch != _UNKNOWN and not is_symbolic:
            return None
    # Take every `workers`-th slice, as TensorFlow does (it cuts batches, then calls
    # `shard`).
    first = context.input_pipeline_id if context else 0
    local = tuple(range(first, replicas, workers))
    if not _is_read_ahead(whole):
        whole = whole.prefetch(_READ_AHEAD)
    return whole, BatchSplit(
        spec=spec,
        local=local,
        replicas=replicas,
        is_filled=is_filled,
        is_ahead=_is_copied_ahead(distributed),
    )


def _is_always(batch: int, spec: Any) -> bool:
    """Returns whether the spec shows that every batch is a full batch.

    Args:
        batch: number of samples in a full batch.
        spec: element spec of a batch.
    """
    parts = tf.nest.flatten(spec)
    return all(part.shape.rank and part.shape[0] == batch for part in parts)


def _is_read_ahead(dataset: Any) -> bool:
    """Returns whether a pipeline ends with `prefetch`, possibly followed by options."""
    while type(dataset).__name__ == "_OptionsDataset":
        (dataset,) = dataset._inputs()
    return type(dataset).__name__ == "_PrefetchDataset"


def _is_copied_ahead(distributed: Any) -> bool:
    """Returns whether slices are copied to the devices before a step needs them.

    True if the user has requested the copies, the devices are not the host, and the
    state of the pipeline is small (symbolic). The state is read with every batch, so
    large states would be too slow.
    """
    options, workers = distributed._options, distributed._input_workers
    if options is None or not options.experimental_fetch_to_device:
        return False
    [host] = map(_local, workers.worker_devices)
    if {*map(_local, workers.compute_devices_for_worker(0))} == {host}:
        return False
    data = distributed._original_dataset.options()
    return bool(data.experimental_symbolic_checkpoint)


def _local(device: str) -> tuple[Any, Any]:
    spec = tf.DeviceSpec.from_string(device)
    return spec.device_type, spec.device_index


def check_shares(size: int, replicas: int) -> None:
    """Checks that all replicas get the same number of samples of a global batch.

    Args:
        size: number of samples in the batch.
        replicas: number of replicas of all workers.

    Raises:
        ConfigurationError: the numbers differ.
    """
    if size % replicas:
        *most, last = [str(n) for n in range(1, size + 1) if size % n == 0]
        needed = f"{', '.join(most)} or {last}" if most else last
        raise errors.ConfigurationError(
            f"The global batch has {size} samples, which cannot be divided equally "
            f"among {replicas} replicas. To resume with another number of workers, use "
            f"{needed} replicas in total."
        )


# Datasets whose elements are batches of the same size as those of their input.
_KEEPING_BATCHES = (
    *("_OptionsDataset", "_PrefetchDataset", "_RepeatDataset", "_ShuffleDataset"),
    *("_SkipDataset", "_TakeDataset"),
)
_BATCH_SIZE = "_tfpreempt_batch_size"


def with_batch_size(dataset: tf.data.Dataset, size: int) -> tf.data.Dataset:
    """Stores the batch size in a dataset, so that `batch_size` finds the size.

    Args:
        dataset: the dataset.
        size: number of samples in a batch.

    Returns:
        The same dataset.
    """
    setattr(dataset, _BATCH_SIZE, size)
    return dataset


def batch_size(dataset: Any) -> int | None:
    """Returns the number of samples in a full batch of a dataset; None if unknown.

    The function reads no data. A read could take minutes, and would use up seeds of
    shuffles, so later epochs would have another order.
    """
    first, *_ = tf.nest.flatten(dataset.element_spec)
    if (shape := getattr(first, "shape", None)) and shape[0] is not None:
        return int(shape[0])
    node = dataset
    while (size := getattr(node, _BATCH_SIZE, None)) is None:
        if type(node).__name__ not in _KEEPING_BATCHES:
            found = int(private_api.data_distribute.compute_batch_size(dataset))
            return None if found == _UNKNOWN else found
        (node,) = node._inputs()
    return int(size)


def _length(part: Any) -> Any:
    """Returns the number of rows of a tensor: an int if it is known, else a tensor."""
    if isinstance(part, tf.RaggedTensor):
        return part.nrows(tf.int64)
    if isinstance(part, tf.SparseTensor):
        return part.dense_shape[0]
    known = part.shape[0]
    return tf.shape(part, tf.int64)[0] if known is None else known


def _least(one: Any, other: Any) -> Any:
    if isinstance(one, int) and isinstance(other, int):
        return min(one, other)
    return tf.minimum(tf.cast(one, tf.int64), tf.cast(other, tf.int64))


def _slice(part: Any, begin: Any, end: Any) -> Any:
    if not isinstance(part, tf.SparseTensor):
        return part[begin:end]
    rank = tf.shape(part.dense_shape)[0]
    start = tf.one_hot(0, rank, tf.cast(begin, tf.int64), dtype=tf.int64)
    rest = part.dense_shape[1:]
    size = tf.concat([[tf.cast(end - begin, tf.int64)], rest], 0)
    return tf.sparse.slice(part, start, size)
