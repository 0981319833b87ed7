"""The matrix of exact resumes: its cells, a pairwise cover, and a program to run cells.

    python tests/keras/matrix.py LINE DIRECTORY

The program reads cells as JSON lines from the file `in` of the directory, and writes a
line `result {...}` for each cell. A cell is a fit that is interrupted by SIGTERM at
least once, and resumes each time with new objects in the same process. The result is
compared, byte for byte, with an uninterrupted fit. Logical devices, determinism and
seeds belong to a process, so the program is a separate process.

The model itself records the order of the samples: a metric, in all replicas, hashes
their indices and is never reset. Its value is in each epoch's logs.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.conftest import SEED

LINES = ("keras", "tf_keras", "jax")  # "jax": Keras 3 on JAX
DATA = ("tfdata", "arrays", "sequence", "generator")
INTERRUPTIONS = ("first", "middle", "last", "validation", "twice", "three")
# On JAX only; for TensorFlow see test_kinds_of_models.py.
DATA_ON_JAX = ("in_order", "random_batches", "workers", "grain", "indexed")
KINDS = (
    *("plain", "uncompiled", "eager", "float16", "ema", "accumulating"),
    *("own_step", "own_loss", "lora"),
)
RANDOM = "random"  # on JAX only

EPOCHS, BATCH = 3, 8
SAMPLES = 77  # 10 batches, of which the last is smaller and does not split evenly
BATCHES = 10  # 4 do not divide it: the last step is shorter
HELD_OUT = 43  # 6 batches of validation


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A combination of features."""

    line: str
    data: str
    devices: int
    steps: int  # steps_per_execution
    interruption: str
    kind: str = "plain"

    @property
    def id(self) -> str:
        parts = dataclasses.astuple(self)
        return "-".join(map(str, parts))


def cells() -> list[Cell]:
    """Returns the whole matrix; Keras 3 alone fails with several steps on two
    devices."""
    names = [field.name for field in dataclasses.fields(Cell)]
    on_tensorflow = (LINES[:2], DATA, (1, 2), (1, 4), INTERRUPTIONS, KINDS[:1])
    data, interruptions = (*DATA, *DATA_ON_JAX), (*INTERRUPTIONS, RANDOM)
    on_jax = (LINES[2:], data, (1,), (1, 4), interruptions, KINDS)
    every = [
        Cell(**dict(zip(names, each, strict=True)))
        for values in (on_tensorflow, on_jax)
        for each in itertools.product(*values)
    ]
    return [each for each in every if not fails_by_itself(each)]


def fails_by_itself(cell: Cell) -> bool:
    return (cell.line, cell.devices, cell.steps) == ("keras", 2, 4)


def pairwise(every: Sequence[Cell]) -> list[Cell]:
    """Returns a few cells that contain every pair of values; always the same cells.

    The pairs are covered on TensorFlow and on JAX.
    """
    of_each = (
        [each for each in every if (each.line == "jax") is on] for on in (False, True)
    )
    return [cell for some in of_each for cell in _pairwise(some)]


def _pairwise(every: Sequence[Cell]) -> list[Cell]:
    uncovered = frozenset[Any]().union(*map(pairs, every))
    chosen: list[Cell] = []

    def worth(cell: Cell) -> tuple[int, ...]:
        """Returns the number of new pairs of a cell, and its speed for ties."""
        is_new = _undisturbed(cell) not in map(_undisturbed, chosen)
        return len(pairs(cell) & uncovered), -cell.devices * cell.steps, -is_new

    while uncovered:
        chosen.append(max(every, key=worth))
        uncovered -= pairs(chosen[-1])
    return sorted(chosen, key=every.index)


@functools.cache
def pairs(cell: Cell) -> frozenset[Any]:
    """Any two of its values, but the kind of model with the kind of data."""
    every = itertools.combinations(dataclasses.asdict(cell).items(), 2)
    independent = {"data", "kind"}
    return frozenset(pair for pair in every if {*dict(pair)} != independent)


