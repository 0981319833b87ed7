"""Trains, and logs to MLflow; started again, it goes on in the same run.

Usage: with_mlflow.py CHECKPOINTS, and MLFLOW_TRACKING_URI says where to log.
"""

import sys

import mlflow
import tensorflow as tf

import tfpreempt
from tfpreempt.states import JsonState


def newest_step(run_id):
    """The newest step that the run has a loss of; -1 if none."""
    history = mlflow.MlflowClient().get_metric_history(run_id, "loss")
    return max((metric.step for metric in history), default=-1)


def train(directory, steps=2000, save_every=100):
    """Trains up to a step, from the newest commit in the directory on."""
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

    run = JsonState("mlflow")  # what it holds goes with each commit
    checkpoint = tf.train.Checkpoint(weights=weights, data=batches)
    with (
        tfpreempt.PreemptionCheckpointHandler(
            None, checkpoint, directory, save_every=save_every
        ) as handler,
        mlflow.start_run(run_id=run.value) as active,  # None: a new one
    ):
        if run.value is None:
            run.value = active.info.run_id
            handler.save()  # from now on each start knows it
        logged = newest_step(run.value)
        for step in range(handler.total_run_calls, steps):
            loss = handler.run(train_step, batches)
            if step > logged:  # what is trained again has the same numbers
                mlflow.log_metric("loss", float(loss), step=step)


if __name__ == "__main__":
    train(*sys.argv[1:])
