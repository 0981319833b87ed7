"""Makes checkpoints to keep, which the code of later versions must restore.

    kept_program.py - KIND DIRECTORY [STEP]

The program trains a few steps, and gets a notice during step STEP. Without STEP it runs
to its end and prints the results in one line. It uses only features of the first
version. KIND is `loop`, `manager` or `fit`; `mirror`, a loop whose commits are mirrored
to DIRECTORY/mirror; `states`, without a handler; or `workers`, one of two workers by
TF_CONFIG.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from typing import IO

import keras
import numpy as np
import tensorflow as tf

import tfpreempt
from tfpreempt.checkpoint.bundles import bundle_writer

STEPS = 8


def tell() -> None:
    """Sends a notice to this process, which receives it before the next step."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)


class Losses(tfpreempt.State):
    """The losses of all steps."""

    def __init__(self) -> None:
        super().__init__("losses")
        self.all: list[float] = []

    def save(self, fileobj: IO[bytes]) -> None:
        fileobj.write(json.dumps(self.all).encode())

    def load(self, fileobj: IO[bytes]) -> None:
        self.all = json.loads(fileobj.read())


def train(
    directory: str, last: int, *, is_managed: bool = False, remote: str | None = None
) -> object:
    """A loop with variables, an iterator, a generator and a State."""
    weights = tf.Variable(tf.ones([4, 2]))
    generator = tf.random.Generator.from_seed(3)
    iterator = iter(tf.data.Dataset.range(100).shuffle(10, seed=5).batch(2))
    checkpoint = tf.train.Checkpoint(
        weights=weights, generator=generator, iterator=iterator
    )
    losses = Losses()
    saved: tf.train.Checkpoint | tf.train.CheckpointManager = checkpoint
    if is_managed:
        saved = tf.train.CheckpointManager(checkpoint, directory, max_to_keep=2)
    handler = tfpreempt.PreemptionCheckpointHandler(
        tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({})),
        saved,
        directory,
        mirror_dir=remote,
    )

    def step() -> None:
        if len(losses.all) + 1 == last:
            tell()
        x = tf.cast(next(iterator), tf.float32)[None] / 10
        weights.assign(weights * 0.5 + generator.normal([4, 2]) * x)
        losses.all.append(float(tf.reduce_sum(weights)))

    while handler.total_run_calls < STEPS:
        handler.run(step)
    return losses.all


def fit(directory: str, last: int) -> object:
    """A `model.fit` with a dropout, a validation and a callback that remembers."""
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [keras.Input([4]), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    )
    model.compile("adam", "mse", metrics=["mae"])
    x = np.arange(64, dtype="float32").reshape(16, 4) / 64
    seen = 0

    class Notice(keras.callbacks.Callback):  # type: ignore[misc]  # no types
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            nonlocal seen
            seen += 1
            if seen == last:
                tell()

    callbacks = [
        tfpreempt.keras.PreemptionCallback(directory),
        keras.callbacks.ReduceLROnPlateau(patience=1),
        Notice(),
    ]
    history = model.fit(
        x,
        x[:, :1],
        batch_size=4,
        epochs=3,
        validation_split=0.25,
        verbose=0,
        callbacks=callbacks,
    )
    return history.history


def train_together(directory: str, last: int) -> object:
    """Trains in a loop of two workers, with common and separate variables."""
    bundle_writer.SMALL_BYTES = bundle_writer.WORTH_BYTES = 1  # a share for each
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    index = strategy.cluster_resolver.task_id
    with strategy.scope():
        weights = tf.Variable(tf.ones([4, 2]), aggregation=tf.VariableAggregation.MEAN)
        sums = tf.Variable(
            0.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
        generator = tf.random.Generator.from_seed(3)
    data = tfpreempt.data.from_arrays(
        np.arange(64, dtype="float32"), batch_size=8, seed=5
    )
    batches = tfpreempt.data.distribute(data.repeat(), strategy)
    losses = Losses()
    handler = tfpreempt.PreemptionCheckpointHandler(
        strategy.cluster_resolver,
        tf.train.Checkpoint(
            weights=weights, sums=sums, generator=generator, data=batches
        ),
        directory,
    )

    def update(x: tf.Tensor) -> None:
        weights.assign(weights * 0.5 + generator.normal([4, 2]) * x[0])
        sums.assign_add(tf.reduce_sum(x))

    @tf.function  # type: ignore[untyped-decorator]  # no types
    def step() -> None:
        strategy.run(update, (next(batches),))

    while handler.total_run_calls < STEPS:
        if index == 1 and handler.total_run_calls + 1 == last:
            tell()
        handler.run(step)
        losses.all.append(float(tf.reduce_sum(weights)))
    handler.close()
    return [losses.all, float(strategy.experimental_local_results(sums)[0])]


def count(directory: str, last: int) -> object:
    """Trains with States and without a handler; exits without a notice."""
    os.environ["TFPREEMPT_CHECKPOINT_DIR"] = directory
    losses = Losses()
    if tfpreempt.load_state(losses):
        logging.info("resumed at step %d", len(losses.all))
    while len(losses.all) < (last or STEPS):
        losses.all.append(len(losses.all) / 3)
    tfpreempt.save_all_states()
    return losses.all


def run(kind: str, directory: str, last: int = 0) -> object:
    """Trains, with a notice in a step; 0: without a notice."""
    if kind == "fit":
        return fit(directory, last)
    if kind == "workers":
        return train_together(directory, last)
    if kind == "states":
        return count(directory, last)
    if kind == "mirror":
        return train(f"{directory}/local", last, remote=f"file://{directory}/mirror")
    return train(directory, last, is_managed=kind == "manager")


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    _, kind, directory, *more = sys.argv[1:]
    print("result", json.dumps(run(kind, directory, *map(int, more))), flush=True)


if __name__ == "__main__":
    main()
