"""3. Make a step durable, and find it again after a restart.

directory/  commits in a checkpoint directory: their files, their order
lease/      one run at a time for each directory and each mirror
mirror/     the copy of a checkpoint directory in an object store
restore/    opens a directory: finds, verifies, restores and saves a commit
state/      the contents of a save, and their bytes; without TensorFlow
tensors/    TensorFlow's part of a save; the only package here that imports it

Imported by no other package.
"""
