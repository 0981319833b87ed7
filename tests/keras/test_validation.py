"""A validation that changes variables, interrupted at each of its batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.tensorflow
tf = pytest.importorskip("tensorflow")

from tests.keras.both_lines import LINES  # noqa: E402
from tests.keras.small_fit import Machine, X, Y, machine, values  # noqa: E402
from tfpreempt.checkpoint.tensors.variables import attach  # noqa: E402
from tfpreempt.keras.backends.tensorflow_variables import HeldValues  # noqa: E402

ROWS = 16  # 4 batches, as many for the validation
ARRAYS = {
    "x": X[:ROWS],
    "y": Y[:ROWS],
    "batch_size": 4,
    "shuffle": False,
    "validation_data": (X[:ROWS], Y[:ROWS]),
    "validation_batch_size": 4,
}
CUTS = [("test", 0, 1), ("test", 1, 0), ("test", 1, 3)]


@pytest.fixture
def on(line: str) -> Iterator[Machine]:
    with machine(line) as made:
        yield made


def stateful_rnn(on: Machine) -> Any:
    layers = on.keras.layers
    model = on.keras.Sequential(
        [
            on.keras.Input(batch_shape=(4, 3)),
            layers.Reshape((3, 1)),
            layers.SimpleRNN(2, stateful=True),
            layers.Dense(1),
        ]
    )
    model.compile(on.keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    return model


def counted(on: Machine, **compiled: Any) -> Any:
    """A model that counts its test steps, and learns from the count."""

    class Counted(on.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = on.keras.layers.Dense(1)
            self.tested = tf.Variable(0.0, trainable=False)

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs) + 0.01 * self.tested

        def test_step(self, data: Any) -> Any:
            self.tested.assign_add(1.0)
            return super().test_step(data)

    model = Counted()
    compiled = {"jit_compile": False} | compiled
    model.compile(on.keras.optimizers.Adam(0.01), "mse", **compiled)
    return model


def counted_eagerly(on: Machine) -> Any:
    return counted(on, run_eagerly=True)


def counted_by_xla(on: Machine) -> Any:
    return counted(on, jit_compile=True)


def adapting(on: Machine) -> Any:
    """A layer that changes its mean with every batch, also of a validation."""

    class Adapting(on.keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.mean = self.add_weight(
                name="mean", shape=(3,), initializer="zeros", trainable=False
            )

        def call(self, inputs: Any) -> Any:
            mean = 0.9 * tf.convert_to_tensor(self.mean)
            self.mean.assign(mean + 0.1 * tf.reduce_mean(inputs, 0))
            return inputs - self.mean

    model = on.keras.Sequential([Adapting(), on.keras.layers.Dense(1)])
    model.compile(on.keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    return model


def adapting_in_a_strategy(on: Machine) -> Any:
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        return adapting(on)


def sparsely_updated(on: Machine) -> Any:
    """The test step writes into an embedding, which training updates by rows."""
    layers = on.keras.layers

    class Sparse(on.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.rows = layers.Embedding(8, 3)
            self.dense = layers.Dense(1)

        def call(self, inputs: Any) -> Any:
            picked = tf.cast(tf.abs(inputs[:, 0]) * 4, tf.int32) % 8
            return self.dense(self.rows(picked) + inputs)

        def test_step(self, data: Any) -> Any:
            table = self.rows.embeddings
            table = table.value if on.line == "keras" else table
            table.scatter_add(tf.IndexedSlices(tf.ones((1, 3)), tf.constant([2])))
            return super().test_step(data)

    model = Sparse()
    model.compile(on.keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    return model


KINDS: dict[str, Callable[[Machine], Any]] = {
    kind.__name__: kind
    for kind in (
        stateful_rnn,
        counted,
        counted_eagerly,
        counted_by_xla,
        adapting,
        adapting_in_a_strategy,
        sparsely_updated,
    )
}


def program(
    on: Machine, kind: Callable[[Machine], Any], *others: Any, ours: Any = None
) -> Any:
    model = kind(on)
    history = on.fit(model, *others, ours=ours, **ARRAYS)
    return history.history, history.epoch, list(values(model).values())


@LINES
@pytest.mark.parametrize("name", KINDS)
def test_a_repeated_validation_finds_its_first_variables(
    on: Machine, line: str, name: str
) -> None:
    on.start()
    expected = program(on, KINDS[name], ours=False)
    assert on.run(functools.partial(program, on, KINDS[name]), *CUTS) == expected


@LINES
@pytest.mark.parametrize("steps", [None, 2])
def test_a_validation_that_shares_a_shuffle_with_training(
    on: Machine, line: str, steps: int | None
) -> None:
    """A repeated validation drew a second seed, and later epochs had another order."""

    def program(ours: Any = None) -> Any:
        rows = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(len(X), seed=3)
        data = rows.skip(6).batch(4)
        more = {"validation_data": rows.take(6).batch(3), "steps_per_epoch": steps}
        if steps is not None:
            data = data.repeat()
        data = {"x": data, "y": None, "batch_size": None, "shuffle": None}
        model = on.model()
        history = on.fit(model, ours=ours, **data, **more)
        return history.history, list(values(model).values())

    on.start()
    expected = program(False)
    assert on.run(program, ("test", 0, 1), ("begin", 1, 1), ("test", 1, 0)) == expected


@LINES
def test_a_callback_may_swap_the_weights_for_a_validation(
    on: Machine, line: str
) -> None:
    """A restart called `on_test_begin` before it restored the weights, so the callback
    set the initial weights back in `on_test_end`."""

    class Average(on.keras.callbacks.Callback):  # type: ignore[name-defined,misc]
        def on_train_begin(self, logs: Any = None) -> None:
            self.average = self.model.get_weights()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            now = self.model.get_weights()
            pairs = zip(self.average, now, strict=True)
            self.average = [(old + new) / 2 for old, new in pairs]

        def on_test_begin(self, logs: Any = None) -> None:
            self.trained = self.model.get_weights()
            self.model.set_weights(self.average)

        def on_test_end(self, logs: Any = None) -> None:
            self.model.set_weights(self.trained)

        def get_state(self) -> Any:
            return {"average": self.average}

        def set_state(self, state: Any) -> None:
            self.average = state["average"]

    def train(ours: Any = None) -> Any:
        model = on.model()
        model.build((None, 3))
        return program(on, lambda on: model, Average(), ours=ours)

    on.start()
    expected = train(ours=False)
    assert on.run(train, ("test", 1, 1)) == expected


@LINES
def test_held_values_are_saved_and_training_continues(on: Machine, line: str) -> None:
    """A periodic save within a validation: training continues after the save."""
    on.start()
    model = adapting(on)
    model.fit(verbose=0, **ARRAYS)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = str(on.directory / "saved")
    held, expected = HeldValues(attach(checkpoint)), values(model)
    model.evaluate(X, Y, verbose=0)
    changed = values(model)
    assert changed != expected
    with held.assigned():
        assert values(model) == expected
        checkpoint.save(path)
        checkpoint.save(path)
    assert values(model) == changed
    assert int(checkpoint.save_counter) == 2


def test_values_are_held_while_rows_of_a_variable_change() -> None:
    """TensorFlow writes rows in place, as the optimizer does for an embedding."""
    rows, dense = tf.Variable(tf.zeros((100, 64))), tf.Variable(tf.zeros(64))
    more = [tf.Variable(float(number)) for number in range(130)]
    module = tf.Module()
    module.parts = [rows, dense, *more]
    checkpoint = tf.train.Checkpoint(module=module)

    def update(by: float) -> None:
        rows.scatter_add(tf.IndexedSlices(tf.fill((1, 64), by), [3]))
        dense.assign_add(tf.fill(64, by))
        for each in more:
            each.assign_add(by)

    def now() -> list[Any]:
        return [each.numpy().tolist() for each in module.parts]

    update(1.0)  # from now on a read of `rows` makes a copy
    expected, held = now(), HeldValues(attach(checkpoint))
    update(2.0)
    changed = now()
    with held.assigned():
        assert now() == expected
        update(4.0)
    assert now() == changed
