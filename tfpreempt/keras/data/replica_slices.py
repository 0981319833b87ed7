"""The slices of global batches that this process's replicas train on.

`strategy.experimental_distribute_dataset` cuts global batches with `RebatchDataset`,
which knows no symbolic checkpoints (TensorFlow 2.21): with it, what was read ahead is
saved as data, or nothing can be saved at all. Here the same slices are cut by ops whose
state is a position.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def replica_slices(dataset: Any) -> tf.data.Dataset | None:
    """What the local iterator of a distributed dataset gives, one slice for a replica.

    Args:
        dataset: what `strategy.experimental_distribute_dataset` returned.

    Returns:
        In turn a slice for each local replica, then those of the next global batch. A
        slice of the last batch may be smaller, or empty. None if the pipeline was not
        made for symbolic checkpoints, is shared among workers by its files, or holds
        other things than dense tensors.
    """
    whole = getattr(dataset, "_original_dataset", None)
    replicas = getattr(dataset, "_num_replicas_in_sync", None)
    if whole is None or replicas is None:
        return None
    context = dataset._input_context
    workers = context.num_input_pipelines if context else 1
    options = whole.options()
    by_data = tf.data.experimental.AutoShardPolicy.DATA
    is_by_data = options.experimental_distribute.auto_shard_policy == by_data
    if not options.experimental_symbolic_checkpoint or (workers > 1 and not is_by_data):
        return None
    spec = whole.element_spec
    if not all(isinstance(part, tf.TensorSpec) for part in tf.nest.flatten(spec)):
        return None
    # Every so many, as TensorFlow's `shard` after its rebatching.
    first = context.input_pipeline_id if context else 0

    def cut(*batch: Any) -> tf.data.Dataset:
        structure = batch if isinstance(spec, tuple) else batch[0]

        def take(replica: tf.Tensor) -> Any:
            def rows(tensor: tf.Tensor) -> tf.Tensor:
                return _rows(tensor, replica, replicas)

            return tf.nest.map_structure(rows, structure)

        return tf.data.Dataset.range(first, replicas, workers).map(take)

    return whole.flat_map(cut)


def _rows(tensor: tf.Tensor, replica: tf.Tensor, replicas: int) -> tf.Tensor:
    size = tf.shape(tensor, tf.int64)[0]
    each = (size + replicas - 1) // replicas
    begin = tf.minimum(replica * each, size)
    found = tensor[begin : tf.minimum(begin + each, size)]
    whole = tensor.shape[0]
    if whole is not None and whole % replicas == 0:
        found.set_shape([whole // replicas, *tensor.shape[1:]])
    return found
