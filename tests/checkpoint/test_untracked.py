"""Objects that TensorFlow does not track keep their names in a Checkpoint."""

from __future__ import annotations

import collections
import functools
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.tensorflow
tf = pytest.importorskip("tensorflow")

from tests.core.graph_searches import Searches  # noqa: E402
from tfpreempt.checkpoint.tensors import variables  # noqa: E402
from tfpreempt.checkpoint.tensors.variables import attach, walk  # noqa: E402
from tfpreempt.core import object_graph, private_api  # noqa: E402


class Parts:
    """A user's object."""

    def __init__(self, *parts: Any) -> None:
        self.parts = [*parts]


def test_an_object_keeps_its_name_when_another_comes_before_it() -> None:
    module, old, new = tf.Module(), tf.Variable(1.0), tf.Variable(2.0)
    module.held = Parts(old)
    checkpoint = tf.train.Checkpoint(m=module)
    attach(checkpoint)
    module.held.parts.insert(0, new)
    untracked = attach(checkpoint)
    children = untracked._trackable_children()
    assert children["m.held.parts[0]"] is old
    assert any(child is new for child in children.values())


def test_an_object_that_replaces_another_has_its_name() -> None:
    module, new = tf.Module(), tf.Variable(2.0)
    module.held = Parts(tf.Variable(1.0))
    checkpoint = tf.train.Checkpoint(m=module)
    attach(checkpoint)
    module.held.parts[0] = new
    untracked = attach(checkpoint)
    assert untracked._trackable_children()["m.held.parts[0]"] is new


