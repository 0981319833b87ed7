"""Cases that an early version of the callback got wrong; prints JSON lines.

Usage: edges.py DIRECTORY. Ends by a SIGTERM to itself, after a fit that crashed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.fakes.process import forget_fits
from tfpreempt.handler import current_session
from tfpreempt.keras import PreemptionCallback
from tfpreempt.keras.fit_record import FitRecord

ROOT = sys.argv[1]
ROWS = np.random.default_rng(0).random((64, 4), dtype=np.float32)
(CPU,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(
    CPU, [tf.config.LogicalDeviceConfiguration()] * 2
)
LABELS = np.eye(3, dtype=np.float32)[np.arange(64) % 3]


def tell(**values: Any) -> None:
    print(json.dumps(values), flush=True)


class Cut(keras.callbacks.Callback):
    """A real SIGTERM before a batch, there when the step asks for it."""

    def __init__(self, epoch: int, batch: int) -> None:
        super().__init__()
        self._at = (epoch, batch)
        self._now = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._now = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if (self._now, batch) == self._at:
            os.kill(os.getpid(), signal.SIGTERM)
            while not ((here := current_session.current()) and here.step_flag.flag):
                threading.Event().wait(0.001)

    def get_state(self) -> dict[str, int]:
        return {}

    def set_state(self, state: dict[str, int]) -> None:
        pass


class Bad(keras.callbacks.Callback):
    def get_state(self) -> dict[str, object]:
        return {"x": object()}

    def set_state(self, state: dict[str, object]) -> None:
        pass


class Died(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        raise ValueError("died")


def model() -> keras.Model:
    made = keras.Sequential([keras.layers.Dense(3, activation="softmax")])
    loss, metrics = "categorical_crossentropy", [keras.metrics.F1Score()]
    made.compile("adam", loss, metrics=metrics, jit_compile=False)
    return made


def fit(name: str, *others: Any, epochs: int = 3) -> tuple[keras.Model, Any]:
    """Runs a fit, as a restarted program does."""
    forget_fits()
    made = model()
    callbacks = [PreemptionCallback(os.path.join(ROOT, name)), *others]
    history = made.fit(
        ROWS, LABELS, batch_size=8, epochs=epochs, verbose=0,
        validation_data=(ROWS, LABELS), callbacks=callbacks,
    )  # fmt: skip
    return made, history


def replicas() -> None:
    """Runs a complete fit and an interrupted fit on two devices, and resumes on one."""
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        fit("whole", epochs=1)
        try:
            fit("replicas", Cut(1, 3))
        except SystemExit as left:
            tell(name="left two devices", code=left.code)
    try:
        _, history = fit("whole", epochs=1)
        tell(name="fewer devices", epochs=history.epoch)
    except Exception as error:
        tell(name="fewer devices", error=str(error))
    load = FitRecord.load  # of a commit by another number of workers, say
    FitRecord.load = lambda self, file: None if self.per_worker else load(self, file)
    try:
        _, history = fit("replicas")
        tell(name="other workers", epochs=history.epoch)
    except Exception as error:
        tell(name="other workers", error=str(error))
    FitRecord.load = load


def plain(made: keras.Model) -> list[int]:
    return list(made.fit(ROWS, LABELS, epochs=2, verbose=0).epoch)


def main() -> None:
    try:
        fit("vector", Cut(1, 3))
    except SystemExit as left:
        tell(name="left", code=left.code)
    try:
        _, history = fit("vector", epochs=1)
        tell(name="fewer", epochs=history.epoch, losses=history.history["loss"])
    except Exception as error:
        tell(name="fewer", error=repr(error))
    _, history = fit("vector")
    shape = np.shape(history.history["val_f1_score"])
    tell(name="vector", epochs=history.epoch, shape=shape)
    replicas()
    made, history = fit("vector")
    tell(name="complete", epochs=history.epoch, plain=plain(made))
    try:
        fit("bad", Bad())
    except Exception as error:
        tell(name="bad", error=str(error), plain=plain(model()))
    try:
        fit("died", Died())
    except ValueError as error:
        tell(name="died", error=str(error), plain=plain(model()))
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(60)
    tell(name="deaf")


main()
