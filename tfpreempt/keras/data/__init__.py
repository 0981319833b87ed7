"""The position in the data of a `fit`.

counted_dataset  the dataset from which `fit` makes iterators, instead of its own
loader           the position in third-party loaders, such as Grain's
pipeline         the parts of a tf.data pipeline: generators, shuffles, caches
position         the position of training in the data, and how a pipeline restores it
sequence         the position in a PyDataset (Keras 3) or Sequence (tf_keras): an index
training_data    the training data of a fit: its iterators, and the position of training

Imported by keras/fit.
"""
