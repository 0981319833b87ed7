"""Values that a fit changes and that no commit holds are named in a warning."""

from __future__ import annotations

import enum
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.tensorflow
tf = pytest.importorskip("tensorflow")

from tests.keras.both_lines import LINES  # noqa: E402
from tests.keras.small_fit import BATCHES, Machine, machine  # noqa: E402

COUNTS = {"batches": 0}
SEEN: list[float] = []
GENERATOR = np.random.default_rng(1)
UNSAVED = "training changes values that are not in the commits: "


class Total:
    """An object whose class counts its calls."""

    calls = 0

    def __call__(self, epoch: int, rate: float) -> float:
        Total.calls += 1
        return rate


class Rate:
    """A schedule that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int, rate: float) -> float:
        self.calls += 1
        return rate


class Tracker:
    """An object whose method is a hook."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.count = 0

    def update(self, batch: int, logs: Any) -> None:
        self.seen.append(logs["loss"])
        self.count += 1


def add_to(tracker: Tracker, batch: int, logs: Any) -> None:
    tracker.count += 1


def counts(batch: int, logs: Any) -> None:
    counts.batches += 1  # type: ignore[attr-defined]


counts.batches = 0  # type: ignore[attr-defined]


@pytest.fixture
def on(line: str) -> Iterator[Machine]:
    with machine(line) as made:
        yield made


def after_batch(on: Machine, hook: Callable[..., Any]) -> list[Any]:
    return [on.keras.callbacks.LambdaCallback(on_train_batch_end=hook)]


def schedule(on: Machine, function: Any) -> list[Any]:
    return [on.keras.callbacks.LearningRateScheduler(function)]


def fit(on: Machine, model: Any, *callbacks: Any) -> None:
    data = on.arrays() | {"epochs": 2, "verbose": 0}
    model.fit(callbacks=[on.preemption(), *callbacks], **data)