@functools.cache
def _undisturbed(cell: Cell) -> Cell:
    """Returns the result without interruptions."""
    return dataclasses.replace(cell, interruption="none")


# --- the program ---------------------------------------------------------------------


def cuts(cell: Cell) -> list[tuple[str, int, int]]:
    """Returns the points of the signals: hook, epoch, batch."""
    last = BATCHES - 1 if cell.steps == 1 else 8
    return {
        "first": [("end", 0, cell.steps - 1)],
        "middle": [("begin", 1, 4)],
        "last": [("begin", 1, last)],
        "validation": [("test", 1, cell.steps)],
        "twice": [("begin", 1, 4), ("begin", 1, 8)],
        "three": [("begin", 0, 0), ("begin", 1, last), ("begin", 2, 4)],
        RANDOM: at_random(cell),
    }[cell.interruption]


def at_random(cell: Cell) -> list[tuple[str, int, int]]:
    """Two points in the order of training, by the seed of the tests."""
    drawn = random.Random(f"{SEED} {cell.id}")
    steps = range(0, BATCHES, cell.steps)
    points = [("begin", epoch, step) for epoch in range(EPOCHS) for step in steps]
    return sorted(drawn.sample(points, 2), key=points.index)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The compared values."""

    weights: str
    optimizer: str
    metrics: str
    history: dict[str, list[float]]
    epoch: list[int]
    csv: bytes

    def differences(self, other: Outcome) -> list[str]:
        mine, others = dataclasses.asdict(self), dataclasses.asdict(other)
        return [
            f"{name}: {mine[name]!r}, undisturbed {others[name]!r}"
            for name in mine
            if mine[name] != others[name]
        ]


class Program:
    """A user's program, in one process with two logical devices."""

    def __init__(self, line: str) -> None:
        import numpy as np
        import tensorflow as tf

        self.tf = tf
        self.keras = importlib.import_module("keras" if line == "jax" else line)
        self.line = line
        [cpu] = tf.config.list_physical_devices("CPU")
        device = tf.config.LogicalDeviceConfiguration()
        tf.config.set_logical_device_configuration(cpu, [device] * 2)
        tf.config.experimental.enable_op_determinism()
        self.without_collecting = () if line == "tf_keras" else (False,)
        if line == "tf_keras":  # otherwise the state of Dropout is unreachable
            self.keras.backend.experimental.enable_tf_random_generator()
        rng = np.random.default_rng(0)
        self.x = rng.normal(size=(SAMPLES + HELD_OUT, 4)).astype("float32")
        targets = self.x.sum(axis=1) + rng.normal(size=len(self.x))
        index = np.arange(1, len(self.x) + 1)
        self.y = np.stack([targets, index], axis=1).astype("float32")
        self.undisturbed = functools.cache(self.train_undisturbed)

    def run_cell(self, cell: Cell, directory: Path) -> dict[str, Any]:
        """Trains with interruptions; returns the differences from a plain fit."""
        began = time.monotonic()
        expected = self.undisturbed(_undisturbed(cell), directory)
        place = directory / cell.id
        left, codes = cuts(cell), []
        while True:
            try:
                found = self.train(cell, place, left)
                break
            except SystemExit as exit_:
                codes.append(exit_.code)
        shutil.rmtree(place)
        return {
            "id": cell.id,
            "codes": codes,
            "missed": left,
            "differs": found.differences(expected),
            "seconds": round(time.monotonic() - began, 1),
        }

    def train_undisturbed(self, cell: Cell, directory: Path) -> Outcome:
        if cell.data != "workers":
            return self.train(cell, directory)
        # Without us the order depends on the threads' times: see docs/fit/data.md.
        return self.train(cell, directory / cell.id, [])

    def train(
        self, cell: Cell, directory: Path, left: list[Any] | None = None
    ) -> Outcome:
        """Makes one start of the program; without the callback if `left` is None."""
        directory.mkdir(exist_ok=True)
        self.keras.backend.clear_session(*self.without_collecting)
        self.keras.utils.set_random_seed(7)
        model = self.made(cell)
        log = directory / f"{cell.id}.csv"
        held_out = slice(SAMPLES, None)
        history = model.fit(
            **self.data(cell.data),
            epochs=EPOCHS,
            verbose=0,
            callbacks=self.callbacks(directory, log, left),
            validation_data=(self.x[held_out], self.y[held_out]),
            validation_batch_size=BATCH,
        )
        optimizer = model.optimizer.variables
        return Outcome(
            weights=digest(model.variables),
            optimizer=digest(optimizer() if callable(optimizer) else optimizer),
            metrics=digest(v for metric in model.metrics for v in metric.variables),
            history=history.history,
            epoch=history.epoch,
            csv=log.read_bytes(),
        )

    def made(self, cell: Cell) -> Any:
        """The model, unbuilt."""
        if self.line == "jax":
            from tests.keras import jax_models

            return jax_models.make(self.keras, cell.kind, cell.steps)
        return self.model(cell)

    def model(self, cell: Cell) -> Any:
        """Unbuilt."""
        keras = self.keras
        strategy = self.tf.distribute.get_strategy()
        if cell.devices == 2:
            strategy = self.tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            layers = [
                keras.layers.Dense(4, activation="relu", use_bias=False),
                keras.layers.Dropout(0.3),
                keras.layers.BatchNormalization(center=False, scale=False),
                keras.layers.Dense(1, use_bias=False),
            ]
            model = keras.Sequential(layers)
            model.compile(
                keras.optimizers.Adam(1e-2),
                self.loss,
                metrics=[self.mae, order(keras)],
                steps_per_execution=cell.steps,
            )
        return model

    def loss(self, y: Any, predicted: Any) -> Any:
        return self.tf.reduce_mean(self.tf.square(y[:, :1] - predicted), axis=-1)

    def mae(self, y: Any, predicted: Any) -> Any:
        return self.tf.reduce_mean(self.tf.abs(y[:, :1] - predicted), axis=-1)

    def callbacks(self, directory: Path, log: Path, left: list[Any] | None) -> Any:
        kinds = self.keras.callbacks
        found = [
            kinds.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
            kinds.EarlyStopping(patience=9),
            kinds.ReduceLROnPlateau(patience=1, min_delta=9.0, factor=0.5),
            kinds.CSVLogger(str(log)),
        ]
        if left is None:
            return found
        from tfpreempt.keras import PreemptionCallback

        ours = PreemptionCallback(directory / "checkpoints")
        return [ours, *found, interrupter(kinds.Callback, left)]

    def data(self, kind: str) -> dict[str, Any]:
        """Returns new arguments of `fit` for the data."""
        tf, x, y = self.tf, self.x[:SAMPLES], self.y[:SAMPLES]
        if kind == "tfdata":
            data = tf.data.Dataset.from_tensor_slices((x, y))
            return {"x": data.shuffle(SAMPLES, seed=3).batch(BATCH).prefetch(2)}
        if kind == "arrays":
            return {"x": x, "y": y, "batch_size": BATCH, "shuffle": True}
        if kind == "sequence":
            return {"x": sequence(self.keras, x, y), "shuffle": True}
        if kind == "generator":
            return {"x": generator(x, y), "steps_per_epoch": BATCHES}
        if kind == "in_order":
            return {"x": x, "y": y, "batch_size": BATCH, "shuffle": False}
        if kind == "random_batches":
            return {"x": x, "y": y, "batch_size": BATCH, "shuffle": "batch"}
        if kind == "workers":
            return {"x": sequence(self.keras, x, y, workers=2), "shuffle": True}
        if kind == "indexed":
            from tfpreempt.data import from_arrays

            return {"x": from_arrays((x, y), batch_size=BATCH, seed=7)}
        assert kind == "grain"
        import grain

        rows = grain.MapDataset.range(len(x)).seed(3).shuffle()
        return {"x": rows.map(lambda row: (x[row], y[row])).batch(BATCH)}

    def keras_alone_on_two_devices(self) -> None:
        """Runs the combinations that the matrix omits, without the callback."""
        cell = Cell(
            line=self.line, data="tfdata", devices=2, steps=4, interruption="first"
        )
        self.model(cell).fit(**self.data("tfdata"), verbose=0)


