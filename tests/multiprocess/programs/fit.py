"""A user's program with `model.fit`, on either Keras, which a test can interrupt.

The program prints `began` before `fit`, and `listens` when `fit` receives notices. It
prints `begins EPOCH BATCH TIME` before each step, with the first batch of the step,
`trained EPOCH BATCH` after each step, with the last batch, and `validates EPOCH BATCH`
before each step of the validation. The results are in `result {...}`.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from toy_model import (
    INDEX,
    hold,
    log_to_stdout,
    make_strategy,
    say,
    say_when,
    slow_down,
)

import tfpreempt.data
import tfpreempt.keras

BATCH = 8
VALIDATION_BATCHES = 3

gc.freeze()  # at exit, the pages shared with the zygote would be copied to be freed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint_dir")
    parser.add_argument("--line", default="keras", help="keras or tf_keras")
    parser.add_argument("--data", default="tfdata")
    parser.add_argument("--strategy", default="none")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batches", type=int, default=8, help="of an epoch")
    parser.add_argument("--steps-per-execution", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds, each batch")
    parser.add_argument("--hold-at", default="", help="such as begin:1:4")
    parser.add_argument("--save-freq", type=int, help="batches; not each epoch")
    parser.add_argument("--fail-at", type=int, help="epoch whose end fails")
    parser.add_argument("--bad", type=int, help="batch with a NaN, on worker 1 only")
    parser.add_argument("--in-x", action="store_true", help="NaN in the inputs")
    parser.add_argument("--without", type=int, help="batch that the data do not have")
    parser.add_argument("--check-every", type=int, default=16, help="of BadSteps")
    parser.add_argument("--plain", action="store_true", help="without our callback")
    return parser.parse_args()


options = parse()
keras = importlib.import_module(options.line)
is_legacy = options.line == "tf_keras"

rng = np.random.default_rng(0)
# The first column numbers the rows.
count = options.batches * BATCH
x = np.column_stack([np.arange(count), rng.standard_normal((count, 5))])
x = x.astype("float32")
y = x[:, 1:2] * 2 + x[:, 2:3]


class Order(keras.layers.Layer):
    """Removes the row numbers from the inputs; a weight is a digest of their order.

    Each replica has its own value, because each replica has other rows.
    """

    def build(self, input_shape: Any) -> None:
        own: dict[str, Any] = {}
        if is_legacy:  # in Keras 3 each replica can always assign its value
            own["synchronization"] = tf.VariableSynchronization.ON_READ
            own["aggregation"] = tf.VariableAggregation.SUM
        self.order = self.add_weight(
            name="order",
            shape=(),
            dtype="int64",
            initializer="zeros",
            trainable=False,
            **own,
        )
        super().build(input_shape)

    def call(self, inputs: Any, training: Any = None) -> Any:
        if training:
            numbers = tf.cast(inputs[:, 0], tf.int64) + 1
            powers = tf.math.cumprod(tf.ones_like(numbers) * 1_000_003)
            seen = tf.convert_to_tensor(self.order) * 998_244_353
            self.order.assign(seen + tf.reduce_sum(numbers * powers))
        return inputs[:, 1:]


class Batches(keras.utils.Sequence if is_legacy else keras.utils.PyDataset):
    """Batches that a separate generator shuffles after each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self._rng = np.random.default_rng(5)
        self._rows = np.arange(count)

    def __len__(self) -> int:
        return options.batches

    def __getitem__(self, index: int) -> Any:
        rows = self._rows[index * BATCH : (index + 1) * BATCH]
        return x[rows], y[rows]

    def on_epoch_end(self) -> None:
        self._rng.shuffle(self._rows)


def generate() -> Iterator[Any]:
    rng = np.random.default_rng(1)
    while True:
        rows = rng.integers(0, count, BATCH)
        yield x[rows], y[rows]


class OwnLoader:
    """An iterator with a position that can be saved."""

    def __init__(self) -> None:
        self._place = 0

    def __iter__(self) -> OwnLoader:
        return self

    def __next__(self) -> Any:
        rows = np.random.default_rng(self._place).integers(0, count, BATCH)
        self._place += 1
        return x[rows], y[rows]

    def get_state(self) -> int:
        return self._place

    def set_state(self, state: int) -> None:
        self._place = state


def grain_batches() -> Any:
    import grain

    rows = grain.MapDataset.range(count).seed(3).shuffle()
    return rows.map(lambda row: (x[row], y[row])).batch(BATCH)


def row(index: Any) -> Any:
    return tf.gather(x, index), tf.gather(y, index)


def make_ordered() -> Any:
    """Rows in order. Worker 1 of two workers has the second half of each batch."""
    inputs, targets = x.copy(), y.copy()
    if options.bad is not None:
        row = (options.bad + 1) * BATCH - 1
        (inputs[:, 1:] if options.in_x else targets)[row] = np.nan
    if options.without is not None:
        rows = slice(options.without * BATCH, (options.without + 1) * BATCH)
        inputs, targets = np.delete(x, rows, 0), np.delete(y, rows, 0)
    return tf.data.Dataset.from_tensor_slices((inputs, targets))


