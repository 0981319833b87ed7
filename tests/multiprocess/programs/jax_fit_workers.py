"""A user's program with `model.fit` of Keras on JAX, in one or several processes.

    jax_fit_workers.py DIRECTORY [WORD ...]

data=KIND          "arrays" (by default), "sequence" or "tfdata"
model              ModelParallel: kernels are divided among all devices; otherwise
                   DataParallel
cut=PROCESS:POINT  the process sends itself SIGTERM; POINT is WHERE:EPOCH:BATCH, and
                   WHERE is "train" or "validation"
hold=BATCH         in epoch 1 each process stays after the batch, while the file hold-0
                   or hold-1 exists
wrong=WHAT         the program is not supported: "alone" (no distribution), "local"
                   (of the devices of a process), "eager", or "early" (a variable was
                   made before the distribution)
grace=S            seconds of the grace period
bad=BATCH          a row of the batch, which only the last process has, makes the loss
                   NaN, and the batch is left out (on_bad_step); with `divided`, only
                   the gradients that the last process has are NaN
without=BATCH      the data do not have the batch
divided            the model is one layer, for `bad` and `model`
every=N            save_freq in batches
epochs=N           3 by default

The program prints the results as `final`, with all elements of the variables.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
from jax.experimental import multihost_utils

import tfpreempt.keras
from tfpreempt.handler import current_session

DIRECTORY = sys.argv[1]
WORDS = dict(word.partition("=")[::2] for word in sys.argv[2:])
COUNT = int(os.environ.get("JAX_NUM_PROCESSES", "1"))
PROCESS = int(os.environ.get("JAX_PROCESS_ID", "0"))


def say(*words: object) -> None:
    print(*words, flush=True)


class Preempted(keras.callbacks.Callback):
    """Sends the signal, or stays, at the points of the command line."""

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        pass

    def on_train_begin(self, logs: Any = None) -> None:
        self.is_told = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if not self.is_told:
            self.is_told = True
            say("starts", self.epoch, batch)
        self.at(f"{PROCESS}:train:{self.epoch}:{batch}")

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.at(f"{PROCESS}:validation:{self.epoch}:{batch}")

    def at(self, point: str) -> None:
        if WORDS.get("cut") == point:
            os.kill(os.getpid(), signal.SIGTERM)
            while not current_session.current().step_flag.flag:
                time.sleep(0.001)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.epoch == 1 and WORDS.get("hold") == str(batch):
            # The step is complete here and, as the gradients are sums, in each process.
            jax.block_until_ready(jax.live_arrays())
            say("holds")
            is_told = False
            while (Path(DIRECTORY).parent / f"hold-{PROCESS}").exists():
                if not is_told and current_session.current().step_flag.flag:
                    is_told = True
                    say("noticed")
                time.sleep(0.005)


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    def __init__(self, x: Any, y: Any, size: int) -> None:
        super().__init__()
        self.x, self.y, self.size = x, y, size

    def __len__(self) -> int:
        return len(self.x) // self.size

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * self.size, (index + 1) * self.size)
        return self.x[rows], self.y[rows]


def initialize() -> None:
    if COUNT > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(num_processes=COUNT, process_id=PROCESS)


def distribute() -> None:
    wrong, distribution = WORDS.get("wrong"), keras.distribution
    divided = WORDS.get("data") == "tfdata"
    if wrong == "alone":
        return
    if "model" in WORDS:
        devices = distribution.list_devices()
        mesh = distribution.DeviceMesh((1, len(devices)), ("batch", "model"), devices)
        layouts = distribution.LayoutMap(mesh)
        layouts[".*dense.*kernel"] = (None, "model")
        layouts[".*dense.*bias"] = ("model",)
        found = distribution.ModelParallel(
            layout_map=layouts, batch_dim_name="batch", auto_shard_dataset=divided
        )
    else:
        devices = [f"cpu:{each.id}" for each in jax.local_devices()]
        found = distribution.DataParallel(
            devices=devices if wrong == "local" else None, auto_shard_dataset=divided
        )
    distribution.set_distribution(found)


initialize()
early = keras.Variable(np.zeros(2)) if WORDS.get("wrong") == "early" else None
distribute()
# Not by keras.utils.set_random_seed, which imports TensorFlow where it is installed.
random.seed(7)
np.random.seed(7)
x = np.random.default_rng(0).normal(size=(80, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True) * np.ones((1, 4), "float32")
if "bad" in WORDS:
    row = int(WORDS["bad"]) * 8 + 7
    y[row, -1] = 1e3 if "divided" in WORDS else np.nan
held = x[:32], y[:32]
if "without" in WORDS:
    first = int(WORDS["without"]) * 8
    x, y = (np.delete(each, slice(first, first + 8), 0) for each in (x, y))
# Process p of n has the rows p, p + n, ... of each global batch; with `model`, all.
parts = 1 if "model" in WORDS else COUNT
size = 8 // parts
mine = slice(0, None) if parts == 1 else slice(PROCESS, None, parts)
data: dict[str, Any] = {"x": x[mine], "y": y[mine], "batch_size": size}
held_out: Any = tuple(each[mine] for each in held)
if WORDS.get("data") == "sequence":
    data = {"x": Batches(x[mine], y[mine], size)}
elif WORDS.get("data") == "tfdata":
    import tensorflow as tf

    whole = tf.data.Dataset.from_tensor_slices((x, y))
    data = {"x": whole.shuffle(80, seed=3).batch(8, drop_remainder=True)}
    held_out = whole.take(32).batch(8, drop_remainder=True)


def with_nan_gradient(truth: Any, predicted: Any) -> Any:
    """A loss that is 0 for a target above 100, with a NaN in its gradient."""
    loss = (truth - predicted) ** 2 * keras.ops.sqrt(100.0 - truth)
    return keras.ops.mean(keras.ops.where(truth > 100.0, 0.0, loss))


layers = keras.layers
model = keras.Sequential(
    [layers.Dense(4)]
    if "divided" in WORDS
    else [
        layers.Dense(8, activation="relu"),
        layers.BatchNormalization(),
        layers.Dropout(0.3),
        layers.Dense(4),
    ]
)
model.inside = types.SimpleNamespace(early=early)
model.compile(
    "adam",
    with_nan_gradient if "divided" in WORDS else "mse",
    metrics=["mae"],
    run_eagerly=WORDS.get("wrong") == "eager",
)
config = tfpreempt.GenericTerminationConfig(
    grace_period=float(WORDS["grace"]) if "grace" in WORDS else None
)
history = model.fit(
    **data,
    epochs=int(WORDS.get("epochs", "3")),
    shuffle=not ({"bad", "without"} & WORDS.keys()),
    verbose=0,
    validation_data=held_out,
    validation_batch_size=None if WORDS.get("data") == "tfdata" else size,
    callbacks=[
        tfpreempt.keras.PreemptionCallback(
            DIRECTORY,
            save_freq=int(WORDS["every"]) if "every" in WORDS else "epoch",
            termination_config=config,
            on_bad_step=tfpreempt.keras.BadSteps() if "bad" in WORDS else None,
        ),
        Preempted(),
    ],
)
found = hashlib.sha256()
for each in [*model.variables, *model.optimizer.variables, *model.metrics_variables]:
    value = each.value
    if COUNT > 1:
        value = multihost_utils.process_allgather(value, tiled=True)
    found.update(np.asarray(value).tobytes())
say("final", found.hexdigest(), history.epoch, history.history)
say("TensorFlow", "tensorflow" in sys.modules)
