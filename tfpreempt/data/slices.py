"""The slices of a global batch that this process's replicas train on.

`strategy.experimental_distribute_dataset` cuts global batches by a dataset of its own,
below which the place is that of slices: it is another one with another number of
replicas, and with symbolic checkpoints TensorFlow cannot save it at all (2.21). Here
global batches are read, and cut into the same slices when a step takes one. So the
place is that of the global batches, and the same on every worker, however many there
are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfpreempt.core import seams

_READ_AHEAD = 2
"""Global batches that are read while a step runs, as many as TensorFlow reads."""

_CUTTABLE = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)
_UNKNOWN = -1  # a batch size that TensorFlow cannot tell


def sliced(distributed: Any) -> tf.data.Dataset | None:
    """The global batches of a distributed dataset, cut for this process's replicas.

    Args:
        distributed: what `strategy.experimental_distribute_dataset` returned.

    Returns:
        A dataset that gives, for each global batch, a tuple with a slice for each local
        replica, which may be smaller than the others, or empty. None where that is not
        what TensorFlow would give: the workers share the data by files, or each reads
        all of them, or batches that are not full are joined with what follows.
    """
    whole = getattr(distributed, "_original_dataset", None)
    if whole is None:
        return None
    replicas = distributed._num_replicas_in_sync or 1
    context = distributed._input_context
    workers = context.num_input_pipelines if context else 1
    is_by_batch = _is_shared_by_batch(whole)
    if workers > 1 and not is_by_batch:
        return None
    spec = whole.element_spec
    if not all(isinstance(part, _CUTTABLE) for part in tf.nest.flatten(spec)):
        return None
    sizes: Sequence[int] | None = None
    if replicas > 1 and not is_by_batch:  # whoever shares by batch ignores its size
        batch = int(seams.data_distribute.compute_batch_size(whole))
        if batch != _UNKNOWN and _is_always(batch, spec):
            sizes = _dealt(batch, replicas)
        elif batch != _UNKNOWN and not whole.options().experimental_symbolic_checkpoint:
            return None
    # Every so many, as TensorFlow's `shard` after its rebatching.
    first = context.input_pipeline_id if context else 0
    local = range(first, replicas, workers)

    def cut(*batch: Any) -> tuple[Any, ...]:
        structure = batch if isinstance(spec, tuple) else batch[0]
        if replicas == 1:
            return (structure,)
        return tuple(
            tf.nest.map_structure(_slicing(replica, replicas, sizes), structure)
            for replica in local
        )

    if not _is_read_ahead(whole):
        whole = whole.prefetch(_READ_AHEAD)
    return whole.map(cut)


def _is_shared_by_batch(dataset: Any) -> bool:
    """Whether each worker takes its part of each batch, and reads all files."""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    return bool(policy == tf.data.experimental.AutoShardPolicy.DATA)


def _is_always(batch: int, spec: Any) -> bool:
    """Whether no batch has fewer samples than others."""
    parts = tf.nest.flatten(spec)
    return all(part.shape.rank and part.shape[0] == batch for part in parts)


def _dealt(batch: int, replicas: int) -> list[int]:
    """How TensorFlow deals a batch of known size: the first have one sample more."""
    least, more = divmod(batch, replicas)
    return [least + 1] * more + [least] * (replicas - more)


def _is_read_ahead(dataset: Any) -> bool:
    """Whether a pipeline ends with a `prefetch`, options aside."""
    while type(dataset).__name__ == "_OptionsDataset":
        (dataset,) = dataset._inputs()
    return type(dataset).__name__ == "_PrefetchDataset"


def _slicing(
    replica: int, replicas: int, sizes: Sequence[int] | None
) -> Callable[[Any], Any]:
    """What takes one replica's slice of a part of a batch."""

    def rows(part: Any) -> Any:
        if sizes is not None:
            begin = sum(sizes[:replica])
            return _rows(part, begin, begin + sizes[replica])
        size = _length(part)
        each = (size + replicas - 1) // replicas
        begin = tf.minimum(replica * each, size)
        return _rows(part, begin, tf.minimum(begin + each, size))

    return rows


def _length(part: Any) -> Any:
    if isinstance(part, tf.RaggedTensor):
        return part.nrows(tf.int64)
    if isinstance(part, tf.SparseTensor):
        return part.dense_shape[0]
    return tf.shape(part, tf.int64)[0]


def _rows(part: Any, begin: Any, end: Any) -> Any:
    if not isinstance(part, tf.SparseTensor):
        return part[begin:end]
    rank = tf.shape(part.dense_shape)[0]
    start = tf.one_hot(0, rank, tf.cast(begin, tf.int64), dtype=tf.int64)
    rest = part.dense_shape[1:]
    size = tf.concat([[tf.cast(end - begin, tf.int64)], rest], 0)
    return tf.sparse.slice(part, start, size)
