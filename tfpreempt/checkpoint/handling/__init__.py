"""What a `Checkpoint` handle is made of.

cache      copies of remote checkpoints that all processes of a node share while they
contents   what a place holds that a handle refers to: a commit, or any files
metadata   what users note about a checkpoint: a JSON object beside its manifest
restoring  restores a tf.train.Checkpoint through a handle
turns      one process, or thread, of a node at a time changes what is in a directory
"""