def make_data() -> dict[str, Any]:
    """The training data, as `fit` takes them."""
    if options.data == "arrays":
        return {"x": x, "y": y, "batch_size": BATCH, "shuffle": True}
    if options.data == "sequence":
        return {"x": Batches(), "shuffle": True}
    if options.data == "generator":
        return {"x": generate(), "steps_per_epoch": options.batches}
    if options.data == "index":
        return {"x": tfpreempt.data.from_index(row, count, batch_size=BATCH, seed=3)}
    if options.data == "loader" and is_legacy:  # of other people; Keras 3 takes Grain
        return {"x": OwnLoader(), "steps_per_epoch": options.batches}
    if options.data == "loader":
        return {"x": grain_batches()}
    if options.data == "ordered":
        return {"x": make_ordered().batch(BATCH).prefetch(2)}
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    if options.data == "repeated":  # passes end within epochs
        rows = rows.skip(5).shuffle(count, seed=3).repeat()
        return {"x": rows.batch(BATCH), "steps_per_epoch": options.batches}
    return {"x": rows.shuffle(count, seed=3).batch(BATCH).prefetch(2)}


class Watch(keras.callbacks.Callback):
    """Prints events, and blocks where the test wants to send a signal.

    Counts batches; the first worker counts in ones, the second in twos.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counted = 0

    def on_train_begin(self, logs: Any = None) -> None:
        say("listens")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        say_when("begins", self._epoch, batch)
        self._hold_at("begin", batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        say("trained", self._epoch, batch)
        self.counted += 1 + INDEX
        self._hold_at("end", batch)
        time.sleep(options.pause)
        slow_down()

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        say("validates", self._epoch, batch)
        self._hold_at("validate", batch)
        time.sleep(options.pause)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == options.fail_at:
            raise RuntimeError("no network")

    def _hold_at(self, where: str, batch: int) -> None:
        if options.hold_at == f"{where}:{self._epoch}:{batch}":
            hold()

    def get_state(self) -> dict[str, Any]:
        return {"counted": self.counted}

    def set_state(self, state: dict[str, Any]) -> None:
        self.counted = state["counted"]


class OfChief(keras.callbacks.Callback):
    """A callback that only the chief has, as many programs log on the chief only."""

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        pass


def make_model() -> Any:
    layers = keras.layers
    model = keras.Sequential(
        [
            Order(),
            layers.Dense(8, activation="relu"),
            layers.Dropout(0.3),
            layers.BatchNormalization(),
            layers.Dense(1),
        ]
    )
    model.compile(
        keras.optimizers.Adam(1e-2),
        "mse",
        metrics=["mae"],
        steps_per_execution=options.steps_per_execution,
    )
    return model


def make_callbacks() -> list[Any]:
    if options.plain:
        return [watch]
    every: Any = options.save_freq or "epoch"
    bad_steps = tfpreempt.keras.BadSteps(check_every=options.check_every)
    ours = tfpreempt.keras.PreemptionCallback(
        options.checkpoint_dir,
        save_freq=every,
        on_bad_step=None if options.bad is None else bad_steps,
    )
    return [ours, watch, *([] if INDEX else [OfChief()])]


def local_values(variable: Any) -> list[bytes]:
    """The values of this worker's replicas."""
    value = variable if is_legacy else variable.value
    parts = model.distribute_strategy.experimental_local_results(value)
    return [np.asarray(part).tobytes() for part in parts]


def digest(variables: Any) -> list[str]:
    return [
        hashlib.sha256(part).hexdigest()[:16]
        for variable in variables
        for part in local_values(variable)
    ]


def report(history: Any) -> None:
    slots = model.optimizer.variables
    found = {
        "weights": digest(model.variables),
        "optimizer": digest(slots() if callable(slots) else slots),
        "history": history.history,
        "epoch": history.epoch,
        "order": [part.hex() for part in local_values(model.layers[0].order)],
        "counted": watch.counted,
    }
    say("result", json.dumps(found))


log_to_stdout()
if is_legacy:
    keras.backend.experimental.enable_tf_random_generator()
elif options.strategy == "mwms":
    tfpreempt.keras.enable_multi_worker()
keras.utils.set_random_seed(7)
tf.config.experimental.enable_op_determinism()
with make_strategy(options.strategy).scope():
    model = make_model()
watch = Watch()
say("began")
validation_rows = slice(VALIDATION_BATCHES * BATCH)
history = model.fit(
    **make_data(),
    epochs=options.epochs,
    verbose=0,
    callbacks=make_callbacks(),
    validation_data=(x[validation_rows], y[validation_rows]),
    validation_batch_size=BATCH,
)
report(history)
