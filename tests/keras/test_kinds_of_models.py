"""Models and fits of many kinds are interrupted, and come out the same."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.tensorflow
tf = pytest.importorskip("tensorflow")

from tests.keras.both_lines import LINES  # noqa: E402
from tests.keras.small_fit import (  # noqa: E402
    BATCH,
    BATCHES,
    EPOCHS,
    SAMPLES,
    Machine,
    Seen,
    X,
    Y,
    machine,
    values,
)
from tfpreempt import errors  # noqa: E402
from tfpreempt.keras import BadSteps  # noqa: E402
from tfpreempt.keras.fit_record import FitRecord  # noqa: E402

CUTS = [("begin", 1, 3), ("test", 1, 1), ("end", 2, 1)]
HELD_OUT = {"validation_data": (X[:7], Y[:7]), "validation_batch_size": BATCH}
Made = tuple[Any, dict[str, Any]]


@pytest.fixture
def on(line: str) -> Iterator[Machine]:
    with machine(line) as made:
        yield made


def small(on: Machine, *layers: Any) -> Any:
    dense = on.keras.layers.Dense
    return on.keras.Sequential([dense(3), *layers, dense(1, dtype="float32")])


# --- kinds ---------------------------------------------------------------------------


def mixed_precision(on: Machine) -> Made:
    """A model with a loss scale that grows during the run."""
    kinds = on.keras.mixed_precision
    on.keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = small(on)
    finally:
        on.keras.mixed_precision.set_global_policy("float32")
    growth = "dynamic_growth_steps"
    optimizer = kinds.LossScaleOptimizer(
        on.keras.optimizers.SGD(0.01, momentum=0.9), **{growth: 4}
    )
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=False)
    return model, {}


def lazily_built(on: Machine) -> Made:
    """A layer that is used in training only, and all are made by the first call."""
    keras = on.keras

    class Lazy(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first = keras.layers.Dense(4)
            self.side = keras.layers.Dense(4)
            self.last = keras.layers.Dense(1)

        def call(self, inputs: Any, training: bool = False) -> Any:
            hidden = self.first(inputs)
            if training:
                hidden = hidden + 0.1 * self.side(inputs)
            return self.last(hidden)

    model = Lazy()
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model, {}


def two_optimizers(on: Machine) -> Made:
    """Each optimizer has slots for its part; the validation creates other metrics."""
    keras = on.keras

    class Pair(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.body = keras.layers.Dense(4)
            self.head = keras.layers.Dense(1)
            self.second = keras.optimizers.Adam(0.02)

        def call(self, inputs: Any, training: bool = False) -> Any:
            return self.head(self.body(inputs))

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            weights = [self.body.trainable_variables, self.head.trainable_variables]
            body, head = tape.gradient(loss, weights)
            self.second.apply_gradients(zip(body, weights[0], strict=True))
            self.optimizer.apply_gradients(zip(head, weights[1], strict=True))
            return {"losses": {"all": loss}} if on.line == "keras" else {"all": loss}

    model = Pair()
    # Keras 3 itself fails where a train step leaves compiled metrics alone.
    metrics = None if on.line == "keras" else ["mae"]
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", metrics=metrics)
    return model, {}


def gan(on: Machine) -> Made:
    """Its optimizers, networks, losses and counts are in lists and dicts."""
    keras = on.keras

    class Gan(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            layers = keras.layers
            self.nets = {
                "make": keras.Sequential([layers.Dense(3), layers.Dropout(0.3)]),
                "judge": [layers.Dense(2), layers.Dense(1)],
            }
            self.rates = [keras.optimizers.Adam(0.02)]
            self.more = {"judge": (keras.optimizers.Adam(0.01),)}
            self.seen = [tf.Variable(0.0, trainable=False)]

        def call(self, inputs: Any, training: bool = False) -> Any:
            made = self.nets["make"](inputs, training=training)
            for layer in self.nets["judge"]:
                made = layer(made)
            return made

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            makes = self.nets["make"].trainable_variables
            judges = [v for net in self.nets["judge"] for v in net.trainable_variables]
            for optimizer, weights in (
                (self.rates[0], makes),
                (self.more["judge"][0], judges),
            ):
                gradients = tape.gradient(loss, weights)
                optimizer.apply_gradients(zip(gradients, weights, strict=True))
            self.seen[0].assign_add(loss)
            return {"loss": loss, "seen": tf.convert_to_tensor(self.seen[0])}

    model = Gan()
    model.compile("sgd", "mse", jit_compile=False)
    return model, {}


def counting(on: Machine) -> Made:
    """An eager step changes Python numbers and lists in many objects."""
    keras = on.keras

    class Loss(keras.losses.Loss):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 1.0

        def call(self, y: Any, predicted: Any) -> Any:
            self.scale *= 0.99
            return self.scale * tf.reduce_mean((y - predicted) ** 2, axis=-1)

    class Layer(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def call(self, inputs: Any) -> Any:
            self.calls += 1
            return inputs * (1 + self.calls % 3)

    class Pool:
        """An image pool of the program, as in a CycleGAN."""

        def __init__(self) -> None:
            self.losses: list[float] = []
            self.last = np.zeros(2)

    class Counting(keras.Sequential):
        def __init__(self, layers: Any) -> None:
            super().__init__(layers)
            self.steps = {"all": 0}
            self.pool = Pool()
            self.recent = collections.deque([0.0], maxlen=3)

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.loss(y, self(x, training=True))
            weights = self.trainable_variables
            gradients = tape.gradient(loss, weights)
            self.steps["all"] += 1
            if self.steps["all"] % 2:
                self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
            value = float(loss.numpy())
            self.pool.losses.append(value)
            self.pool.last += value
            self.recent.append(value)
            seen = sum(self.pool.losses) + sum(self.recent) + sum(self.pool.last)
            return {"loss": loss, "seen": tf.constant(seen)}

    model = Counting([Layer(), keras.layers.Dense(1)])
    model.build((None, 3))
    model.compile(keras.optimizers.SGD(0.01), Loss(), run_eagerly=True)
    return model, {}


def eager_python(on: Machine, *, is_built: bool = True) -> Made:
    """Python in the train step, which needs values."""
    keras = on.keras

    class Eager(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            x, y = data
            if not is_built:
                x = x.numpy()  # so a trace ends before the call makes the variables
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            if float(loss.numpy()) > 0:
                self.optimizer.apply_gradients(
                    zip(gradients, self.trainable_variables, strict=True)
                )
            return {"loss": loss}

    model = Eager([keras.layers.Dense(2), keras.layers.Dense(1)])
    if is_built:
        model.build((None, 3))
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", run_eagerly=True)
    return model, {}


def eager_and_lazily_built(on: Machine) -> Made:
    """A restart cannot trace the train step to make the variables of the layers."""
    return eager_python(on, is_built=False)


def own_train_function(on: Machine) -> Made:
    """Python code of the program counts the steps, and chooses a traced function."""
    keras = on.keras

    class Alternating(keras.Sequential):
        def make_train_function(self, force: bool = False) -> Any:
            if self.train_function is None or force:
                self.steps, self.train_function = 0, self.dispatch
            return self.train_function

        @property
        def dispatch(self) -> Any:
            once = tf.function(lambda iterator: self.train_step(next(iterator)))
            slower = tf.function(lambda iterator: self.slow_step(next(iterator)))

            def step(iterator: Any) -> Any:
                self.steps += 1
                return once(iterator) if self.steps % 4 else slower(iterator)

            return step

        def slow_step(self, data: Any) -> Any:
            before = [tf.identity(weight) for weight in self.trainable_variables]
            logs = self.train_step(data)
            for weight, was in zip(self.trainable_variables, before, strict=True):
                weight.assign((weight + was) / 2)
            return logs

    model = Alternating([keras.layers.Dense(2), keras.layers.Dense(1)])
    model.build((None, 3))
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", jit_compile=False)
    return model, {}


def eager_parts(on: Machine) -> Made:
    """A model without a `call`, whose eager step trains one of its two parts."""
    keras = on.keras

    class Parts(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.average, self.part = small(on), small(on)
            self.steps = 0
            for each in (self.average, self.part):
                each.build((None, 3))

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.part(x, training=True) - y) ** 2)
            weights = self.part.trainable_variables
            gradients = tape.gradient(loss, weights)
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
            for kept, new in zip(self.average.weights, self.part.weights, strict=True):
                kept.assign(0.9 * kept + 0.1 * new)
            self.steps += 1
            return {"loss": loss + self.steps}

        def test_step(self, data: Any) -> Any:
            return {"loss": tf.reduce_mean((self.average(data[0]) - data[1]) ** 2)}

    model = Parts()
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), run_eagerly=True)
    return model, {}


def unseeded_ops(on: Machine) -> Made:
    """Noise by ops without a seed, from the generator of the framework."""
    keras = on.keras

    class Noise(keras.layers.Layer):
        def call(self, inputs: Any, training: bool = False) -> Any:
            if not training or on.line != "keras":
                return inputs
            return inputs + 0.1 * keras.random.normal(tf.shape(inputs))

    model = small(on, Noise())
    model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=False)
    return model, {}


def weighted(on: Machine) -> Made:
    """Weights of samples, and a validation that is split off."""
    weights = np.linspace(0.5, 1.5, SAMPLES).astype("float32")
    data = {"x": np.tile(X, (2, 1)), "y": np.tile(Y, (2, 1))}
    more = {"sample_weight": np.tile(weights, 2), "validation_split": 0.25}
    return on.model(), {**data, **more, "validation_data": None}


def of_classes(on: Machine) -> Made:
    labels = (Y[:, 0] > 0).astype("int64")
    layers = on.keras.layers
    model = on.keras.Sequential([layers.Dense(2, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", jit_compile=False)
    held_out = {"validation_data": (X[:7], labels[:7])}
    return model, {"y": labels, "class_weight": {0: 1.0, 1: 3.0}, **held_out}


def with_a_vocabulary(on: Machine) -> Made:
    """tf_keras has the vocabulary among the weights of the model, as no variable."""
    layers = on.keras.layers
    words = layers.StringLookup()
    words.adapt(np.array([["a"], ["b"], ["c"]]))
    rows = np.array([["a"], ["b"], ["d"]] * SAMPLES)[:SAMPLES]
    inputs = on.keras.Input((1,), dtype="string")
    pooled = layers.GlobalAveragePooling1D()(layers.Embedding(4, 3)(words(inputs)))
    model = on.keras.Model(inputs, layers.Dense(1)(pooled))
    model.compile(on.keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    texts, held_out = tf.constant(rows), (tf.constant(rows[:7]), Y[:7])
    return model, {"x": texts, "validation_data": held_out}


def compiled_by_xla(on: Machine) -> Made:
    """With masks that Keras 3 draws inside of the compiled function."""
    keras = on.keras
    model = small(on, keras.layers.Dropout(0.3), keras.layers.BatchNormalization())
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], jit_compile=True)
    return model, {}


def read_by_workers(on: Machine) -> Made:
    """Batches are asked for ahead, by two threads.

    Not shuffled: in tf_keras by itself, the order depends on the time that validation
    takes (test_sequence_readers.py).
    """
    utils = on.keras.utils
    more = {"workers": 2, "max_queue_size": 3}
    own = more if on.line == "keras" else {}

    class Rows(utils.PyDataset if on.line == "keras" else utils.Sequence):
        def __len__(self) -> int:
            return BATCHES

        def __getitem__(self, index: int) -> Any:
            rows = slice(index * BATCH, (index + 1) * BATCH)
            return X[rows], Y[rows]

    rows = Rows(**own)
    plain = {"y": None, "batch_size": None, "shuffle": False}
    return on.model(), {"x": rows, **plain, **({} if own else more)}


KINDS: dict[str, Callable[[Machine], Made]] = {
    kind.__name__: kind
    for kind in (
        mixed_precision,
        lazily_built,
        two_optimizers,
        gan,
        counting,
        eager_python,
        eager_and_lazily_built,
        own_train_function,
        eager_parts,
        unseeded_ops,
        weighted,
        of_classes,
        with_a_vocabulary,
        compiled_by_xla,
        read_by_workers,
    )
}


def program(on: Machine, kind: Callable[[Machine], Made], ours: Any = None) -> Any:
    model, more = kind(on)
    history = on.fit(model, ours=ours, **{**HELD_OUT, **more})
    # Names of slots depend on where they were made.
    return history.history, history.epoch, list(values(model).values())


@LINES
@pytest.mark.parametrize("name", KINDS)
def test_the_result_is_the_same(on: Machine, line: str, name: str) -> None:
    if (line, name) == ("tf_keras", "mixed_precision"):
        pytest.skip("its LossScaleOptimizer has other arguments")
    on.start()
    expected = program(on, KINDS[name], False)
    assert on.run(functools.partial(program, on, KINDS[name]), *CUTS) == expected


@pytest.mark.parametrize("line", ["tf_keras"])
def test_the_search_for_nan_leaves_out_vocabularies(on: Machine, line: str) -> None:
    expected = on.run(functools.partial(program, on, with_a_vocabulary, False))
    on.start()
    found = program(on, with_a_vocabulary, on.preemption(on_bad_step=BadSteps()))
    assert found == expected


def counted(on: Machine, kind: type, ours: Any = None) -> Any:
    """A fit in which a callback counts on the model."""
    model = on.model()
    model.noted = kind()
    note = on.callback(on_epoch_end=lambda epoch, logs=None: model.noted.add(epoch))
    on.fit(model, note, ours=ours)
    return model.noted


@LINES
def test_python_values_that_cannot_be_restored_are_named(
    on: Machine, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    on.run(functools.partial(counted, on, set))
    [text] = [r.getMessage() for r in caplog.records if "noted" in r.getMessage()]
    assert "the change of model.noted will not be restored" in text


@LINES
def test_a_value_edited_between_two_starts_is_kept(on: Machine, line: str) -> None:
    def edited(rate: float) -> Any:
        model = on.model()
        model.rate, model.steps = rate, 0

        def count(batch: int, logs: Any = None) -> None:
            model.steps += 1

        on.fit(model, on.callback(on_train_batch_end=count))
        return model.rate, model.steps

    rates = iter([0.1, 0.2])
    found = on.run(lambda: edited(next(rates)), ("begin", 1, 2))
    assert found == (0.2, EPOCHS * BATCHES)


@LINES
def test_a_step_that_is_traced_counts_its_traces(on: Machine, line: str) -> None:
    """As in an uninterrupted run: the step is traced again."""

    def traced(ours: Any = None) -> Any:
        class Traced(on.keras.Sequential):
            def train_step(self, data: Any) -> Any:
                self.traces += 1
                found = super().train_step(data)
                return {**found, "traces": tf.constant(float(self.traces))}

        model = Traced([on.keras.layers.Dense(1)])
        model.traces = 0
        model.compile("sgd", "mse", jit_compile=False)
        model.build((None, 3))  # or variables are made in a trace of its own
        model.optimizer.build(model.trainable_variables)
        return on.fit(model, ours=ours, batch_size=SAMPLES // 2).history

    on.start()
    expected = traced(False)
    assert on.run(traced, ("begin", 1, 1)) == expected


@LINES
@pytest.mark.parametrize(
    ("more", "cut"),
    [
        ({}, ("begin", 1, 4)),
        ({"steps_per_execution": 2}, ("begin", 0, 2)),
        ({"metrics": ["mae"]}, ("test", 0, 0)),
    ],
)
def test_a_restart_traces_the_train_step_as_often_as_a_first_start(
    on: Machine, line: str, more: Mapping[str, Any], cut: tuple[str, int, int]
) -> None:
    """Also if a layer is frozen, and no variable exists before the trace."""
    traces: list[int] = []  # by start
    effects: list[str] = []

    def traced(ours: Any = None) -> Any:
        class Traced(on.keras.Sequential):
            def train_step(self, data: Any) -> Any:
                traces[-1] += 1
                self.traces.append(len(self.traces))
                return super().train_step(data)

        traces.append(0)
        layers = on.keras.layers
        model = Traced([layers.Dense(2), layers.Dropout(0.5), layers.Dense(1)])
        model.traces = []
        model.layers[0].trainable = False
        model.compile("adam", "mse", jit_compile=False, **more)
        history = on.fit(model, ours=ours, epochs=3, **HELD_OUT).history
        effects.append(repr(model.traces))
        return history, list(values(model).values())

    on.start()
    expected = traced(False)
    assert on.run(traced, cut) == expected
    assert traces == traces[:1] * 3
    assert effects[0] == effects[1]


# --- the course of a fit -------------------------------------------------------------


@LINES
def test_a_model_is_fitted_again_after_its_fit_died(on: Machine, line: str) -> None:
    """As in a notebook: the cell is interrupted, and run again."""
    model = on.model()

    def die(batch: int, logs: Any = None) -> None:
        raise KeyboardInterrupt

    on.start()
    with pytest.raises(KeyboardInterrupt):
        on.fit(model, on.callback(on_train_batch_end=die))
    assert on.fit(model).epoch == list(range(EPOCHS))


@LINES
def test_a_train_function_that_is_made_again(on: Machine, line: str) -> None:
    """A callback that unfreezes layers makes the train function again."""

    def unfreezing(ours: Any = None) -> Any:
        model = on.model()
        model.layers[0].trainable = False

        def unfreeze(epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                model.make_train_function(force=True)

        hooks = on.callback(on_epoch_begin=unfreeze)
        return on.fit(model, hooks, ours=ours).history, values(model)

    on.start()
    expected = unfreezing(False)
    assert on.run(unfreezing, ("begin", 1, 2), ("begin", 2, 1)) == expected


def change_settings(model: Any, epoch: int) -> None:
    """Settings of layers, optimizer, a regularizer and a layer of the program."""
    model.layers[1].rate = 0.3 + 0.2 * epoch
    model.layers[0].kernel_regularizer.l2 = np.float32(0.1 * epoch)
    model.optimizer.momentum = 0.9 - epoch / 3
    model.layers[3].factor = 1 + epoch
    model.trainable = True  # which sets that of all layers
    model.layers[0].trainable = epoch % 2 == 0


WHEN = {
    # Epochs in which the settings change, and the functions that are made again.
    "each, both made again": ((0, 1, 2), ("train", "test")),
    "each, train made again": ((0, 1, 2), ("train",)),
    "second, train made again": ((1,), ("train",)),
    "second, test made again": ((1,), ("test",)),
    "each": ((0, 1, 2), ()),
    "second": ((1,), ()),
}


def set_in_training(
    on: Machine, when: str, ours: Any = None, *, fits: int = 1, **compiled: Any
) -> Any:
    """Fits of one model, in which a callback changes settings when an epoch begins."""
    layers = on.keras.layers

    class Scale(layers.Layer):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.factor = 1

        def call(self, inputs: Any) -> Any:
            return inputs * self.factor

    regularizer = on.keras.regularizers.L2(0.01)
    first = layers.Dense(2, kernel_regularizer=regularizer)
    model = on.keras.Sequential([first, layers.Dropout(0.3), layers.Dense(1), Scale()])
    optimizer = on.keras.optimizers.SGD(0.005, momentum=0.9)
    model.compile(optimizer, "mse", jit_compile=False, **compiled)
    epochs, made_again = WHEN[when]

    def change(epoch: int, logs: Any = None) -> None:
        if epoch in epochs:
            change_settings(model, epoch)
            for name in made_again:
                getattr(model, f"make_{name}_function")(force=True)

    hooks = on.callback(on_epoch_begin=change)
    for _ in range(fits):
        model.layers[3].factor *= 2
        history = on.fit(model, hooks, ours=ours, **HELD_OUT)
    now = [each.trainable for each in (model, *model.layers)]
    now += [model.layers[1].rate, float(regularizer.l2), optimizer.momentum]
    return now, model.layers[3].factor, history.history, values(model)


@LINES
@pytest.mark.parametrize(
    ("when", "is_eager"), [*((when, False) for when in WHEN), ("second", True)]
)
def test_settings_that_a_callback_changes_have_the_effect_of_the_undisturbed_run(
    on: Machine, line: str, when: str, is_eager: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A traced train or test step has the settings of the moment of its trace."""
    program = functools.partial(set_in_training, on, when, run_eagerly=is_eager)
    on.start()
    expected = program(False)
    cuts = [("test", 0, 1), ("begin", 1, 2), ("begin", 1, 3), ("begin", 2, 1)]
    assert on.run(program, *cuts, ("test", 2, 1)) == expected
    assert "not be restored" not in caplog.text


