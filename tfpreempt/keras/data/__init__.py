"""The position in the data of a `fit`; in public, `tfpreempt.data` by another name.

counted_dataset  the dataset that `fit` makes its iterators of, in place of its own
loader           the position in other people's loaders that know it, such as Grain's
pipeline         what a tf.data pipeline is built of: generators, shuffles, caches
position         where training is in its data, and how a pipeline lets it be kept
sequence         the position in a PyDataset (Keras 3) or Sequence (tf_keras): an index
training_data    the training data of one fit: its iterators, and where training is

Imported by keras/fit.
"""

from __future__ import annotations

from tfpreempt.data import distribute, from_arrays, from_index

__all__ = ["distribute", "from_arrays", "from_index"]
