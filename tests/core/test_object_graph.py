"""Objects that a walk through references finds."""

from __future__ import annotations

import collections
import dataclasses
import dis
import inspect
import logging
import pathlib
import sys
import types
import unittest
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tfpreempt import TerminationConfig
from tfpreempt.core import object_graph


class Model:
    """A user's object."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def paths(wanted: Any, **roots: Any) -> list[str]:
    """Returns the object paths of a value."""
    places = object_graph.walk(roots, object_graph.is_user_code)
    return [place.path for place in places if place.value is wanted]


@pytest.mark.parametrize(
    ("holder", "path"),
    [
        (lambda it: [0, it], "root[1]"),
        (lambda it: {"a": (it,)}, "root['a'][0]"),
        (lambda it: {3: it}, "root[3]"),
        (lambda it: {object(): it}, "root[key 0]"),
        (lambda it: collections.deque([it]), "root[0]"),
        (lambda it: Model(parts=[Model(one=it)]), "root.parts[0].one"),
        (lambda it: types.SimpleNamespace(it=it), "root.it"),
    ],
)
def test_a_thing_is_named_as_python_writes_it(holder: Any, path: str) -> None:
    it = object()
    assert paths(it, root=holder(it)) == [path]


def test_slots_are_attributes() -> None:
    @dataclasses.dataclass(slots=True)
    class Slotted:
        inner: Any

    it = object()
    assert paths(it, root=Slotted(inner=it)) == ["root.inner"]


def test_an_empty_slot_is_not_read() -> None:
    class Slots:
        __slots__ = ("__inner", "unset")

    class Reader(Slots):
        def __init__(self, inner: Any) -> None:
            self._Slots__inner = inner

        def __getattr__(self, name: str) -> Any:
            raise ValueError(f"{name} is read, which takes all workers")

    it = object()
    assert paths(it, root=Reader(it)) == ["root._Slots__inner"]


def test_the_shortest_and_the_public_way_come_first() -> None:
    it = object()
    model = Model(_all=[it], deep=Model(it=[it]), parts=[it])
    assert paths(it, model=model) == [
        "model.parts[0]",
        "model._all[0]",
        "model.deep.it[0]",
    ]


def test_circles_end() -> None:
    one, other = Model(), []
    one.other, one.itself = other, one
    other.append(one)
    assert paths(one, one=one) == ["one", "one.itself", "one.other[0]"]


def test_an_object_path_has_its_owner() -> None:
    numbers = [1, 2]
    *_, last = object_graph.walk({"m": Model(numbers=numbers)}, lambda kind: True)
    assert last.owner is numbers
    assert (last.key, last.value) == (1, 2)


def test_data_are_not_searched() -> None:
    words = [f"word {number}" for number in range(object_graph.MANY + 1)]
    rows = {word: (word, [1.0]) for word in words}
    model = Model(words=words, rows=rows, few=[1])
    found = [place.path for place in object_graph.walk({"m": model}, lambda kind: True)]
    assert found == ["m", "m.words", "m.rows", "m.few", "m.few[0]"]


def test_an_object_among_many_items_is_found() -> None:
    it = Model()
    assert paths(it, root=[0] * object_graph.MANY + [it]) == [
        f"root[{object_graph.MANY}]"
    ]


def test_values_that_are_skipped_are_no_places_and_lead_to_none() -> None:
    model = Model(number=1, words=["a"], array=np.zeros(1), few=("b", [2]))
    places = object_graph.walk(
        {"m": model},
        lambda kind: kind is Model,
        skips=lambda value: not isinstance(value, tuple | str),
    )
    assert [place.path for place in places] == ["m", "m.few", "m.few[0]"]


def test_properties_are_not_called() -> None:
    class Careful(Model):
        @property
        def costly(self) -> Any:
            raise AssertionError

    careful = Careful()
    vars(careful)["costly"] = it = object()
    assert paths(it, root=careful) == ["root.costly"]


def test_an_installed_class_is_no_user_code() -> None:
    assert object_graph.is_user_code(Model)
    installed = (int, logging.Logger, np.random.Generator, TerminationConfig)
    assert not any(map(object_graph.is_user_code, installed))


@pytest.mark.parametrize(
    ("name", "file", "is_program"),
    [
        ("keras.src.models.unseen", "keras/src/models/unseen.py", False),
        ("tf_keras.unseen", "tf_keras/unseen/__init__.py", False),
        ("tensorflow.python.unseen", "tensorflow/python/unseen.py", False),
        ("a_library.layers.unseen", "a_library/layers/unseen.py", False),
        ("one_file_library", "one_file_library.py", False),
        ("my_models", "my_models.py", True),
        ("my_package.layers.unseen", "my_package/layers/unseen/__init__.py", True),
        ("keras_of_mine", "keras_of_mine.py", True),
        (".".join("a" * 99), "loaded_under_a_long_name.py", True),
    ],
)
def test_a_library_is_one_outside_of_site_packages(
    name: str,
    file: str,
    is_program: bool,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with `pip install --target` and PYTHONPATH, beside modules of the program."""
    record = tmp_path / "a_library-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_bytes(b"a_library/__init__.py,,\none_file_library.py,,\n\xff,,\n")
    module = types.ModuleType(name)
    module.__file__ = str(tmp_path / file)
    monkeypatch.setitem(sys.modules, name, module)
    assert object_graph.is_user_module.__wrapped__(name) == is_program


