"""A program whose checkpoints of earlier days are kept, and restored by today's code.

    python kept_program.py loop|manager|fit DIRECTORY [STEP]

It trains a few steps, and is told to go within step STEP; without one it runs to its
end and prints what came out, in one line. It keeps to what tfpreempt could from the
first day on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import IO

import keras
import numpy as np
import tensorflow as tf

import tfpreempt

STEPS = 8


class Losses(tfpreempt.State):
    """What each step lost."""

    def __init__(self) -> None:
        super().__init__("losses")
        self.all: list[float] = []

    def save(self, fileobj: IO[bytes]) -> None:
        fileobj.write(json.dumps(self.all).encode())

    def load(self, fileobj: IO[bytes]) -> None:
        self.all = json.loads(fileobj.read())


def train(directory: str, last: int, *, is_managed: bool) -> object:
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
    )

    def step() -> None:
        if len(losses.all) + 1 == last:
            os.kill(os.getpid(), signal.SIGTERM)
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
                os.kill(os.getpid(), signal.SIGTERM)

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


def run(kind: str, directory: str, last: int = 0) -> object:
    """Trains, and is told to go in a step; by 0 in none."""
    if kind == "fit":
        return fit(directory, last)
    return train(directory, last, is_managed=kind == "manager")


def main() -> None:
    kind, directory, *more = sys.argv[1:]
    result = run(kind, directory, *map(int, more))
    print(json.dumps({"result": result}), flush=True)


if __name__ == "__main__":
    main()
