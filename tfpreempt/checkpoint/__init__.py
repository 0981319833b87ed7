"""3. Makes a step durable, and finds the commit again after a restart.

bundles/    TensorFlow's checkpoint files, without TensorFlow
directory/  commits in a checkpoint directory: their files, their order
lease/      one run at a time for each directory and each mirror
mirror/     the copy of a checkpoint directory in an object store
restore/    opens a directory: finds, verifies, restores and saves a commit
state/      the contents of a save, and their bytes; without TensorFlow
tensors/    TensorFlow's part of a save; the only package here that imports TensorFlow

Imported by no other package.
"""
