"""The contents of a save, and their encoding as bytes; without TensorFlow.

bundle               reads and writes the index of a TensorFlow checkpoint
contents             interface for the part of a save done by a framework
encoding             Python and NumPy values as JSON and raw bytes, bit for bit
partitioning         partitions large tensors evenly between workers and threads
random_state         the random generators of the program, saved per worker
state                State: a named value that each save includes
state_file           a State in a file of its own, outside of any commit
unfinished_caches    deletes the unfinished files of Dataset.cache(path)
unsaved_state_check  names values that a step changes and no commit holds

Imported by checkpoint/mirror, checkpoint/restore, checkpoint/tensors, handler, keras,
states, tfpreempt.
"""