def test_assigned_attributes_equal_those_found_by_dis() -> None:
    many = " = ".join(f"self.name_{number}" for number in range(300))
    made: dict[str, Any] = {}
    exec(f"def assign(self, value):\n    {many} = value", made)
    wide = type("Wide", (), {"assign": made["assign"]})  # with EXTENDED_ARG
    for cls in (wide, unittest.TestCase, logging.LoggerAdapter, Model):
        methods = [each for base in cls.__mro__ for each in vars(base).values()]
        shown = {
            instruction.argval
            for method in methods
            if inspect.isfunction(inspect.unwrap(method) if callable(method) else None)
            for instruction in dis.get_instructions(inspect.unwrap(method))
            if instruction.opname == "STORE_ATTR"
        }
        assert object_graph.set_by(cls) == shown, cls
    assert len(object_graph.set_by(wide)) == 300


@pytest.mark.parametrize(
    "changed",
    [collections.deque([(1,), (2,)]), {1: (1,), 2: (2,)}],
    ids=["deque", "dict"],
)
def test_another_thread_may_change_a_container_that_is_looked_through(
    changed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = object_graph.is_container

    def change(value: Any) -> bool:
        if isinstance(changed, dict):
            changed[len(changed) + 1] = ()
        else:
            changed.append(())
        return inner(value)

    monkeypatch.setattr(object_graph, "is_container", change)
    assert not object_graph.is_data(changed)


class Slotted:
    """An object without a `__dict__`."""

    __slots__ = ("one", "two")


def model_of_all_kinds() -> Model:
    slotted = Slotted()
    slotted.one = 1
    return Model(
        count=1,
        array=np.zeros(2),
        parts=[Model(one=1), (Model(two=2),)],
        names={"a": Model(three=3), (1, 2): 5},
        tags={1, 2},
        frozen=(frozenset({1}), {3}),
        queue=collections.deque([1, 2]),
        slotted=slotted,
        data=[0] * (object_graph.MANY + 1),
        unknown=object(),
    )


def replace_key(model: Model) -> None:
    """Replaces a key by an equal number; the address of the first key is free."""
    numbers = [3, 4]
    del model.names[1, 2]
    model.names[tuple(numbers)] = 5


def replace_by_the_same_class(model: Model) -> None:
    """The new object may have the address of the old object."""
    del model.parts[0]
    model.parts.insert(0, Model(one=2))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an equal value of another type": lambda m: setattr(m, "count", True),
    "another number": lambda m: setattr(m, "count", 2),
    "a new attribute": lambda m: setattr(m, "more", None),
    "an attribute is deleted": lambda m: delattr(m, "count"),
    "an equal array": lambda m: setattr(m, "array", np.zeros(2)),
    "another object that is not entered": lambda m: setattr(m, "unknown", object()),
    "an attribute of a part": lambda m: setattr(m.parts[0], "one", 3),
    "an attribute of a part in a tuple": lambda m: setattr(m.parts[1][0], "two", 3),
    "an object of the same class": replace_by_the_same_class,
    "another order": lambda m: m.parts.reverse(),
    "an item is appended": lambda m: m.parts.append(0),
    "an item of a dict": lambda m: m.names.update(a=Model(three=3)),
    "a part of a dict": lambda m: setattr(m.names["a"], "three", 4),
    "another key": replace_key,
    "an item of a set": lambda m: m.tags.add(3),
    "an item of a set in a tuple": lambda m: m.frozen[1].discard(3),
    "a deque": lambda m: m.queue.rotate(),
    "a slot": lambda m: setattr(m.slotted, "one", 2),
    "a new slot": lambda m: setattr(m.slotted, "two", 2),
    "another class": lambda m: setattr(
        m.parts[0], "__class__", type("M", (Model,), {})
    ),
    "no data any more": lambda m: m.data.clear(),
    "an object among data": lambda m: m.data.append(Model()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_a_found_object_is_detected(
    change: Callable[[Model], None],
) -> None:
    model, reached = model_of_all_kinds(), object_graph.Reached()
    kinds = Model, Slotted
    list(
        object_graph.walk({"model": model}, lambda kind: kind in kinds, reached=reached)
    )
    assert reached.is_unchanged()
    assert reached.is_unchanged()
    change(model)
    assert not reached.is_unchanged()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.numbers.append(Model()),
        lambda m: m.numbers.__setitem__(0, Model()),
        lambda m: m.names.update(a=Model()),
        lambda m: m.pair[1].append(Model()),
        lambda m: m.data.append(Model()),
        lambda m: setattr(m, "numbers", (1, 2)),
    ],
)
def test_a_change_of_a_container_that_a_walk_skips_is_seen(change: Any) -> None:
    model, reached = (
        Model(numbers=[1], names={"a": 1}, pair=(1, [2])),
        object_graph.Reached(),
    )
    model.data = [0] * (object_graph.MANY + 1)

    def skips(value: Any) -> bool:
        """A container with a container is looked into."""
        if isinstance(value, list | dict | tuple):
            items = value.values() if isinstance(value, dict) else value
            return all(type(each) is int for each in items)
        return type(value) is int

    def is_model(kind: type) -> bool:
        return kind is Model

    list(object_graph.walk({"m": model}, is_model, skips=skips, reached=reached))
    model.data.append(0)
    assert reached.is_unchanged()
    change(model)
    assert not reached.is_unchanged()


