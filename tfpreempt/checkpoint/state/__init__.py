"""The values in a commit, and their encoding as bytes; imports no TensorFlow.

bundle               reads and writes the index of a TensorFlow checkpoint
contents             Contents: interface for the files that a framework writes
encoding             encodes Python and NumPy values as JSON and raw bytes, bit for bit
partitioning         divides large tensors evenly among workers, or among threads
random_state         saves the random generators of the program, per worker
state                State: a named value that every commit includes
state_file           reads and writes the file of a single State, outside of any commit
unfinished_caches    deletes the unfinished files of Dataset.cache(path)
unsaved_state_check  warns of values that a step changes and no commit holds

Imported by checkpoint/mirror, checkpoint/restore, checkpoint/tensors, handler, jax,
keras, states, tfpreempt.
"""
