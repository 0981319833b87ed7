"""The position in the data; in public, pipelines whose position is a few numbers.

counted_dataset  the dataset that `fit` makes its iterators of, in place of its own
host_iterator    a distributed iterator whose position can be saved
iterators        iterators of the data, and the ordinary ones below them
pipeline         what a tf.data pipeline is built of: generators, shuffles, caches
pipelines        input pipelines whose position is a few numbers
position         where training is in its data, and how a pipeline lets it be kept
replica_slices   the slices of global batches that this process's replicas train on
sequence         the position in a PyDataset (Keras 3) or Sequence (tf_keras): an index
training_data    the training data of one fit: its iterators, and where training is
"""

from __future__ import annotations

from tfpreempt.keras.data.pipelines import from_arrays, from_index

__all__ = ["from_arrays", "from_index"]
