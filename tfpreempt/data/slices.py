"""The slices of a global batch that this process's replicas train on.

`strategy.experimental_distribute_dataset` cuts global batches by a dataset of its own,
below which the place is that of slices: it is another one with another number of
replicas, and with symbolic checkpoints TensorFlow cannot save it at all (2.21). Here
global batches are read, and cut into the same slices when a step takes one. So the
place is that of the global batches, and the same on every worker, however many there
are.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import tensorflow as tf

from tfpreempt import errors
from tfpreempt.core import seams

_READ_AHEAD = 2
"""Global batches that are read while a step runs, as many as TensorFlow reads."""

_CUTTABLE = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)
_UNKNOWN = -1  # a batch size that TensorFlow cannot tell


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a global batch is cut for this process's replicas.

    Attributes:
        spec: of the global batch.
        local: the numbers of this process's replicas.
        replicas: of all processes.
        sizes: samples for each replica, where all batches are of one size; else empty:
            then all have as many, and the last ones less, or none.
    """

    spec: Any
    local: tuple[int, ...]
    replicas: int
    sizes: tuple[int, ...]

    def slices(self, batch: Any) -> list[Any]:
        """What each local replica gets of a batch, some of them maybe nothing."""
        if self.replicas == 1:
            return [batch]
        return [
            tf.nest.map_structure(functools.partial(self._rows, replica), batch)
            for replica in self.local
        ]

    def _rows(self, replica: int, part: Any) -> Any:
        if self.sizes:
            begin = sum(self.sizes[:replica])
            return _rows(part, begin, begin + self.sizes[replica])
        size = _length(part)
        each = (size + self.replicas - 1) // self.replicas
        begin = tf.minimum(replica * each, size)
        return _rows(part, begin, tf.minimum(begin + each, size))


def global_batches(distributed: Any) -> tuple[tf.data.Dataset, Cut] | None:
    """The global batches below a distributed dataset, and how they are cut.

    Args:
        distributed: what `strategy.experimental_distribute_dataset` returned.

    Returns:
        A dataset that reads ahead, and the cut. None where that is not what TensorFlow
        would give: the workers share the data by files, or each reads all of them, or
        batches that are not full are joined with what follows.
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
    sizes: tuple[int, ...] = ()
    batch = int(seams.data_distribute.compute_batch_size(whole))
    if batch != _UNKNOWN and _is_always(batch, spec):
        # Whoever shares by batch ignores that all have one size.
        sizes = _filled(batch, replicas) if is_by_batch else _dealt(batch, replicas)
    elif (
        batch != _UNKNOWN
        and replicas > 1
        and not is_by_batch
        and not whole.options().experimental_symbolic_checkpoint
    ):
        return None
    # Every so many, as TensorFlow's `shard` after its rebatching.
    first = context.input_pipeline_id if context else 0
    local = tuple(range(first, replicas, workers))
    if not _is_read_ahead(whole):
        whole = whole.prefetch(_READ_AHEAD)
    return whole, Cut(spec=spec, local=local, replicas=replicas, sizes=sizes)


def _is_shared_by_batch(dataset: Any) -> bool:
    """Whether each worker takes its part of each batch, and reads all files."""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    return bool(policy == tf.data.experimental.AutoShardPolicy.DATA)


def _is_always(batch: int, spec: Any) -> bool:
    """Whether no batch has fewer samples than others."""
    parts = tf.nest.flatten(spec)
    return all(part.shape.rank and part.shape[0] == batch for part in parts)


def _dealt(batch: int, replicas: int) -> tuple[int, ...]:
    """How TensorFlow deals a batch of known size: the first have one sample more."""
    least, more = divmod(batch, replicas)
    return (least + 1,) * more + (least,) * (replicas - more)


def _filled(batch: int, replicas: int) -> tuple[int, ...]:
    """How it deals one of unknown size: the last have less, or nothing."""
    each = -(-batch // replicas)
    return tuple(max(min(each, batch - i * each), 0) for i in range(replicas))


def _is_read_ahead(dataset: Any) -> bool:
    """Whether a pipeline ends with a `prefetch`, options aside."""
    while type(dataset).__name__ == "_OptionsDataset":
        (dataset,) = dataset._inputs()
    return type(dataset).__name__ == "_PrefetchDataset"


def check_shares(batch: Any, replicas: int) -> None:
    """Sees whether replicas have equal shares of a global batch.

    Args:
        batch: of tensors or arrays, of any structure.
        replicas: of all workers.

    Raises:
        ConfigurationError: they have not.
    """
    size = int(_length(tf.nest.flatten(batch)[0]))
    if size % replicas:
        good = [str(n) for n in range(1, size + 1) if size % n == 0]
        raise errors.ConfigurationError(
            f"The global batch has {size} samples, which {replicas} replicas cannot "
            "share equally. A run that goes on with another number of workers needs "
            f"{', '.join(good[:-1])} or {good[-1]} replicas in all."
        )


def _length(part: Any) -> Any:
    """The number of samples in a part of a batch."""
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
