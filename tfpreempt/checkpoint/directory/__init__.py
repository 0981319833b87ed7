"""Commits in a checkpoint directory: their files, their order, how one is made.

cache             private directories of this user; copies of remote checkpoints
catalog           one value for each checkpoint of a directory; one scan, one order
checkpoint_state  TensorFlow's `checkpoint` state file
commit            syncs the files, writes the manifest, renames, writes the marker last
file_locks        locks a file or a directory against other processes of the machine
flat_commit       commits of checkpoints that stay flat, as those of a CheckpointManager
head              has another run committed meanwhile? the parent of the next commit
layout            names and paths of the files in a checkpoint directory
manifest          the manifest of a commit: its files, their sizes and checksums
retention         deletes commits beyond the number to keep
storage_identity  is the checkpoint directory still the storage of the start?
user_metadata     the metadata that users attach to a checkpoint, beside its manifest

Imported by checkpoint/lease, checkpoint/mirror, checkpoint/restore, checkpoint/state,
checkpoint/tensors, cli, handler, states.
"""