def order(keras: Any) -> Any:
    """A metric that hashes the indices of the samples, in their order, for ever."""
    import tensorflow as tf

    class Order(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="order", dtype="int64")
            add = getattr(self, "add_variable", self.add_weight)
            self.hash = add(
                shape=(), initializer="zeros", dtype=tf.int64, name="order_hash"
            )

        def update_state(self, y: Any, predicted: Any, sample_weight: Any = None):
            index = tf.cast(y[:, 1], tf.int64)
            places = tf.range(1, tf.size(index, tf.int64) + 1, dtype=tf.int64)
            new = tf.reduce_sum(index * places)
            self.hash.assign(tf.convert_to_tensor(self.hash) * 31 + new)

        def result(self) -> Any:
            return tf.math.floormod(tf.convert_to_tensor(self.hash), 1_000_003)

        def reset_state(self) -> None:
            pass

    return Order()


def sequence(keras: Any, x: Any, y: Any, **options: Any) -> Any:
    """Returns a Sequence that shuffles itself between epochs, and Keras within."""
    import numpy as np

    kind = getattr(keras.utils, "PyDataset", keras.utils.Sequence)

    class Shuffled(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(**options)
            self._random = np.random.default_rng(5)
            self._order = np.arange(len(x))

        def __len__(self) -> int:
            return BATCHES

        def __getitem__(self, number: int) -> Any:
            rows = self._order[number * BATCH : (number + 1) * BATCH]
            return x[rows], y[rows]

        def on_epoch_end(self) -> None:
            self._random.shuffle(self._order)

    return Shuffled()


def generator(x: Any, y: Any) -> Any:
    import numpy as np

    rng = np.random.default_rng(1)
    while True:
        rows = rng.integers(0, len(x), BATCH)
        yield x[rows], y[rows]


def interrupter(base: type, left: list[Any]) -> Any:
    """A callback that takes a cut off the list and sends the signal."""

    class Interrupter(base):  # type: ignore[misc]
        def get_state(self) -> dict[str, Any]:
            return {}

        def set_state(self, state: dict[str, Any]) -> None:
            pass

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.at("begin", batch)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.at("end", batch)

        def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.at("test", batch)

        def at(self, hook: str, batch: int) -> None:
            if left and left[0] == (hook, self.epoch, batch):
                left.pop(0)
                preempt()

    return Interrupter()


def preempt() -> None:
    """Sends SIGTERM to this process; returns when the loop can see the notice."""
    from tests.handler.program import is_told

    os.kill(os.getpid(), signal.SIGTERM)
    end = time.monotonic() + 20
    while not is_told():
        assert time.monotonic() < end, "the notice does not arrive"
        time.sleep(0.001)


def digest(variables: Iterable[Any]) -> str:
    """Returns a digest of all bytes of all replicas."""
    from tfpreempt.checkpoint.tensors.variables import local_parts

    parts = [
        part.numpy().tobytes()
        for each in variables
        for part in local_parts(each) or (each,)
    ]
    assert parts
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def main(line: str, directory: Path) -> None:
    """Runs the cells of the file `in`."""
    program = Program(line)
    for request in map(json.loads, (directory / "in").read_text().splitlines()):
        try:
            if request is None:
                result: dict[str, Any] = {"id": "alone"}
                program.keras_alone_on_two_devices()
            else:
                cell = Cell(**request)
                result = {"id": cell.id}
                result = program.run_cell(cell, directory)
        except Exception as error:
            traceback.print_exc()
            result["error"] = f"{type(error).__name__}: {error}"
        print("result", json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
