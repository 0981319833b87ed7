"""Trains, and logs to TensorBoard; a restart continues in the same folder.

Usage: with_tensorboard.py CHECKPOINTS LOGS
"""

import datetime
import sys

import tensorflow as tf

import tfpreempt
from tfpreempt.states import JsonState


def newest_step(folder):
    """Returns the newest step with a loss in the folder; -1 without a step."""
    newest = -1
    for file in tf.io.gfile.glob(f"{folder}/events.*"):
        try:
            for event in tf.compat.v1.train.summary_iterator(file):
                if any(value.tag == "loss" for value in event.summary.value):
                    newest = max(newest, event.step)
        except tf.errors.DataLossError:
            pass  # the last event is incomplete
    return newest


def train(directory, logs, steps=2000, save_freq=100):
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

    run = JsonState("tensorboard")  # saved with each commit
    checkpoint = tf.train.Checkpoint(weights=weights, data=batches)
    with tfpreempt.PreemptionCheckpointHandler(
        None, checkpoint, directory, save_freq=save_freq
    ) as handler:
        if run.value is None:
            run.value = f"{logs}/{datetime.datetime.now():%Y%m%d-%H%M%S}"
            handler.save()  # every restart continues the same run
        logged = newest_step(run.value)
        # max_queue=0 writes each event at once: a kill loses no event.
        with tf.summary.create_file_writer(run.value, max_queue=0).as_default():
            for step in range(handler.total_run_calls, steps):
                loss = handler.run(train_step, batches)
                if step > logged:  # repeated steps are logged already
                    tf.summary.scalar("loss", loss, step=step)


if __name__ == "__main__":
    train(*sys.argv[1:])
