"""The contents of a save, and the bytes that stand for them; without TensorFlow.

bundle               the index of a TensorFlow checkpoint, read and written
contents             the part of a save or a restore that a framework does
encoding             Python and NumPy values as JSON and raw bytes, bit for bit
partitioning         divides large tensors evenly between workers and threads
random_state         the random generators of the program, each worker's own
state                State: a named value that each save includes
state_file           one State in a file of its own, outside of any commit
unfinished_caches    deletes the unfinished files of Dataset.cache(path)
unsaved_state_check  names values that a step changes and no commit holds

Imported by checkpoint/mirror, checkpoint/restore, checkpoint/tensors, handler, keras,
states, tfpreempt.
"""
