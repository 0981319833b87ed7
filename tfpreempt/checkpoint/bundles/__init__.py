"""TensorFlow's checkpoint files, read and written without TensorFlow.

bundle         reads and writes the index of a checkpoint
bundle_writer  writes tensors with many threads, beside TensorFlow's files or alone
partitioning   divides large tensors evenly among workers, or among threads
tensor_copies  copies the tensors of an asynchronous save with many threads
tensor_reader  reads tensors with many threads, and compares their checksums

Imported by checkpoint/restore, checkpoint/state, checkpoint/tensors, jax.
"""
