"""Restores with TensorFlow alone; prints weights, step and number of runs."""

import sys

import tensorflow as tf

weights, trained = tf.Variable(tf.zeros([7])), tf.Variable(0, dtype=tf.int64)
runs = tf.Variable(0, dtype=tf.int64)
total = tf.Variable(0.0)
checkpoint = tf.train.Checkpoint(
    weights=weights, trained=trained, checkpointed_runs=runs, total=total
)
status = checkpoint.restore(tf.train.latest_checkpoint(sys.argv[1]))
status.assert_existing_objects_matched()
print(weights.numpy().tobytes().hex(), trained.numpy(), runs.numpy())
if "tfpreempt" in sys.modules:
    sys.exit("this must work without tfpreempt")
