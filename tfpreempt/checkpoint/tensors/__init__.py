"""TensorFlow's part of a save: variables, iterators, TensorFlow's checkpoint files.

bundle_reader     reads the large tensors of a restore, with many threads
bundle_writer     writes large tensors beside TensorFlow's files, with many threads
data_order        fingerprints of the order of training data, compared by a restore
gather            the read of values by all workers; takes out the large tensors
iterator_state    positions in tf.data pipelines, and their cache files
per_replica       variables with a value of its own on each replica; saved per worker
program_values    adapter: random generators, and the values changed by a step
reader            restores a tf.train.Checkpoint after a comparison of the structure
replica_parallel  tensors held by all workers: each worker writes a share
shuffle_seeds     adds the drawn seeds of its shuffles to an iterator's state
tensor_contents   adapter: a save and a restore of a Checkpoint, or by a manager
variables         the variables behind a tf.train.Checkpoint, tracked or not

Imported by data, keras, states.
"""
