"""A custom loop that logs to a tracker; a restart continues the same run.

Usage: loop.py CHECKPOINTS
"""

import sys

import tensorflow as tf

import tfpreempt


def train(directory, tracker, steps=2000, save_freq=100):
    """Trains up to a step, starting from the newest commit in the directory."""
    weights = tf.Variable(tf.zeros([3, 1]))
    x = tf.random.stateless_normal([640, 3], seed=[1, 0])
    data = tfpreempt.data.from_arrays(
        (x, x @ [[1.0], [2.0], [3.0]]), batch_size=64, seed=2
    )
    batches = iter(data.repeat())

    @tf.function
    def train_step(batches):
        x, y = next(batches)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ weights - y) ** 2)
        weights.assign_sub(0.01 * tape.gradient(loss, weights))
        return loss

    checkpoint = tf.train.Checkpoint(weights=weights, data=batches)
    with tfpreempt.PreemptionCheckpointHandler(
        None, checkpoint, directory, save_freq=save_freq
    ) as handler:
        for _ in range(handler.total_run_calls, steps):
            loss = handler.run(train_step, batches)
            tracker.log({"loss": loss})
    tracker.finish()


if __name__ == "__main__":
    tracker = tfpreempt.trackers.tensorboard("logs", config={"learning rate": 0.01})
    train(sys.argv[1], tracker)
