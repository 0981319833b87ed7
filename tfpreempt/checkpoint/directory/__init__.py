"""Commits in a checkpoint directory: the files, their order, and how a commit is made.

cache             this user's private cache directory; copies of remote checkpoints
catalog           lists the checkpoints of a directory or a store, newest first
checkpoint_state  TensorFlow's `checkpoint` state file
commit            makes a commit: syncs files, writes manifest and marker
file_locks        locks a file or a directory against other processes of the machine
flat_commit       commits of flat checkpoints, as a CheckpointManager writes them
head              detects commits of other runs; the parent of the next commit
layout            names and paths of the files in a checkpoint directory
manifest          the manifest of a commit: its files, their sizes and checksums
retention         decides which commits stay, and deletes the others
storage_identity  checks that the directory's path still leads to the same storage
user_metadata     metadata that users attach to a checkpoint, beside the manifest

Imported by checkpoint/lease, checkpoint/mirror, checkpoint/restore, checkpoint/state,
checkpoint/tensors, cli, handler, jax, keras, states, tfpreempt.
"""