@LINES
@pytest.mark.parametrize("dies", [False, True])
def test_a_second_fit_has_the_settings_and_traces_of_the_first_one(
    on: Machine, line: str, dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart in the second fit skips or restores the first fit."""
    program = functools.partial(set_in_training, on, "second", fits=2)
    on.start()
    expected = program(False)
    cuts = [("begin", 2, 3), ("begin", 0, 2), ("begin", 1, 2), ("test", 2, 1)]
    if dies:  # without a commit of the second fit

        def die() -> None:
            raise SystemExit(143)

        monkeypatch.setattr(on.button, "press", die)
        del cuts[2:]
    assert on.run(program, *cuts) == expected


def evaluated_by_a_callback(on: Machine, ours: Any) -> Any:
    """A callback evaluates on data with weights, which have a trace of their own."""
    model = scaled(on)

    def evaluate(epoch: int, logs: Any = None) -> None:
        model.layers[-1].factor = epoch
        model.evaluate(X, Y, sample_weight=Y[:, 0], batch_size=BATCH, verbose=0)

    on.fit(model, on.callback(on_epoch_end=evaluate), ours=ours, **HELD_OUT)


def with_a_batch_that_a_callback_tests(on: Machine, ours: Any) -> Any:
    """Keras 3 gives its test function a generator then, and no iterator."""
    model = scaled(on)
    losses = []

    def test(batch: int, logs: Any = None) -> None:
        losses.append(float(model.test_on_batch(X[:BATCH], Y[:BATCH])))

    on.fit(model, on.callback(on_epoch_end=test), ours=ours, **HELD_OUT)
    return losses[-1]


def traced_after_it_was_made_again(on: Machine, ours: Any) -> Any:
    """The first validation of the second fit traces the function."""
    model = scaled(on)

    def change(epoch: int, logs: Any = None) -> None:
        model.layers[-1].factor += epoch + 1

    on.fit(model, ours=ours, epochs=1, **HELD_OUT)
    model.make_test_function(force=True)
    hooks = on.callback(on_epoch_begin=change)
    history = on.fit(model, hooks, ours=ours, **HELD_OUT)
    return history.history, list(values(model).values())


def evaluated_between_two_fits(on: Machine, ours: Any) -> Any:
    """The complete first fit validates no more, so `evaluate` traces the function."""
    model = scaled(on)

    def change(epoch: int, logs: Any = None) -> None:
        model.layers[-1].factor += epoch

    first = ours if ours is not None else on.preemption()
    on.fit(model, on.callback(on_epoch_begin=change), ours=first, epochs=2, **HELD_OUT)
    if ours is None:
        on.checkpoints = on.directory / "second"
    model.evaluate(X, Y, batch_size=BATCH, verbose=0)
    on.fit(model, ours=on.preemption() if ours is None else ours, **HELD_OUT)
    on.checkpoints = on.directory / "checkpoints"


def frozen_in_another_model(on: Machine, ours: Any) -> Any:
    """The second model has a layer that a callback froze in the first model's fit."""
    shared = on.keras.layers.Dense(2)
    models = [on.keras.Sequential([shared, on.keras.layers.Dense(1)]) for _ in range(2)]
    for model in models:
        model.compile("sgd", "mse", jit_compile=False)

    def freeze(epoch: int, logs: Any = None) -> None:
        shared.trainable = False

    on.fit(models[0], on.callback(on_epoch_begin=freeze), ours=ours, epochs=1)
    history = on.fit(models[1], ours=ours)
    return history.history, [each.numpy().tobytes() for each in models[1].weights]


def scaled(on: Machine) -> Any:
    """A model whose last layer multiplies by a setting of its own."""

    class Scale(on.keras.layers.Layer):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.factor = 1

        def call(self, inputs: Any) -> Any:
            return inputs * self.factor

    model = on.keras.Sequential([on.keras.layers.Dense(1), Scale()])
    model.compile("sgd", "mse", jit_compile=False)
    return model


RARE = [
    (evaluated_by_a_callback, [("begin", 2, 1)], "all traces of the test function"),
    (with_a_batch_that_a_callback_tests, [("begin", 2, 1)], None),
    (traced_after_it_was_made_again, [("begin", 2, 3)], None),
    (evaluated_between_two_fits, [("begin", 2, 3)], "was traced were not restored"),
    (frozen_in_another_model, [("begin", 2, 3)], None),
]


@LINES
@pytest.mark.parametrize(("program", "cuts", "name"), RARE)
def test_rare_changes_of_settings_are_restored_or_named(
    on: Machine,
    line: str,
    program: Any,
    cuts: Any,
    name: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    on.start()
    expected = program(on, False)
    assert on.run(functools.partial(program, on, None), *cuts) == expected
    assert bool(name) == ("restored" in caplog.text)
    assert name is None or name in caplog.text


@LINES
@pytest.mark.parametrize("is_built", [False, True])
@pytest.mark.parametrize("fits", [1, 2])
def test_layers_that_are_frozen_when_the_first_epoch_begins(
    on: Machine, line: str, is_built: bool, fits: int
) -> None:
    """The optimizer has no variables for frozen layers, unless it was built before."""

    def program(ours: Any = None) -> Any:
        model = on.model()
        if is_built:
            model.build((None, 3))
            model.optimizer.build(model.trainable_variables)

        def freeze(epoch: int, logs: Any = None) -> None:
            model.layers[0].trainable = False

        hooks = on.callback(on_epoch_begin=freeze)
        for _ in range(fits):
            history = on.fit(model, hooks, ours=ours, epochs=2, **HELD_OUT).history
        return history, list(values(model).values())

    on.start()
    expected = program(False)
    cuts = [("begin", 0, 2), ("test", 0, 1), ("begin", 1, 3)]
    in_both = [("begin", 1, 3), ("begin", 0, 2), ("test", 0, 1)]
    assert on.run(program, *(cuts if fits == 1 else in_both)) == expected


@LINES
def test_settings_that_are_edited_between_two_starts_stay(
    on: Machine, line: str
) -> None:
    """No callback has changed them."""
    rates = [0.3, 0.5, 0.5]

    def edited() -> Any:
        model = on.model()
        model.layers[1].rate = rates.pop(0)
        on.fit(model)
        return model.layers[1].rate

    assert on.run(edited, ("begin", 1, 2), ("begin", 2, 1)) == 0.5


@LINES
def test_a_setting_that_a_layer_makes_when_it_is_built_is_no_change(
    on: Machine, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The first step builds a layer where steps are eager."""
    given = on.keras.layers.Normalization(mean=0.5, variance=2.0)
    model = small(on, given)
    model.compile("sgd", "mse", run_eagerly=True)
    on.start()
    on.fit(model, epochs=2)
    assert "not be restored" not in caplog.text


@LINES
def test_objects_that_a_callback_replaces_are_named(
    on: Machine, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    """At the replacement, and at the restart."""

    def program() -> None:
        model = on.model()

        def replace(epoch: int, logs: Any = None) -> None:
            if epoch == 0:
                model.layers[0].kernel_regularizer = on.keras.regularizers.L2(0.5)

        on.fit(model, on.callback(on_epoch_begin=replace), epochs=2)

    on.run(program, ("begin", 1, 1))
    found = [each for each in caplog.messages if "kernel_regularizer" in each]
    assert len(found) == 2
    assert "will not be restored after a restart" in found[0]
    assert "was not restored by this restart" in found[1]


@pytest.mark.parametrize("builds", [False, True])
def test_an_eager_step_that_trains_some_weights_resumes_or_is_explained(
    builds: bool,
) -> None:
    """The restart made the optimizer's variables for all weights, and named another
    model as the cause."""
    with machine("keras") as on:

        class Head(on.keras.Sequential):  # type: ignore[misc, name-defined]
            def train_step(self, data: Any) -> Any:
                x, y = data
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
                weights = self.layers[-1].trainable_variables
                gradients = tape.gradient(loss, weights)
                self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
                return {"loss": loss}

        def program(ours: Any = None) -> Any:
            model = Head([on.keras.layers.Dense(3), on.keras.layers.Dense(1)])
            model.build((None, X.shape[1]))
            model.compile("adam", run_eagerly=True)
            if builds and on.codes:  # as the error says
                model.optimizer.build(model.layers[-1].trainable_variables)
            on.fit(model, ours=ours)
            return values(model)

        on.start()
        expected, cuts = program(ours=False), [("begin", 1, 3), ("begin", 2, 1)]
        if builds:
            assert on.run(program, *cuts) == expected
            return
        with pytest.raises(errors.CheckpointMismatchError) as caught:
            on.run(program, *cuts)
        told = "The optimizer had 6 variables in the interrupted run, and has 10 now."
        assert told in str(caught.value)
        assert "model.optimizer.build(weights)" in str(caught.value)


@pytest.mark.parametrize("step", [("begin", 2, 1), ("begin", 1, 2)])
def test_lora_inside_of_fit_is_named(
    step: tuple[str, int, int], caplog: pytest.LogCaptureFixture
) -> None:
    """The restart has no variables of LoRA, or has them too early."""
    with machine("keras") as on:

        def program() -> None:
            model = on.model()
            model.build((None, X.shape[1]))

            def enable(epoch: int, logs: Any = None) -> None:
                if epoch == 1:
                    model.layers[0].enable_lora(2)

            on.fit(model, on.callback(on_epoch_begin=enable), epochs=3)

        with contextlib.suppress(TypeError):  # of Keras, in the second case
            on.run(program, step)
    found = [each for each in caplog.messages if "enable_lora() inside fit" in each]
    assert len(found) == 2
    assert "will not be restored after a restart" in found[0]
    assert "was not restored by this restart" in found[1]


@LINES
def test_compile_inside_of_fit_is_named(
    on: Machine, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    """When it happens, and by the restart, which has the optimizer of the program."""

    def program() -> Any:
        model = on.model()
        kept = model.optimizer

        def compile_again(epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
                model.make_train_function()

        again = on.callback(on_epoch_begin=compile_again)
        return on.fit(model, again, epochs=3).epoch, model.optimizer is kept

    assert on.run(program, ("begin", 2, 1)) == ([0, 1, 2], True)
    found = [each for each in caplog.messages if "compile()" in each]
    assert len(found) == 2
    assert "will not be restored after a restart" in found[0]
    assert "was not restored by this restart" in found[1]


@LINES
def test_compile_after_a_fit_that_failed_is_not_named(
    on: Machine, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(batch: int, logs: Any = None) -> None:
        raise ZeroDivisionError

    on.start()
    model = on.model()
    with pytest.raises(ZeroDivisionError):
        on.fit(model, on.callback(on_train_batch_end=fail))
    model.compile("adam", "mse")
    assert "compile()" not in caplog.text


@LINES
def test_a_train_function_made_again_within_an_epoch_is_watched(
    on: Machine, line: str
) -> None:
    """A notice is served in the same epoch."""

    def program(ours: Any = None) -> Any:
        model = on.model()

        def freeze(batch: int, logs: Any = None) -> None:
            if batch == 1 and model.layers[0].trainable:
                model.layers[0].trainable = False
                model.train_function = model.make_train_function(force=True) or (
                    model.train_function
                )

        hooks = on.callback(on_train_batch_begin=freeze)
        return on.fit(model, hooks, ours=ours).history, values(model)

    on.start()
    expected = program(False)
    assert on.run(program, ("begin", 0, 3), ("begin", 0, 4)) == expected


@LINES
@pytest.mark.usefixtures("summaries")
def test_tensorboard_resumes_at_its_step(on: Machine, line: str) -> None:
    """An interrupted run has the events of an uninterrupted run, each once."""

    def watched(name: str, ours: Any = None) -> list[Any]:
        directory = on.directory / name
        kind = on.keras.callbacks.TensorBoard
        on.fit(None, kind(str(directory), update_freq=1), ours=ours, **HELD_OUT)
        return sorted(
            (value.tag, event.step, value.tensor.SerializeToString())
            for file in directory.rglob("events*")
            for event in tf.compat.v1.train.summary_iterator(str(file))
            for value in event.summary.value
            if "loss" in value.tag
        )

    on.start()
    expected = watched("undisturbed", False)
    assert len(expected) > EPOCHS * BATCHES
    assert on.run(functools.partial(watched, "cut"), *CUTS) == expected


@LINES
def test_epochs_that_are_added_have_the_scheduled_rate(on: Machine, line: str) -> None:
    def scheduled(epochs: int, ours: Any = None) -> Any:
        kind = on.keras.callbacks.LearningRateScheduler
        rates = kind(lambda epoch, rate: [0.01, 0.002, 0.05][epoch])
        begun: list[int] = []
        hooks = on.callback(on_epoch_begin=lambda epoch, logs=None: begun.append(epoch))
        model = on.model()
        history = on.fit(model, rates, hooks, ours=ours, epochs=epochs).history
        return history, values(model), begun

    on.start()
    history, weights, _ = scheduled(EPOCHS, False)
    for epochs in (1, 2, EPOCHS):
        found = on.run(functools.partial(scheduled, epochs))
        assert found[2] == [epochs - 1]
    assert found[:2] == (history, weights)


@LINES
def test_restore_false_trains_from_the_beginning(on: Machine, line: str) -> None:
    on.run(on.fit)
    steps: list[int] = []
    note = on.callback(on_train_batch_end=lambda batch, logs=None: steps.append(batch))
    ours = on.preemption(restore=False)
    on.run(lambda: on.fit(None, note, ours=ours))
    assert len(steps) == EPOCHS * BATCHES
    assert [each.step for each in ours.checkpoints()][-1] == EPOCHS * BATCHES


@LINES
def test_stock_tensorflow_restores_the_latest_checkpoint(
    on: Machine, line: str
) -> None:
    """The value is a path, like that of a CheckpointManager."""
    ours = on.preemption()
    model = on.model()
    assert (ours.latest_checkpoint, ours.checkpoints()) == (None, [])
    on.run(lambda: on.fit(model, ours=ours))
    path = ours.latest_checkpoint
    assert type(path) is str
    assert path == tf.train.latest_checkpoint(str(on.checkpoints))
    first, newest = ours.checkpoints()
    assert first.step < newest.step
    assert path == newest.prefix
    restored = on.model()
    status = tf.train.Checkpoint(model=restored).restore(path)
    restored.build(X.shape)
    status.expect_partial()
    for mine, theirs in zip(restored.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def shuffled_rows(on: Machine, line: str) -> Any:
    """Returns a class of data that shuffle their rows after each epoch."""
    utils = on.keras.utils

    class Rows(utils.PyDataset if line == "keras" else utils.Sequence):
        def __init__(self) -> None:
            super().__init__()
            self.order = np.arange(SAMPLES)

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            rows = self.order[index * BATCH : (index + 1) * BATCH]
            return X[rows], Y[rows]

        def on_epoch_end(self) -> None:
            np.random.shuffle(self.order)

    return Rows


@LINES
def test_data_that_shuffle_themselves_without_a_seed_are_named(
    on: Machine, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = shuffled_rows(on, line)
    given = {"y": None, "batch_size": None, "epochs": 1}
    on.run(lambda: on.fit(None, x=rows(), **given), seed=None)
    assert "change between epochs" in caplog.text
    caplog.clear()
    on.run(lambda: on.fit(None, x=rows(), **given, ours=on.preemption(restore=False)))
    assert "change between epochs" not in caplog.text


@LINES
@pytest.mark.parametrize("reads", ["weights", "nothing"])
def test_data_that_depend_on_the_model_are_named_by_a_restart(
    on: Machine, line: str, reads: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A restart calls `on_epoch_end` again. Hard samples, which the weights of an
    earlier epoch have chosen, were other samples then, without a word."""

    class Hard(shuffled_rows(on, line)):  # type: ignore[misc]
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def on_epoch_end(self) -> None:
            super().on_epoch_end()
            if reads == "weights":
                weights = np.sum(self.model.get_weights()[0])
                self.order = np.roll(self.order, int(1e5 * weights))

    def program() -> None:
        model = on.model()
        model.build((None, 3))
        on.fit(model, x=Hard(model), y=None, batch_size=None, epochs=4)

    on.run(program, ("begin", 1, 1), ("begin", 2, 1))
    found = [each for each in caplog.messages if "has called the hooks" in each]
    assert len(found) == (2 if reads == "weights" else 0)
    assert all("interrupted run: order. The hooks" in each for each in found)


def without_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for a commit by another number of workers."""
    load = FitRecord.load
    monkeypatch.setattr(
        FitRecord,
        "load",
        lambda self, file: None if self.per_worker else load(self, file),
    )


@pytest.mark.parametrize("line", ["tf_keras"])  # Keras 3 makes them with the others
def test_metrics_of_the_validation_are_made_on_workers_without_a_part(
    on: Machine, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All workers must create these variables: the others would wait."""

    def program() -> int:
        keras = on.keras

        class Bare(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.last = keras.layers.Dense(1)

            def call(self, inputs: Any) -> Any:
                return self.last(inputs)

            def train_step(self, data: Any) -> Any:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((self(data[0]) - data[1]) ** 2)
                variables = self.trainable_variables
                gradients = tape.gradient(loss, variables)
                self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
                return {"loss": loss}

        model = Bare()
        model.compile("sgd", "mse", metrics=["mae"], jit_compile=False)
        counts: list[int] = []

        def count(batch: int, logs: Any = None) -> None:
            counts.append(len([v for each in model.metrics for v in each.variables]))

        on.fit(model, on.callback(on_train_batch_end=count), epochs=2, **HELD_OUT)
        return counts[-BATCHES + 2]  # of the first step that a restart trains

    expected = on.run(program)
    assert expected > 0
    on.cuts = [("begin", 1, 2)]
    (on.directory / "checkpoints").rename(on.directory / "before")
    on.start()
    with pytest.raises(SystemExit):
        program()
    without_a_part(monkeypatch)
    on.start()
    assert program() == expected


@LINES
def test_no_batch_is_repeated_for_workers_without_a_part(
    on: Machine, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One iterator serves all epochs, and continues after a repeated validation."""
    seen = Seen()
    rows = [[float(row)] for row in range(2 * BATCHES)]

    def program() -> None:
        data = tf.data.Dataset.from_tensor_slices(rows).batch(1).repeat()
        callbacks = [on.preemption(), seen.callback(on), on.interrupter()]
        held_out = {"validation_data": tf.data.Dataset.from_tensors([[0.0]])}
        shape = {"steps_per_epoch": BATCHES, "epochs": 2, "verbose": 0}
        seen.model(on).fit(data, callbacks=callbacks, **held_out, **shape)

    on.start()
    on.cuts = [("test", 0, 0)]
    with pytest.raises(SystemExit):
        program()
    without_a_part(monkeypatch)
    on.start()
    program()
    trained = [row for epoch in (0, 1) for [row] in seen.epochs[epoch]]
    assert trained == list(range(2 * BATCHES))
