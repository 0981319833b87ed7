"""A user's program with `model.fit`, for Keras 3 on TensorFlow and on JAX.

    KERAS_BACKEND=... either_fit.py DIRECTORY DATA [WHERE:EPOCH:BATCH]

DATA is a name in `DATA`. The program preempts itself at WHERE, "train" or "validation".
It prints `state` with a digest of all variables at the preemption and after the
restore, `warned` with each warning of tfpreempt, and at the end `final` with parts of
the History and `python` with values that a callback has changed. The metric `once` is
the number of samples trained exactly once in an epoch.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import sys
import time
from typing import Any

import keras
import numpy as np

import tfpreempt.keras

directory, data, *cuts = sys.argv[1:]
SAMPLES, BATCH = 80, 8
keras.utils.set_random_seed(7)
x = np.random.default_rng(0).normal(size=(SAMPLES, 4)).astype("float32")
y = np.stack([x.sum(axis=1), np.arange(SAMPLES)], axis=1).astype("float32")
layers = keras.layers


class Sequence(keras.utils.PyDataset):
    def __len__(self) -> int:
        return SAMPLES // BATCH

    def __getitem__(self, index: int) -> Any:
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return x[rows], y[rows]


def generator() -> Any:
    while True:
        yield from map(Sequence().__getitem__, range(10))


def tfdata() -> Any:
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    return {"x": dataset.shuffle(SAMPLES, seed=3).batch(BATCH)}


def grain() -> Any:
    import grain

    rows = grain.MapDataset.range(SAMPLES).seed(3).shuffle()
    return {"x": rows.map(lambda row: (x[row], y[row])).batch(BATCH)}


def indexed() -> Any:
    from tfpreempt.data import from_arrays

    return {"x": from_arrays((x, y), batch_size=BATCH, seed=3)}


DATA: dict[str, Any] = {
    "arrays": lambda: {"x": x, "y": y, "batch_size": BATCH},
    "in_order": lambda: {"x": x, "y": y, "batch_size": BATCH, "shuffle": False},
    "batches": lambda: {"x": x, "y": y, "batch_size": BATCH, "shuffle": "batch"},
    "sequence": lambda: {"x": Sequence(), "shuffle": True},
    "generator": lambda: {"x": generator(), "steps_per_epoch": 10},
    "tfdata": tfdata,
    "grain": grain,
    "indexed": indexed,
}


class Once(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="once")
        self.counts = self.add_weight(shape=(SAMPLES,), initializer="zeros")

    def update_state(self, y: Any, predicted: Any, sample_weight: Any = None) -> None:
        rows = keras.ops.cast(y[:, 1], "int32")
        self.counts.assign_add(keras.ops.sum(keras.ops.one_hot(rows, SAMPLES), axis=0))

    def result(self) -> Any:
        return keras.ops.sum(keras.ops.cast(self.counts == 1, "float32"))


def loss(y: Any, predicted: Any) -> Any:
    return keras.ops.mean(keras.ops.square(y[:, :1] - predicted), axis=-1)


class Holder:
    """Variables that Keras does not find."""

    def __init__(self) -> None:
        self.drift = keras.Variable(np.zeros(2, "float32"), name="drift")
        self.second = keras.optimizers.SGD(0.1, momentum=0.9)
        self.second.build([self.drift])


class Own(keras.Sequential):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.changed, self.holder = 0, Holder()


model = Own(
    [
        layers.Dense(8, activation="relu"),
        layers.BatchNormalization(),
        layers.Dropout(0.3),
        layers.Dense(1),
    ]
)
inside = keras.optimizers.Adam(1e-2, use_ema=True, ema_momentum=0.9)
model.compile(
    keras.optimizers.LossScaleOptimizer(inside),
    loss,
    metrics=[Once()],
)


def state() -> str:
    if keras.backend.backend() == "jax":
        model.jax_state_sync()
    found = hashlib.sha256()
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    variables += [model.holder.drift, *model.holder.second.variables]
    for each in variables:
        value = keras.ops.convert_to_numpy(each.value)
        is_integer = value.dtype.kind in "iu"  # Keras chooses the number of bits
        found.update((value.astype("int64") if is_integer else value).tobytes())
    return f"{len(variables)} {found.hexdigest()}"


class Told(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("resumed at step"):
            print("state", state(), flush=True)
        elif record.levelno >= logging.WARNING:
            print("warned", text, flush=True)


class Preempted(keras.callbacks.Callback):
    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        pass

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if (self.epoch, batch) == (0, 3):
            model.changed, model.layers[2].rate = 5, 0.45
            model.holder.drift.assign([1.5, 2.5])
            model.holder.second.learning_rate = 0.25
        if f"train:{self.epoch}:{batch}" in cuts:
            self.preempt(state())

    def on_test_begin(self, logs: Any = None) -> None:
        if cuts:
            self.before = state()  # a commit in a validation has the state before it

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        if f"validation:{self.epoch}:{batch}" in cuts:
            self.preempt(self.before)

    def preempt(self, saved: str) -> None:
        from tfpreempt.handler import current_session

        print("state", saved, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        while not current_session.current().step_flag.flag:
            time.sleep(0.001)


logging.getLogger("tfpreempt").addHandler(Told())
logging.getLogger("tfpreempt").setLevel(logging.INFO)
history = model.fit(
    **DATA[data](),
    epochs=3,
    verbose=0,
    validation_data=(x[:32], y[:32]),
    validation_batch_size=8,
    callbacks=[tfpreempt.keras.PreemptionCallback(directory), Preempted()],
)
print("final", history.epoch, history.history["once"], int(inside.iterations.value))
print("python", model.changed, model.layers[2].rate)