class Tags(set[int]):
    """A set with attributes."""

    rate: object = 1.0


@pytest.mark.parametrize("items", [(), (1, 2)])
def test_the_attributes_of_a_set_are_places_and_its_items_are_none(
    items: tuple[int, ...],
) -> None:
    tags, reached = Tags(items), object_graph.Reached()
    tags.rate = Model(one=1)

    def found() -> dict[str, Any]:
        walked = object_graph.walk(
            {"tags": tags}, object_graph.is_user_code, reached=reached
        )
        return {each.path: each.value for each in walked}

    assert found() == {"tags": tags, "tags.rate": tags.rate, "tags.rate.one": 1}
    assert reached.is_unchanged()
    tags.add(3)
    assert not reached.is_unchanged()
    reached = object_graph.Reached()
    found()
    tags.rate = 2.0
    assert not reached.is_unchanged()


def test_an_object_that_the_program_drops_is_freed() -> None:
    model, reached = Model(array=np.zeros(2), none=None), object_graph.Reached()
    list(
        object_graph.walk({"model": model}, object_graph.is_user_code, reached=reached)
    )
    array = weakref.ref(model.array)
    model.array = None
    assert array() is None
    assert not reached.is_unchanged()


def test_the_containers_of_an_object_that_the_program_drops_are_freed() -> None:
    model, reached = Model(part=Model(names={"a": np.zeros(2)})), object_graph.Reached()
    list(
        object_graph.walk({"model": model}, object_graph.is_user_code, reached=reached)
    )
    array = weakref.ref(model.part.names["a"])
    del model.part
    assert array() is None
    assert not reached.is_unchanged()


class Dropping(dict[str, int]):
    """Calls a function when compared, as a thread of the program may run then."""

    drop: Callable[[], object] = staticmethod(lambda: None)

    def values(self) -> Any:
        self.drop()
        return super().values()


def test_an_object_that_is_dropped_during_a_comparison_is_a_change() -> None:
    """A new object may have the id of the dropped object."""
    names, reached = Dropping(a=1), object_graph.Reached()
    model = Model(names=names, array=np.zeros(2))
    list(
        object_graph.walk({"model": model}, object_graph.is_user_code, reached=reached)
    )
    assert reached.is_unchanged()
    names.drop = lambda: vars(model).pop("array", None)
    assert not reached.is_unchanged()


def test_contents_that_lead_nowhere_are_no_change() -> None:
    model, reached = model_of_all_kinds(), object_graph.Reached()
    list(
        object_graph.walk({"model": model}, object_graph.is_user_code, reached=reached)
    )
    model.array[0] = 1
    model.data.append(0)
    assert reached.is_unchanged()
