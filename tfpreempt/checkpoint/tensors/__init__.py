"""TensorFlow's part of a save: variables, iterators, TensorFlow's checkpoint files.

bundle_reader     lets TensorFlow restore large tensors that many threads have read
data_order        fingerprints of the order of tf.data pipelines
gather            reads the values of a save on all workers; extracts large tensors
iterator_state    saves positions in tf.data pipelines, and checks their cache files
per_replica       saves variables that differ between replicas or workers
program_values    adapter: saves random generators, reads the values a step changes
reader            restores a tf.train.Checkpoint after a comparison of the structure
replica_parallel  divides the tensors equal on all workers; each worker writes a share
shuffle_seeds     adds the number of drawn shuffle seeds to an iterator's state
tensor_contents   adapter: saves and restores a Checkpoint, alone or of a manager
variables         finds the variables that a tf.train.Checkpoint tracks or misses

Imported by data, keras, states.
"""
