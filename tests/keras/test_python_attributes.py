"""Plain Python values that training changes, without a fit."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

pytestmark = pytest.mark.tensorflow
tf = pytest.importorskip("tensorflow")

import keras  # noqa: E402

from tests.core.graph_searches import Searches  # noqa: E402
from tfpreempt.core import object_graph  # noqa: E402
from tfpreempt.keras.fit.python_attributes import Attributes  # noqa: E402

LARGE = [np.zeros(1 << 20) for _ in range(4)]  # 8 MiB each
MANY = [0] * (object_graph.MANY + 1)


class Helper:
    """A user's object."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Stats(NamedTuple):
    seen: int = 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Stats(), Stats(1)),
        (None, Stats(1)),
        ([Stats()], [Stats(1)]),
        (collections.Counter(), collections.Counter("a")),
        (collections.defaultdict(int), collections.defaultdict(int, a=1)),
        (collections.OrderedDict(), collections.OrderedDict(a=1)),
    ],
)
def test_a_type_that_a_restore_would_change_is_named(
    before: Any, after: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that calls `_replace` of a plain tuple would fail in each start."""
    model = Helper(stats=before)
    attributes = Attributes(model)
    model.stats = after
    [entry] = attributes.capture().header
    assert entry[-1] == "lost"
    [text] = caplog.messages
    assert "the change of model.stats will not be restored" in text
    assert "would change the type of the value" in text


def appended(value: Any) -> None:
    value.append(1.5)


def deleted(value: Any) -> None:
    del value["a"]
    value["c"] = [2]


def incremented(value: Any) -> None:
    value += 1.0


CHANGES_IN_PLACE = [
    (lambda: [0.5], appended),
    (lambda: collections.deque([0.5, 0.75], maxlen=2), appended),
    (lambda: {"a": 1, "b": 2}, deleted),
    (lambda: np.zeros(3), incremented),
]


@pytest.mark.parametrize(("make", "change"), CHANGES_IN_PLACE)
def test_a_value_changed_in_place_is_restored_in_place(
    make: Callable[[], Any], change: Callable[[Any], None]
) -> None:
    """A callback may fill the buffer of a model, by a reference of its own."""
    before, after = make(), make()
    attributes = Attributes(Helper(buffer=before))
    change(before)
    restarted = Helper(buffer=after)
    Attributes(restarted).restore(attributes.capture())
    assert restarted.buffer is after
    np.testing.assert_equal(after, before)


@pytest.mark.parametrize(("make", "change"), CHANGES_IN_PLACE)
def test_a_replaced_value_leaves_the_replaced_object_unchanged(
    make: Callable[[], Any], change: Callable[[Any], None]
) -> None:
    """The program may keep the initial value, as the first best weights."""
    model, first = Helper(best=make()), make()
    attributes = Attributes(model)
    model.best = make()
    change(model.best)
    restarted = Helper(best=first)
    Attributes(restarted).restore(attributes.capture())
    np.testing.assert_equal(restarted.best, model.best)
    np.testing.assert_equal(first, make())


def test_with_several_workers_a_value_that_a_trace_lacks_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """tf_keras traces before the restore, and workers must trace equally often."""
    factors = [2, 1]  # set by a callback, and by the program
    saved = None
    for factor in factors:
        model = Helper(factor=1)
        attributes = Attributes(model)
        model.factor = factor
        attributes.traced_by(lambda: None)
        if saved is not None:
            attributes.restore(saved)
        saved = attributes.capture()
    assert not attributes.must_trace_again("train", only_for_settings=True)
    [text] = caplog.messages
    assert "'factor' of model was 2" in text
    assert attributes.must_trace_again("train", only_for_settings=False)


@pytest.mark.parametrize(
    "mean", [tf.zeros(2), tf.ragged.constant([[1.0], [2.0, 3.0]], tf.bfloat16)]
)
def test_a_replaced_tensor_is_named(
    mean: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as by an eager step. Constants of a layer are not state."""
    model = Helper(mean=mean, words=tf.constant(["a", "b"]))
    attributes = Attributes(model)
    model.table = tf.zeros(2)  # made by the first step
    assert attributes.capture().header == []
    model.mean += 1.0
    [entry] = attributes.capture().header
    assert entry[-1] == "lost"
    [text] = caplog.messages
    assert "the change of model.mean will not be restored" in text


@pytest.mark.parametrize("data", [MANY, LARGE])
def test_data_are_not_kept(data: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = Helper(data=[*data], steps=0)
    attributes = Attributes(model)
    model.data[0], model.steps = 1, 1
    [entry] = attributes.capture().header
    assert "steps" in entry
    assert caplog.messages == []


@pytest.mark.parametrize("data", [MANY, LARGE])
def test_an_attribute_that_grows_to_data_is_named(
    data: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = Helper(seen=[])
    attributes = Attributes(model)
    model.seen += data
    [entry] = attributes.capture().header
    assert entry[-1] == "lost"
    [text] = caplog.messages
    assert "the change of model.seen will not be restored" in text


class Name:
    """A key whose description changes."""

    text = "a"

    def __repr__(self) -> str:
        return self.text


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (({1}, [*MANY]), lambda value: value[1].__setitem__(0, 1)),
        ({Name(): 1}, lambda value: setattr(next(iter(value)), "text", "b")),
    ],
)
def test_a_change_in_a_value_that_cannot_be_restored_is_named(
    value: Any, change: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The walk does not see the change: it enters no data, and no keys of dicts."""
    model = Helper(value=value)
    attributes = Attributes(model)
    change(value)
    [entry] = attributes.capture().header
    assert entry[-1] == "lost"
    [text] = caplog.messages
    assert "the change of model.value will not be restored" in text


def test_an_object_that_replaced_a_number_is_restored() -> None:
    """A setting was a number in the first step, and is an object in the restart."""
    layer, objects = keras.layers.Dropout(0.5), [Helper(), Helper()]
    attributes = Attributes(Helper(layer=layer))
    layer.rate = 0.3
    attributes.traced_by(lambda: None)
    saved = attributes.capture()
    layer = keras.layers.Dropout(0.5)
    layer.rate = objects[0]
    attributes = Attributes(Helper(layer=layer))
    with attributes.as_first(saved):
        assert layer.rate == 0.3
    assert layer.rate is objects[0]
    attributes.restore(saved)
    layer.rate = objects[1]
    seen: list[Any] = []
    attributes.traced_by(lambda: seen.append(layer.rate))
    assert seen == [0.3]
    assert layer.rate is objects[1]


class Slotted:
    """A user's object with slots and a property."""

    __slots__ = ("_rate", "more")

    def __init__(self) -> None:
        self._rate = 1

    @property
    def rate(self) -> int:
        return self._rate

    @rate.setter
    def rate(self, rate: int) -> None:
        self._rate = rate


def model_with_values() -> Helper:
    return Helper(
        count=0,
        layer=keras.layers.Dropout(0.5),
        dense=keras.layers.Dense(2, kernel_regularizer=keras.regularizers.L2(0.1)),
        layers=[keras.layers.Dropout(0.1)],
        steps=[1, 2],
        phases={"a": [1], (1, 2): 3},
        tags={1, "a"},
        queue=collections.deque([1], maxlen=3),
        array=np.zeros(3),
        arrays={"a": [np.zeros(2)], "b": (np.ones(2),)},
        record=np.zeros(1, [("a", int)])[0],
        generators=[random.Random(1), np.random.default_rng(1)],
        nested=([1], {2}, frozenset({random.Random(2)})),
        stats=Stats(),
        slotted=Slotted(),
        part=Helper(inner=Helper(value=1)),
        data=[0] * (object_graph.MANY + 1),
        mixed={1, object},
    )


def edits(model: Any, rng: random.Random) -> list[Callable[[], Any]]:
    """Returns changes of a model; some of them have no effect."""
    number = rng.randrange(5)
    frozen = next(iter(model.nested[2]))
    return [
        lambda: setattr(model, "count", number),
        lambda: setattr(model, "count", bool(number)),
        lambda: setattr(model, f"new{number}", number),
        lambda: vars(model).pop(f"new{number}", None),
        lambda: setattr(model.layer, "rate", number / 10),
        lambda: setattr(model.layer, "trainable", number > 2),
        lambda: setattr(model, "layer", keras.layers.Dropout(number / 10)),
        lambda: setattr(model.dense.kernel_regularizer, "l2", number),
        lambda: model.layers.append(keras.layers.Dropout(0.1)),
        lambda: model.layers.reverse(),
        lambda: model.steps.append(number),
        lambda: model.steps.__setitem__(0, number),
        lambda: setattr(model, "steps", list(model.steps)),
        lambda: model.phases["a"].append(number),
        lambda: model.phases.update(b=number),
        lambda: model.phases.update({(number, 2): number}),
        lambda: model.phases.pop((number, 2), None),
        lambda: model.tags.add(number),
        lambda: model.tags.discard(number),
        lambda: model.queue.append(number),
        lambda: model.array.__setitem__(0, number),
        lambda: model.arrays["a"][0].__setitem__(0, number),
        lambda: model.arrays["b"][0].__setitem__(0, number),
        lambda: model.record.__setitem__("a", number),
        lambda: model.generators[0].random(),
        lambda: model.generators[1].random(),
        lambda: model.nested[0].append(number),
        lambda: model.nested[1].add(number),
        frozen.random,
        lambda: setattr(model, "stats", Stats(number)),
        lambda: setattr(model.slotted, "rate", number),
        lambda: setattr(model.slotted, "more", [number]),
        lambda: setattr(model.part.inner, "value", number),
        lambda: setattr(model.part, "inner", Helper(value=number)),
        lambda: setattr(model, "part", Helper(inner=Helper(value=number))),
        lambda: model.data.append(number),
        lambda: model.data.__setitem__(0, number),
        lambda: model.mixed.discard(object),
        lambda: model.mixed.add(object),
        lambda: None,
    ]


def test_a_repeated_traversal_equals_a_new_traversal(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two traversals visits all objects each time."""
    monkeypatch.setattr(object_graph, "MANY", 100)  # or most of the time is in `data`
    searches = Searches(monkeypatch)
    for number in range(480):
        if number % 8 == 0:
            model = model_with_values()
            repeated, new = Attributes(model), Attributes(model)
        for _ in range(rng.choice([1, 1, 3])):
            edit = rng.choice(edits(model, rng))
            edit()
        found, expected = searches.results(repeated.capture, new.capture)
        assert found == expected, number
    assert searches.answers == {True, False}
