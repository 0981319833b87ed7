"""A user's program with `model.fit` of Keras on JAX, which preempts itself.

    jax_fit.py DIRECTORY [WHERE:EPOCH:BATCH] [cached [mirror=URL]]

WHERE is "train" or "validation". With "cached", compiled functions are kept, and the
signal is sent when the train step is kept; `loaded` and `compiled` count functions. The
program prints `imported` with the frameworks that are imported at the end, and the
results as `final`.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

import tfpreempt.keras

directory, *cuts = sys.argv[1:]
events: list[str] = []
options: dict[str, Any] = {}
if "cached" in cuts:
    import jax

    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    mirrors = [word[7:] for word in cuts if word.startswith("mirror=")]
    options = {"compile_cache": True, "mirror_dir": mirrors[0] if mirrors else None}
ours = tfpreempt.keras.PreemptionCallback(directory, **options)
# Not by keras.utils.set_random_seed, which imports TensorFlow where it is installed.
random.seed(7)
np.random.seed(7)
x = np.random.default_rng(0).normal(size=(77, 4)).astype("float32")
y = x.sum(axis=1, keepdims=True)


def is_kept() -> bool:
    """Whether the compiled train step is in the mirror, or without one on the disk."""
    root = (options["mirror_dir"] or directory).removeprefix("file://")
    for archive in Path(root).rglob("*compiled/*.zip"):
        return any("train_step" in name for name in zipfile.ZipFile(archive).namelist())
    return False


class Preempted(keras.callbacks.Callback):
    """Sends the signal at the point of the command line."""

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        pass

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.at(f"train:{self.epoch}:{batch}")

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.at(f"validation:{self.epoch}:{batch}")

    def at(self, point: str) -> None:
        if point in cuts:
            from tfpreempt.handler import current_session

            while options and not is_kept():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGTERM)
            while not current_session.current().step_flag.flag:
                time.sleep(0.001)


layers = keras.layers
model = keras.Sequential(
    [
        layers.Dense(8, activation="relu"),
        layers.BatchNormalization(),
        layers.Dropout(0.3),
        layers.Dense(1),
    ]
)
model.compile("adam", "mse", metrics=["mae"])
history = model.fit(
    x,
    y,
    batch_size=8,
    epochs=3,
    verbose=0,
    validation_data=(x[:30], y[:30]),
    validation_batch_size=8,
    callbacks=[ours, Preempted()],
)
variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
found = hashlib.sha256()
for each in variables:
    found.update(np.asarray(each.value).tobytes())
names = ("jax", "tensorflow", "tf_keras")
print("imported", [name for name in names if sys.modules.get(name)])
if options:
    print("loaded", sum(event.endswith("/cache_hits") for event in events))
    print("compiled", sum(event.endswith("/cache_misses") for event in events))
print("final", found.hexdigest(), history.epoch, history.history, flush=True)
