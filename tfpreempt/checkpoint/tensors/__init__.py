"""TensorFlow's part of a save: variables, iterators, its checkpoint files.

bundle_reader     reads the large tensors of a restore, with many threads
bundle_writer     writes large tensors beside TensorFlow's files, with many threads
data_order        fingerprints of the order of training data, compared by a restore
gather            the read that all workers take part in; takes out the large tensors
iterator_state    positions in tf.data pipelines, and the cache files that they need
per_replica       variables of which each worker saves the values of its own replicas
program_values    adapter: random generators, and the values that a step changes
reader            restores a tf.train.Checkpoint, after its structure was compared
replica_parallel  tensors that all workers hold: each worker writes a share
shuffle_seeds     adds to an iterator's state the seeds that its shuffles have drawn
tensor_contents   adapter: a save and a restore of a Checkpoint, or by a manager
variables         the variables behind a tf.train.Checkpoint, tracked or not

Imported by data, keras, states.
"""
