"""Trains, and logs to W&B; a restart continues the same run.

Usage: with_wandb.py CHECKPOINTS
"""

import pathlib
import sys
import uuid

import offline_runs
import tensorflow as tf
import wandb

import tfpreempt
from tfpreempt.states import JsonState

RECENT = 1000
"""Steps that W&B may not have sent or written when the process is killed."""


def first_new_step(run):
    """Returns the step after the newest step in the run."""
    if not run.offline:
        return run.step  # from the server
    folder = pathlib.Path(run.dir).parents[1]
    return max(offline_runs.steps(folder, run.id), default=-1) + 1


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

    # Saved with each commit.
    run_id, recent = JsonState("wandb"), JsonState("wandb-recent", [])
    checkpoint = tf.train.Checkpoint(weights=weights, data=batches)
    with tfpreempt.PreemptionCheckpointHandler(
        None, checkpoint, directory, save_freq=save_freq
    ) as handler:
        if run_id.value is None:
            run_id.value = uuid.uuid4().hex[:8]
            handler.save()  # every restart continues the same run
        with wandb.init(project="tfpreempt", id=run_id.value, resume="allow") as run:
            new = first_new_step(run)
            for step, row in recent.value:
                if step >= new:
                    run.log(row, step=step)
            for step in range(handler.total_run_calls, steps):
                row = {"loss": float(handler.run(train_step, batches))}
                recent.value = [*recent.value[1 - RECENT :], [step, row]]
                if step >= new:  # repeated steps are logged already
                    run.log(row, step=step)


if __name__ == "__main__":
    train(*sys.argv[1:])
