"""Stands in for the package tensorboard, which is not installed for the tests.

With the parent of this folder on the path, `tf.summary.scalar` writes the events of the
real package, but for the description.
"""
