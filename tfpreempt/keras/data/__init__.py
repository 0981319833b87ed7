"""The position in the data of a `fit`.

arrays           the position in arrays whose order is drawn from NumPy's generator
counted_dataset  a wrapper of the fit's dataset that counts the iterators of the fit
jax_data         training data on JAX
loader           the position in third-party loaders, such as Grain's
pipeline         inspects a tf.data pipeline: its datasets, shuffles and caches
position         the ways to save the position of training in the data
sequence         the position in a PyDataset (Keras 3) or Sequence (tf_keras): an index
tensorflow_data  training data of TensorFlow: the states of tf.data iterators
training_data    tracks the iterators of a fit, and saves and restores the position

Imported by keras/backends, keras/fit.
"""
