"""Commits in a checkpoint directory: their files, their order, how a commit is made.

cache             private directories of this user; copies of remote checkpoints
catalog           lists the checkpoints of a directory or a store, in one order
checkpoint_state  TensorFlow's `checkpoint` state file
commit            syncs the files, writes the manifest, renames, writes the marker
file_locks        locks a file or a directory against other processes of the machine
flat_commit       commits of flat checkpoints, as a CheckpointManager writes them
head              has another run committed meanwhile? the parent of the next commit
layout            names and paths of the files in a checkpoint directory
manifest          the manifest of a commit: its files, their sizes and checksums
retention         deletes commits beyond the number to keep
storage_identity  is the checkpoint directory still the storage of the start?
user_metadata     metadata that users attach to a checkpoint, beside the manifest

Imported by checkpoint/lease, checkpoint/mirror, checkpoint/restore, checkpoint/state,
checkpoint/tensors, cli, handler, states.
"""
