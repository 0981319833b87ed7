"""The values in a commit, and their encoding as bytes; imports no TensorFlow.

array_contents       adapter: saves and restores named arrays, without a framework
contents             Contents: interface for the files that a framework writes
data_order           fingerprints of the order of training data, compared by a restore
encoding             encodes Python and NumPy values as JSON and raw bytes, bit for bit
following_step       warns if a loop does not continue with the next step
keras_generator      adapter: the random generator of Keras on another backend
random_state         saves the random generators of the program, per worker
state                State: a named value that every commit includes
state_file           reads and writes the file of a single State, outside of any commit
unfinished_caches    deletes incomplete files of tf.data's Dataset.cache(path)
unsaved_state_check  warns of values that a step changes and no commit holds

Imported by checkpoint/mirror, checkpoint/restore, checkpoint/tensors, cli, data,
handler, jax, keras, states, tfpreempt.
"""