def make_model() -> Any:
    """A model with an untracked block, a metric and a seed generator of its own."""
    keras = pytest.importorskip("keras")

    class Model(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.blocks = {"a": [keras.layers.Dense(2)]}
            self.seeds = Parts(keras.random.SeedGenerator(1))
            self.means = Parts(keras.metrics.Mean(), keras.metrics.Sum())
            self.blocks["a"][0].build((None, 3))

        def call(self, inputs: Any) -> Any:
            return self.blocks["a"][0](inputs)

    return Model()


def add_a_metric(model: Any) -> None:
    model.means.parts.append(type(model.means.parts[0])())


def replace_a_metric(model: Any) -> None:
    model.means.parts[1] = type(model.means.parts[0])()


def swap_metrics(model: Any) -> None:
    model.means.parts.reverse()


def remove_the_seeds(model: Any) -> None:
    del model.seeds


def add_a_layer(model: Any) -> None:
    layer = type(model.blocks["a"][0])(4)
    layer.build((None, 2))
    model.blocks["b"] = (layer,)


def add_a_tracked_layer(model: Any) -> None:
    model.last = type(model.blocks["a"][0])(4)
    model.last.build((None, 2))


@pytest.mark.parametrize(
    "change",
    [
        add_a_metric,
        replace_a_metric,
        swap_metrics,
        remove_the_seeds,
        add_a_layer,
        add_a_tracked_layer,
    ],
)
def test_a_later_call_finds_the_same_objects(change: Any) -> None:
    model = make_model()
    checkpoint = tf.train.Checkpoint(model=model)
    before = attach(checkpoint).graph
    assert attach(checkpoint).graph is before
    change(model)
    later, first = attach(checkpoint), attach(tf.train.Checkpoint(model=model))
    own = [
        [(path, id(variable)) for path, variable in each.own] for each in (later, first)
    ]
    assert own[0] == own[1]
    assert {id(each) for each in later.found.values()} >= {
        id(each) for each in first.found.values()
    }
    is_tracked = change in (add_a_layer, add_a_tracked_layer)
    assert (later.graph is before) is not is_tracked


class Slotted:
    """A user's object without a dict of attributes."""

    __slots__ = ("parts",)

    def __init__(self, *parts: Any) -> None:
        self.parts = parts


def make_holder() -> Any:
    """An object of the program with containers of all kinds."""
    holder = Parts(tf.random.Generator.from_seed(1), 2)
    holder.numbers, holder.names, holder.tags = [1, 2], {"a": {"b": 3}}, {1, 2}
    holder.slotted, holder.queue = Slotted(1), collections.deque([1])
    holder.data = [0] * (object_graph.MANY + 1)
    module = tf.Module()
    module.held, module.kernel, module.list = holder, tf.Variable(1.0), [1]
    return module


def edits(module: Any, rng: random.Random) -> list[Callable[[], Any]]:
    """Changes of a holder; some of them add or remove an untracked object."""
    held = module.held
    thing = rng.choice(
        [
            tf.random.Generator.from_seed,
            tf.Variable,
            lambda number: number,
            lambda number: [number, tf.Variable(number)],
            lambda number: {"key": (tf.random.Generator.from_seed(number),)},
            lambda number: Slotted(number, tf.random.Generator.from_seed(number)),
        ]
    )(rng.randint(0, 9))
    return [
        lambda: held.parts.append(thing),
        lambda: held.parts.insert(0, thing),
        lambda: held.parts.reverse(),
        lambda: held.parts.clear(),
        lambda: held.numbers.append(thing),
        lambda: held.numbers.__setitem__(0, thing),
        lambda: held.names["a"].update(b=thing),
        lambda: held.names.update(c=thing),
        lambda: held.names.pop("c", None),
        lambda: setattr(held, f"more_{rng.randint(0, 3)}", thing),
        lambda: vars(held).pop(f"more_{rng.randint(0, 3)}", None),
        lambda: setattr(held, "slotted", Slotted(thing)),
        lambda: setattr(held.slotted, "parts", (1, thing)),
        lambda: held.queue.append(thing),
        lambda: held.queue.rotate(),
        lambda: held.data.append(thing),
        lambda: held.data.__setitem__(7, 1),
        lambda: held.tags.add(rng.random()),
        lambda: setattr(module, "held", make_holder().held),
        lambda: setattr(module, "kernel", tf.Variable(2.0)),
        lambda: module.list.append(thing if isinstance(thing, int) else 3),
        lambda: None,
    ]


def test_a_repeated_search_equals_a_new_search(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two checkpoints searches all objects each time."""
    monkeypatch.setattr(object_graph, "MANY", 100)  # or most of the time is in `data`
    searches = Searches(monkeypatch)

    def found(checkpoint: Any) -> Any:
        search = attach(checkpoint)
        own = [(path, id(variable)) for path, variable in search.own]
        return own, [(path, id(each)) for path, each in search.found.items()]

    for number in range(320):
        if number % 8 == 0:
            module = make_holder()
            repeated, new = (tf.train.Checkpoint(m=module) for _ in range(2))
        for _ in range(rng.choice([1, 1, 3])):
            edit = rng.choice(edits(module, rng))
            edit()
        both = (functools.partial(found, each) for each in (repeated, new))
        first, expected = searches.results(*both)
        assert first == expected, number
    assert searches.answers == {True, False}


def test_a_metric_that_makes_variables_later_is_found() -> None:
    keras = pytest.importorskip("keras")
    module = tf.Module()
    module.held = Parts(keras.metrics.F1Score())
    checkpoint = tf.train.Checkpoint(m=module)
    before = [path for path, _ in attach(checkpoint).own]
    module.held.parts[0].update_state(tf.ones((2, 3)), tf.ones((2, 3)))
    after = [path for path, _ in attach(checkpoint).own]
    assert len(after) > len(before)
    assert after == [path for path, _ in attach(tf.train.Checkpoint(m=module)).own]


def test_a_generator_that_gets_another_state_is_found() -> None:
    module = tf.Module()
    module.held = Parts(tf.random.Generator.from_seed(1))
    checkpoint = tf.train.Checkpoint(m=module)
    attach(checkpoint)
    module.held.parts[0].reset_from_seed(2)
    module.held.parts[0]._state_var = state = tf.Variable([1, 2, 3], dtype=tf.int64)
    assert [each is state for _, each in attach(checkpoint).own] == [True]


def test_a_moving_average_that_makes_variables_later_is_found() -> None:
    """TensorFlow's class is not trackable: the averages had their initial values after
    a restart, without a word."""
    module, variable = tf.Module(), tf.Variable(1.0)
    module.averages = tf.train.ExponentialMovingAverage(0.9)
    checkpoint = tf.train.Checkpoint(m=module, variable=variable)
    assert attach(checkpoint).own == []
    module.averages.apply([variable])
    average = module.averages.average(variable)
    assert attach(checkpoint).own == [("m.averages[0]", average)]


def test_a_search_keeps_no_object_that_the_program_drops() -> None:
    module = tf.Module()
    module.block = tf.Module()
    module.block.kernel, module.block.more = tf.Variable(1.0), [tf.Variable(2.0)]
    module.block.plain = Parts({"a": module.block.kernel})
    checkpoint = tf.train.Checkpoint(m=module)
    attach(checkpoint)
    attach(checkpoint)
    dropped = [
        weakref.ref(each)
        for each in (module.block, module.block.kernel, module.block.more[0])
    ]
    del module.block
    gc.collect()
    assert [each() for each in dropped] == [None, None, None]


def test_a_variable_of_keras_that_becomes_distributed_is_found() -> None:
    keras = pytest.importorskip("keras")
    variable = keras.Variable([1.0, 2.0])
    checkpoint = tf.train.Checkpoint(v=variable)
    assert not attach(checkpoint).differing
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        variable._value = tf.Variable(
            [3.0, 4.0],
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
    assert [each is variable._value for _, each in attach(checkpoint).differing] == [
        True
    ]


def trained() -> Any:
    """A functional model of nested models, with the variables of an optimizer."""
    keras = pytest.importorskip("keras")
    inner = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    inputs = keras.Input((3,))
    outputs = keras.layers.BatchNormalization()(inner(inputs))
    model = keras.Model(inputs, keras.layers.Dropout(0.1, seed=1)(outputs))
    adam = keras.optimizers.Adam(use_ema=True)
    model.compile(keras.optimizers.LossScaleOptimizer(adam), "mse", metrics=["mae"])
    model.fit(tf.zeros((2, 3)), tf.zeros((2, 2)), verbose=0)
    return model


def with_lora() -> Any:
    keras = pytest.importorskip("keras")
    layer = keras.layers.Dense(4)
    layer.build((None, 3))
    layer.enable_lora(2)
    return layer


def quantized() -> Any:
    keras = pytest.importorskip("keras")
    layer = keras.layers.Dense(4)
    layer.build((None, 3))
    layer.quantize("int8")
    return layer


def with_trackables_of_its_own() -> Any:
    """Returns layers of Keras 3 with objects of TensorFlow; one has its own list."""
    keras = pytest.importorskip("keras")

    class Saving(keras.layers.Layer):  # type: ignore[misc]
        def _trackable_children(self, *args: Any, **options: Any) -> dict[str, Any]:
            return super()._trackable_children(*args, **options) | {"more": self.more}

    class Layer(keras.layers.Layer):  # type: ignore[misc]
        pass

    layer, saving = Layer(), Saving()
    saving.more = tf.train.Checkpoint(v=tf.Variable(1.0))
    layer.module, layer.table = tf.Module(), {"a": [tf.Variable(2.0)]}
    layer.module.inner = [tf.Variable(1.0), saving]
    layer.saving = saving
    return layer


def with_an_override_of_its_own() -> Any:
    """Returns an object with another list than its class."""
    keras = pytest.importorskip("keras")
    layer, variable = keras.layers.Dense(2), tf.Variable(1.0)
    layer.build((None, 3))
    walk(tf.train.Checkpoint(layer=layer))
    own = layer._trackable_children
    vars(layer)["_trackable_children"] = lambda *args, **options: {
        **own(*args, **options),
        "v": variable,
    }
    return layer


def with_a_class_that_changes() -> Any:
    """The class gets another list after a first object was seen."""
    variable = tf.Variable(1.0)

    class Module(tf.Module):  # type: ignore[misc]
        pass

    module = Module()
    walk(tf.train.Checkpoint(module=module))
    Module._trackable_children = lambda self, *args, **options: {"v": variable}
    return module


def with_a_property() -> Any:
    variable = tf.Variable(1.0)

    class Module(tf.Module):  # type: ignore[misc]
        @property
        def _unconditional_checkpoint_dependencies(self) -> list[Any]:
            more = private_api.trackable_base.TrackableReference("v", variable)
            return [*super()._unconditional_checkpoint_dependencies, more]

    return Module()


def of_the_older_line() -> Any:
    keras = pytest.importorskip("tf_keras")
    model = keras.Sequential([keras.layers.Dense(2, input_shape=(3,))])
    model.compile("adam", "mse", metrics=["mae"])
    model.fit(tf.zeros((2, 3)), tf.zeros((2, 2)), verbose=0)
    return model


@pytest.mark.parametrize(
    "make",
    [
        make_model,
        trained,
        with_lora,
        quantized,
        with_trackables_of_its_own,
        with_an_override_of_its_own,
        with_a_class_that_changes,
        with_a_property,
        of_the_older_line,
    ],
)
def test_paths_are_those_of_tensorflow(make: Any) -> None:
    checkpoint = tf.train.Checkpoint(model=make(), a=[tf.Variable(1.0)])
    checkpoint.b = checkpoint.a
    checkpoint.optimizer = getattr(checkpoint.model, "optimizer", None) or tf.Module()
    objects, paths = checkpoint._saver._graph_view.breadth_first_traversal()
    assert walk(checkpoint) == [
        ("/".join(each.name.replace("/", ".S") for each in paths[obj]), obj)
        for obj in objects
    ]


def test_another_thread_may_change_a_container_that_is_looked_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A buffer of tensors, for example, which a thread of the program fills."""
    module, inner = tf.Module(), variables._is_of_interest
    buffer = collections.deque(tf.zeros([1]) for _ in range(3))

    class Holder:
        def __init__(self) -> None:
            self.items = buffer

    module.holder = Holder()

    def change(kind: type) -> bool:
        buffer.append(tf.zeros([1]))
        return inner(kind)

    monkeypatch.setattr(variables, "_is_of_interest", change)
    attach(tf.train.Checkpoint(module=module))
    assert len(buffer) > 3
