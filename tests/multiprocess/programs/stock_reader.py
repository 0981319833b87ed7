"""An evaluation job with TensorFlow alone, which restores each newest checkpoint.

The job ends when it has restored the step in its second argument.
"""

import sys

import tensorflow as tf

directory, last = sys.argv[1], int(sys.argv[2])
weights, trained = tf.Variable(tf.zeros([7])), tf.Variable(0, dtype=tf.int64)
runs = tf.Variable(0, dtype=tf.int64)
total = tf.Variable(0.0)
checkpoint = tf.train.Checkpoint(
    weights=weights, trained=trained, checkpointed_runs=runs, total=total
)


def restore(path: str) -> bool:
    """Returns whether the checkpoint is complete; it may have been deleted."""
    try:
        checkpoint.restore(path).assert_existing_objects_matched()
    except (tf.errors.NotFoundError, tf.errors.OpError) as error:
        if tf.train.latest_checkpoint(directory) == path:
            sys.exit(f"{path} is the newest checkpoint, and half of it: {error}")
        return False
    if trained.numpy() != runs.numpy():
        sys.exit(f"{path} is of two steps: {trained.numpy()}, {runs.numpy()}")
    print("read", runs.numpy(), weights.numpy().tobytes().hex(), flush=True)
    return True


print("reads", flush=True)
seen: set[str] = set()
for path in tf.train.checkpoints_iterator(directory, timeout=120):
    if not restore(path):
        continue
    seen.add(path)
    if runs.numpy() == last:
        break
if "tfpreempt" in sys.modules:
    sys.exit("this must work without tfpreempt")
print("restored", len(seen), flush=True)