@LINES
def test_values_that_callbacks_change_are_named(
    on: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """Each was the initial value again after a restart, without a warning."""
    on.start()
    weight = tf.Variable(0.0)
    average = on.keras.Sequential([on.keras.layers.Dense(1, use_bias=False)])
    average.build((None, 3))
    one = {batch: np.full((3, 1), float(batch)) for batch in range(BATCHES)}
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
    key = tf.constant([0], tf.int64)

    def count(batch: int, logs: Any) -> None:
        COUNTS["batches"] += 1

    callbacks = [
        *after_batch(on, count),
        *after_batch(on, counts),
        *after_batch(on, lambda batch, logs: SEEN.append(logs["loss"])),
        *after_batch(on, lambda batch, logs: GENERATOR.normal()),
        *after_batch(on, lambda batch, logs: weight.assign_add(0.1)),
        *after_batch(on, lambda batch, logs: average.set_weights([one[batch]])),
        *after_batch(on, lambda batch, logs: table.insert(key, [float(batch)])),
        *schedule(on, Total()),
        *schedule(on, Rate()),
    ]
    fit(on, on.model(), *callbacks)
    texts = [each for each in caplog.messages if each.startswith(UNSAVED)]
    found = [each.removeprefix(UNSAVED).split(". A")[0] for each in texts]
    assert sorted(", ".join(found).split(", ")) == [
        "COUNTS['batches']",
        "GENERATOR",
        "LearningRateScheduler#2.schedule.calls",
        "SEEN",
        "Total.calls",
        "average",
        "counts.batches",
        "table",
        "weight",
    ]


@LINES
def test_objects_whose_methods_are_hooks_are_searched(
    on: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """Values of the object of a bound method, or in a partial, were lost without a
    warning."""
    on.start()
    bound = after_batch(on, Tracker().update)
    partial = after_batch(on, functools.partial(add_to, Tracker()))
    fit(on, on.model(), *bound, *partial)
    texts = [each for each in caplog.messages if each.startswith(UNSAVED)]
    found = [each.removeprefix(UNSAVED).split(". A")[0] for each in texts]
    names = ["self.count", "self.seen", "tracker.count"]
    assert sorted(", ".join(found).split(", ")) == names


@LINES
def test_a_variable_set_from_the_number_of_the_epoch_is_not_named(
    on: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """A restart sets the variable again in `on_epoch_begin`."""
    on.start()
    weight, forgotten = tf.Variable(-1.0), tf.Variable(-1.0)
    callback = on.keras.callbacks.LambdaCallback
    callbacks = [
        callback(on_epoch_begin=lambda epoch, logs: weight.assign(epoch / 10)),
        callback(on_epoch_end=lambda epoch, logs: forgotten.assign(epoch / 10)),
    ]
    fit(on, on.model(), *callbacks)
    assert f"{UNSAVED}forgotten. " in caplog.text


def rows_of(on: Machine) -> Any:
    """Returns a class of training data: `row(index)` of a subclass gives the value of a
    batch."""
    utils = on.keras.utils

    class Rows(utils.PyDataset if on.line == "keras" else utils.Sequence):  # type: ignore[misc]
        def __len__(self) -> int:
            return BATCHES

        def __getitem__(self, index: int) -> Any:
            row = self.row(index)
            return np.full((2, 3), row, "float32"), np.zeros((2, 1), "float32")

    return Rows


def fit_rows(on: Machine, rows: Any, *callbacks: Any, epochs: int) -> None:
    """Trains on data in their own order, with a commit after each step."""
    arguments = {"epochs": epochs, "verbose": 0, "shuffle": False}
    ours = on.preemption(save_freq=1)
    on.model().fit(rows, callbacks=[ours, *callbacks], **arguments)


def reordered(on: Machine, where: str) -> None:
    """Trains on rows whose order the data, or a callback, change between epochs."""

    class Rows(rows_of(on)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.order, self.noise = np.arange(BATCHES), 0.0

        def row(self, index: int) -> float:
            return float(self.order[index]) + self.noise

        def on_epoch_end(self) -> None:
            np.random.shuffle(self.order)

    rows = Rows()

    def begin(epoch: int, logs: Any) -> None:
        rows.noise = epoch / 10

    def end(epoch: int, logs: Any) -> None:
        order = np.argsort(rows.order)
        if where == "replaced":
            rows.order = order
        elif where == "in place":
            rows.order[:] = order

    callback = on.keras.callbacks.LambdaCallback(on_epoch_begin=begin, on_epoch_end=end)
    on.start()
    fit_rows(on, rows, callback, epochs=3)


@LINES
@pytest.mark.parametrize("where", ["data", "replaced", "in place"])
def test_data_that_a_callback_reorders_are_named(
    on: Machine, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A restart calls `on_epoch_end` of the data again, but not that of a callback."""
    reordered(on, where)
    assert UNSAVED not in caplog.text
    named = "that change outside of the data's own on_epoch_end: order. " in caplog.text
    assert named == (where != "data")


@LINES
@pytest.mark.parametrize("source", ["generator", "seeds"])
def test_random_values_that_getitem_replaces_are_named(
    on: Machine, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The generator is a variable of the program; the seeds are a tensor."""
    generator = np.random.default_rng(1)

    class Rows(rows_of(on)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.seeds = tf.constant([1, 2])

        def row(self, index: int) -> float:
            if source == "generator":
                return generator.normal()
            self.seeds = self.seeds + 1
            return 0.0

    on.start()
    fit_rows(on, Rows(), epochs=2)
    assert f"outside of the data's own on_epoch_end: {source}. " in caplog.text


@LINES
@pytest.mark.parametrize("draws", [True, False])
def test_a_generator_that_on_epoch_end_replaces_is_named_if_a_batch_draws(
    on: Machine, draws: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the first generator was compared."""

    class Rows(rows_of(on)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.epoch = 0
            self.rng = np.random.default_rng(0)

        def row(self, index: int) -> float:
            return self.rng.normal() if draws and self.epoch else 0.0

        def on_epoch_end(self) -> None:
            self.epoch += 1
            self.rng = np.random.default_rng(self.epoch)

    on.start()
    fit_rows(on, Rows(), epochs=3)
    named = "outside of the data's own on_epoch_end: rng. " in caplog.text
    assert named == draws


@LINES
@pytest.mark.parametrize("shuffles", [True, False])
def test_validation_data_that_shuffle_themselves_are_named(
    on: Machine, shuffles: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """After a restart the order was the first order again, without a warning."""

    class Rows(rows_of(on)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.order = np.arange(BATCHES)

        def row(self, index: int) -> float:
            return float(self.order[index])

        def on_epoch_end(self) -> None:
            if shuffles:
                np.random.shuffle(self.order)

    on.start()
    arguments = on.arrays() | {"epochs": 2, "verbose": 0, "validation_data": Rows()}
    on.model().fit(callbacks=[on.preemption()], **arguments)
    named = f"{UNSAVED}validation_data.order. " in caplog.text
    assert (named, UNSAVED in caplog.text) == (shuffles, shuffles)
    assert ("in their on_epoch_end" in caplog.text) == shuffles


@LINES
@pytest.mark.parametrize(
    ("name", "mode"), [("log", "w"), ("log", "a"), (os.devnull, "w")]
)
def test_a_log_that_a_restart_empties_is_named(
    on: Machine, name: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The lines from before a preemption were lost, without a warning."""
    on.start()
    with open(on.directory / name, mode) as log:
        hook = after_batch(on, lambda batch, logs: log.write(f"{logs}\n"))
        fit(on, on.model(), *hook)
    named = "training can write to log, which the program has opened" in caplog.text
    assert named == ((name, mode) == ("log", "w"))


@LINES
def test_an_attribute_that_a_hook_creates_is_named_once(
    on: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """The start of the fit had no attribute to name."""

    class Best(on.keras.callbacks.Callback):  # type: ignore[name-defined,misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.best = min(logs["loss"], getattr(self, "best", np.inf))

    on.start()
    on.fit(None, Best(), epochs=3)
    found = [each for each in caplog.messages if "Best (best)" in each]
    assert len(found) == 1


LIMIT = NEWEST = 0.0


@LINES
def test_a_value_that_a_hook_replaces_for_later_steps_is_named(
    on: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """Not a value that no step reads."""

    def end(epoch: int, logs: Any) -> None:
        global LIMIT, NEWEST
        LIMIT = logs["loss"]
        NEWEST = logs["loss"]

    def loss(y: Any, predicted: Any) -> Any:
        return tf.reduce_mean((y - predicted) ** 2) + LIMIT

    on.start()
    callback = on.keras.callbacks.LambdaCallback(on_epoch_end=end)
    fit(on, on.model(loss=loss, run_eagerly=True), callback)
    assert f"{UNSAVED}LIMIT. " in caplog.text


@LINES
def test_a_variable_that_a_loss_changes_is_named(
    on: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    on.start()
    steps = tf.Variable(0.0)

    def loss(y: Any, predicted: Any) -> Any:
        steps.assign_add(1.0)
        return steps * tf.reduce_mean((y - predicted) ** 2)

    fit(on, on.model(loss=loss))
    assert f"{UNSAVED}steps. " in caplog.text


@LINES
def test_a_queue_of_a_train_step_is_named(
    on: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    on.start()
    queue = tf.queue.FIFOQueue(9, [tf.float32], shapes=[[]])
    queue.enqueue(0.0)

    class Queued(on.keras.Sequential):  # type: ignore[name-defined,misc]
        def train_step(self, data: Any) -> Any:
            logs = super().train_step(data)
            queue.enqueue(queue.dequeue() + 1.0)
            return logs

    model = Queued([on.keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    fit(on, model)
    assert "training can read from queue, whose contents are not in the" in caplog.text


class Stage(enum.Enum):
    """The stages of a training."""

    FIRST = 1
    SECOND = 2


STAGE = Stage.FIRST


@LINES
def test_a_generator_and_members_of_an_enum_are_named(
    on: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """In a fit, a generator was taken for a part of a saved object."""
    rows = (number for number in range(99))

    class Staged(on.keras.Sequential):  # type: ignore[name-defined,misc]
        def train_step(self, data: Any) -> Any:
            global STAGE
            if next(rows) == 2:
                STAGE = Stage.FIRST if STAGE is Stage.SECOND else Stage.SECOND
                self.stage = Stage.SECOND
            return super().train_step(data)

    on.start()
    model = Staged([on.keras.layers.Dense(1)])
    model.stage = Stage.FIRST
    model.compile("sgd", "mse", run_eagerly=True)
    fit(on, model)
    assert "training can read from rows, whose contents are not in the" in caplog.text
    assert f"{UNSAVED}STAGE. " in caplog.text
    assert "the change of model.stage will not be restored" in caplog.text


@LINES
def test_saved_values_are_not_named(
    on: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    on.start()
    seen: list[int] = []
    keras = on.keras

    class Counting(keras.callbacks.Callback):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(batch)
            self.model.batches = getattr(self.model, "batches", 0) + 1

        def get_state(self) -> list[int]:
            return seen

        def set_state(self, state: list[int]) -> None:
            seen[:] = state

    class Layered(keras.layers.Layer):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = {"dense": keras.layers.Dense(1)}

        def call(self, x: Any) -> Any:
            return self.inner["dense"](x)

    model = keras.Sequential([Layered()])
    model.compile("adam", "mse", jit_compile=False)
    stop = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    fit(on, model, Counting(), stop)
    assert "not in the commits" not in caplog.text
    assert "cannot check" not in caplog.text


@LINES
@pytest.mark.parametrize("kind", ["kernel", "stateless", "generator"])
def test_a_random_op_without_a_saved_state_is_named(
    on: Machine, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    on.start()

    class Noise(on.keras.layers.Layer):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.generator = tf.random.Generator.from_seed(1)

        def call(self, x: Any) -> Any:
            if kind == "kernel":
                return x + tf.random.normal(tf.shape(x))
            if kind == "generator":
                return x + self.generator.normal(tf.shape(x))
            return x + tf.random.stateless_normal(tf.shape(x), [1, 2])

    layers = [on.keras.layers.Dense(1), Noise()]
    model = on.keras.Sequential(layers)
    model.compile("sgd", "mse", jit_compile=False)
    fit(on, model)
    is_named = "the train function draws random numbers with RandomStandardNormal"
    assert (is_named in caplog.text) == (kind == "kernel")


@pytest.mark.parametrize(
    "hooks",
    [
        ["on_epoch_end"],
        ["on_train_begin"],
        ["on_train_begin", "by a helper"],
        ["on_train_begin", "on_epoch_end", "by a helper"],
    ],
)
def test_a_layer_that_is_adapted_in_a_fit_is_named(
    hooks: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A restart had the mean from before the fit, without a word."""
    with machine("keras") as on:
        on.start()
        layers = on.keras.layers
        norm = layers.Normalization()
        norm.adapt(np.zeros((4, 3), "float32"))

        def learn(*_: Any, **__: Any) -> None:
            norm.adapt(np.ones((4, 3), "float32"))

        def renew(*_: Any, **__: Any) -> None:
            learn()

        hook = renew if hooks[-1] == "by a helper" else learn
        model = on.keras.Sequential([norm, layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        fit(on, model, on.callback(**{each: hook for each in hooks if " " not in each}))
        is_named = "training calls norm.adapt(np.ones((4, 3), 'float32')). A layer"
        assert (is_named in caplog.text) == ("on_epoch_end" in hooks)


@LINES
def test_a_recurrent_layer_is_not_named(
    on: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """Its graph has an op for GPUs, which could draw for a dropout."""
    on.start()
    layers = on.keras.layers
    model = on.keras.Sequential([layers.Reshape((3, 1)), layers.LSTM(1)])
    model.compile("sgd", "mse", jit_compile=False)
    fit(on, model)
    assert "draws random numbers" not in caplog.text


@LINES
def test_the_search_for_random_ops_traces_nothing(on: Machine) -> None:
    on.start()
    traces = []

    class Traced(on.keras.Sequential):  # type: ignore[name-defined,misc]
        def train_step(self, data: Any) -> Any:
            traces.append(1)
            return super().train_step(data)

    found = []
    for ours in (False, None):
        model = Traced([on.keras.layers.Dense(1)])  # built by the first step
        model.compile("sgd", "mse", jit_compile=False)
        traces.clear()
        on.fit(model, epochs=2, ours=ours)
        found.append(len(traces))
    assert found[0] == found[1]
