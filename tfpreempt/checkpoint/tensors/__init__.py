"""TensorFlow's part of a save: variables, iterators, TensorFlow's checkpoint files.

bundle_reader     lets TensorFlow restore large tensors that many threads have read
data_order        fingerprints of the order of tf.data pipelines
gather            reads the values to save, on all workers; takes out large tensors
iterator_state    positions in tf.data pipelines, and their cache files
per_replica       variables with a different value on each replica; saved per worker
program_values    adapter: random generators, and the values changed by a step
reader            restores a tf.train.Checkpoint after a comparison of the structure
replica_parallel  divides the tensors that all workers hold: each worker writes a part
shuffle_seeds     adds the number of drawn shuffle seeds to an iterator's state
tensor_contents   adapter: saves and restores a Checkpoint, directly or by a manager
variables         finds the variables of a tf.train.Checkpoint, tracked or not

Imported by data, keras, states.
"""
