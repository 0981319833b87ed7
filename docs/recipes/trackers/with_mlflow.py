"""Trains, and logs to MLflow; a restart continues the same run.

Usage: with_mlflow.py CHECKPOINTS, with MLFLOW_TRACKING_URI as the server.
"""

import sys

import mlflow
import tensorflow as tf

import tfpreempt
from tfpreempt.states import JsonState


def newest_step(run_id):
    """Returns the newest step with a loss in the run; -1 without a step."""
    history = mlflow.MlflowClient().get_metric_history(run_id, "loss")
    return max((metric.step for metric in history), default=-1)


def train(directory, steps=2000, save_freq=100):
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

    run = JsonState("mlflow")  # saved with each commit
    checkpoint = tf.train.Checkpoint(weights=weights, data=batches)
    with (
        tfpreempt.PreemptionCheckpointHandler(
            None, checkpoint, directory, save_freq=save_freq
        ) as handler,
        mlflow.start_run(run_id=run.value) as active,  # None: a new run
    ):
        if run.value is None:
            run.value = active.info.run_id
            handler.save()  # every restart continues the same run
        logged = newest_step(run.value)
        for step in range(handler.total_run_calls, steps):
            loss = handler.run(train_step, batches)
            if step > logged:  # repeated steps are logged already
                mlflow.log_metric("loss", float(loss), step=step)


if __name__ == "__main__":
    train(*sys.argv[1:])
