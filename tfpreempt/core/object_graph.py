"""Visits the objects reachable from Python objects, by attributes and containers.

TensorFlow and Keras find only values that are assigned to attributes of TensorFlow and
Keras objects. They do not find values in a list of a Keras 3 model, or in objects of
the user's classes. The functions of this module find such values too.
"""

from __future__ import annotations

import collections
import contextlib
import dis
import functools
import inspect
import itertools
import os
import pathlib
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from tfpreempt import errors

MANY = 10_000
"""A container with more items than this, all of them numbers, texts or arrays, counts
as data, see `is_data`."""
GROWING = (list, dict, set, collections.deque)
"""Containers whose number of items can change."""
_LEAVES = (bool, int, float, complex, str, bytes, type(None), np.generic, np.ndarray)
_CONTAINERS = (list, tuple, dict, collections.deque)
_SETS = (set, frozenset)
_HOLDING = ("variables", "reset_state", "call", "get_config")
"""Methods that identify layers, metrics, losses, optimizers and regularizers."""
_UNHELD = "TrackableReference"
"""Name of a TensorFlow class; a reference to its objects would keep variables alive
that the program has dropped."""
_STORE_ATTR = dis.opmap["STORE_ATTR"]
FRAMEWORKS = frozenset({"keras", "tf_keras", "tensorflow"})
"""Packages that count as libraries wherever they are: a user may have put their sources
on PYTHONPATH."""
_PACKAGES = {"site-packages", "dist-packages"}
_NOT_THE_PROGRAM = (
    os.path.join(os.path.dirname(os.path.abspath(errors.__file__)), ""),
    os.path.join(sysconfig.get_path("stdlib"), ""),
)


class ObjectPath(NamedTuple):
    """A position in the object graph, and the object there.

    The class is a tuple, because a walk creates tens of thousands of positions, and a
    tuple is created fastest.

    Attributes:
        path: path in Python's syntax, such as `model.parts['a'][0]`; equal in every run
            of a program.
        value: object at the path.
        owner: object or container that contains the value; None for a root.
        key: attribute name, index or dict key of the value in the owner.
    """

    path: str
    value: Any
    owner: Any = None
    key: Any = None


PartsOf = Callable[[Any], Iterable[Any]]
"""Function that returns the parts of an object: the values in the object, and their
dict keys or attribute names, but no list indexes."""


class Reached:
    """The objects, containers and sets found by a walk, with their attributes or items.

    `is_unchanged` tells later whether another walk would find something new. The
    objects are held by weak references where Python allows it, so that the program can
    delete them.
    """

    def __init__(self) -> None:
        self._is_whole = False  # whether the walk has ended, and no object was deleted
        # The objects, or weak references to them; their classes; and the functions that
        # return their parts.
        self._found: list[tuple[Any, type, PartsOf]] = []
        # `id()` of the first object and its parts, of the second object, and so on.
        self._ids: list[int] = []
        # References, so that no new object gets the id of a found object.
        self._held: dict[int, Any] = {}

    def add(self, value: Any, parts_of: PartsOf) -> None:
        """Adds an object, container or set.

        Args:
            value: the object.
            parts_of: function that returns the parts (attributes or items) of the
                object.
        """
        parts = [value, *parts_of(value)]
        ids = list(map(id, parts))
        self._held.update(zip(ids, parts, strict=True))
        self._ids += ids
        self._found.append((value, type(value), parts_of))

    def hold_weakly(self) -> None:
        """Replaces the objects by weak references; called at the end of the walk."""
        me = weakref.ref(self)

        def forget(_: Any) -> None:
            """Drops all records: a new object may get the id of the deleted object."""
            if (reached := me()) is not None:
                reached._is_whole, reached._found, reached._held = False, [], {}

        def weak(value: Any) -> Any:
            kind: type = type(value)
            return _Weak(value, forget) if kind.__weakrefoffset__ else value

        held = {
            number: weak(value)
            for number, value in self._held.items()
            if type(value).__name__ != _UNHELD
        }
        self._found = [
            (held.get(id(value), value), *more) for value, *more in self._found
        ]
        self._is_whole = True
        self._held = held  # without strong references, temporary objects can be deleted

    def is_unchanged(self) -> bool:
        """Returns whether a new walk would find the same objects at the same paths.

        The method ignores changes inside arrays, and inside objects whose attributes
        the walk has not visited.
        """
        with contextlib.suppress(RuntimeError):  # another thread changes a container
            # Most of the loop runs in C, because there are thousands of objects.
            parts = itertools.chain.from_iterable(self._objects_and_parts())
            are_same = list(map(id, parts)) == self._ids
            # Read `_is_whole` last: a thread may drop an object during the comparison.
            return are_same and self._is_whole
        return False

    def _objects_and_parts(self) -> Iterator[Iterable[Any]]:
        """Yields every object, alone, and then its current parts, up to an object that
        was deleted or has another class."""
        for value, kind, parts_of in self._found:
            now = value() if type(value) is _Weak else value
            if type(now) is not kind:
                return
            yield (now,)
            yield parts_of(now)


def _parts_function(value: Any) -> PartsOf:
    """Returns the function for the parts of a container or of another object."""
    if is_container(value):
        return _of_dict if isinstance(value, dict) else iter
    kind: type = type(value)
    has_slots = _slots_of(kind) or not hasattr(value, "__dict__")
    return _of_slotted if has_slots else _of_object


def _of_dict(value: dict[Any, Any]) -> Iterable[Any]:
    return itertools.chain(value, value.values())


def _of_object(value: Any) -> Iterable[Any]:
    return _of_dict(vars(value))  # faster than `attributes`


def _of_slotted(value: Any) -> Iterable[Any]:
    return _of_dict(attributes(value))


def _of_data(value: Any) -> Iterable[Any]:
    """Returns one part: the result of `is_data`. The items of such a container are too
    many to be compared."""
    return [is_data(value)]


class _Weak(weakref.ref[Any]):
    """A weak reference made by `Reached`; references of the program have other
    classes."""

    __slots__ = ()


def walk(
    roots: Mapping[str, Any],
    enters: Callable[[type], bool],
    *,
    skips: Callable[[Any], bool] = lambda value: False,
    also: Callable[[ObjectPath], Iterable[ObjectPath]] = lambda location: (),
    reached: Reached | None = None,
) -> Iterator[ObjectPath]:
    """Yields the roots and all objects that can be reached from them, in a fixed order.

    An object with several paths is yielded at each path. Its attributes or items are
    visited once, under its shortest path; if several paths are equally short, under a
    path without a leading underscore. The items of sets are not visited, because the
    order of a set differs between runs.

    Args:
        roots: objects to start from, by name.
        enters: function that returns whether to visit the attributes of objects of a
            class. The items of lists, tuples, dicts and deques are always visited,
            unless the container is data (see `is_data`).
        skips: function that returns whether to ignore a value, with all objects that
            are reached through the value; not called for roots.
        also: function that receives the first location of an object, and returns
            further locations that belong to the object; called once per object.
        reached: receives the objects found, and the containers ignored because of
            `skips`. Pass None together with `also`.
    """
    todo = collections.deque(ObjectPath(path=p, value=v) for p, v in roots.items())
    entered: dict[int, Any] = {}
    while todo:
        location = todo.popleft()
        yield location
        value = location.value
        if id(value) in entered:
            continue
        entered[id(value)] = value
        todo.extend(also(location))
        is_inside = is_container(value)
        if reached and isinstance(value, _SETS):
            reached.add(value, iter)
        if not is_inside and not enters(type(value)):
            continue
        is_whole = is_inside and is_data(value)
        # A tuple is not recorded, because its items cannot change.
        if reached and type(value) is not tuple:
            reached.add(value, _of_data if is_whole else _parts_function(value))
        items = [] if is_whole else _items(value)
        if not is_inside:
            items.sort(key=lambda item: item[0].startswith("_"))
        for number, (key, inner) in enumerate(items):
            if not skips(inner):
                suffix = _suffix(key, number) if is_inside else f".{key}"
                path = f"{location.path}{suffix}"
                todo.append(ObjectPath(path=path, value=inner, owner=value, key=key))
            elif reached and is_container(inner) and type(inner) is not tuple:
                is_whole = len(inner) > MANY and is_data(inner)
                reached.add(inner, _of_data if is_whole else _parts_function(inner))
    if reached:
        reached.hold_weakly()


def is_user_code(kind: type) -> bool:
    """Returns whether a class belongs to the program, not to Python or a library.

    An attribute of a class of the program is the user's state; an attribute of a
    library's class may be internal to the library.
    """
    return kind is types.SimpleNamespace or is_user_module(kind.__module__)


def is_user_function(value: Any) -> bool:
    """Returns whether a value is a Python function of the program."""
    is_function = isinstance(value, types.FunctionType)
    return is_function and is_user_module(value.__module__ or "")


@functools.cache
def may_have_state(kind: type) -> bool:
    """Returns whether objects of a class may have values that training changes: layers,
    metrics, losses, optimizers and regularizers of Keras, and objects of the program's
    own classes."""
    return any(hasattr(kind, name) for name in _HOLDING) or is_user_code(kind)


@functools.cache
def is_user_module(name: str) -> bool:
    """Returns whether a module belongs to the program; see `is_user_code`."""
    if name == "__main__":
        return True
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    package = name.partition(".")[0]
    if not file or package in FRAMEWORKS or file.startswith(_NOT_THE_PROGRAM):
        return False
    if _PACKAGES & set(file.split(os.sep)):
        return False
    is_package = pathlib.Path(file).stem == "__init__"
    above = pathlib.Path(file).parents[name.count(".") + is_package :]
    # `above` is empty if the module's name has more parts than the path of its file.
    return not above or package not in _installed_in(above[0])


@functools.cache
def _installed_in(folder: pathlib.Path) -> frozenset[str]:
    """Returns the names of the modules put into a folder by `pip install --target`."""
    names = set()
    for record in folder.glob("*.dist-info/RECORD"):
        with (
            contextlib.suppress(OSError),
            record.open(encoding="utf-8", errors="replace") as lines,
        ):
            names |= {line.partition("/")[0].partition(".")[0] for line in lines}
    return frozenset(names)


@functools.cache
def set_by(cls: type, *, after_init: bool = False) -> frozenset[str]:
    """Returns the names of attributes that methods of a class or its bases assign.

    Args:
        cls: the class.
        after_init: whether the methods `__init__` are left out.
    """
    names = (_set_in_body(each, after_init) for each in cls.__mro__)
    return frozenset[str]().union(*names)


def is_set_by_library(kind: type, key: Any) -> bool:
    """Returns whether a method of a library's class assigns the attribute `key`.

    The library's class is `kind`, or the first base class of `kind` that belongs to a
    library, in the order of `kind.__mro__`.
    """
    library = next(each for each in kind.__mro__ if not is_user_code(each))
    return key in set_by(library)


@functools.cache  # many classes share a base
def _set_in_body(cls: type, after_init: bool) -> frozenset[str]:
    left_out = vars(cls).get("__init__") if after_init else None
    found = [each for each in vars(cls).values() if each is not left_out]
    methods = map(inspect.unwrap, filter(callable, found))
    codes = (each.__code__ for each in methods if isinstance(each, types.FunctionType))
    return frozenset[str]().union(*map(_set_in, codes))


def _set_in(code: types.CodeType) -> set[str]:
    # Search the bytes of the code: `dis` would take a tenth of a second for the classes
    # of a Keras model.
    read = code.co_code
    operations, arguments = read[::2], read[1::2]

    def argument(at: int) -> int:
        """Returns an instruction's argument, with the high bits from EXTENDED_ARG."""
        is_long = at > 0 and operations[at - 1] == dis.EXTENDED_ARG
        return arguments[at] | (argument(at - 1) << 8 if is_long else 0)

    found = set()
    at = operations.find(_STORE_ATTR)
    while at >= 0:
        found.add(code.co_names[argument(at)])
        at = operations.find(_STORE_ATTR, at + 1)
    return found


def is_container(value: Any) -> bool:
    """Returns whether a value is a list, tuple, dict or deque."""
    return isinstance(value, _CONTAINERS)


@functools.cache
def may_be_container(kind: type) -> bool:
    """Returns whether `is_container` can be true for an object of a class.

    Also True for a class that defines `__class__`: its objects are proxies, and may
    claim to be a list or a dict.
    """
    is_proxy = any("__class__" in vars(base) for base in kind.__mro__[:-1])
    return is_proxy or issubclass(kind, _CONTAINERS)


def leaves(value: Any) -> Iterator[Any]:
    """Yields the items of nested containers; yields any other value itself."""
    if is_container(value) or isinstance(value, _SETS):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from leaves(inner)
    else:
        yield value


def is_data(value: Any) -> bool:
    """Returns whether a value is a large container of plain data, like a vocabulary.

    All items are numbers, texts, arrays or containers of these, and there are more than
    `MANY`. A walk through the items would take seconds and find no object.
    """
    if not is_container(value):
        return False
    count, inside = 0, {id(value): value}
    todo = [value]
    while todo:
        each = todo.pop()
        count += len(each)
        # Copy the items: a thread of the program may change the container.
        for inner in list(each.values() if isinstance(each, dict) else each):
            if isinstance(inner, _LEAVES) or id(inner) in inside:
                continue
            if not is_container(inner):
                return False
            inside[id(inner)] = inner
            todo.append(inner)
    return count > MANY


def _items(value: Any) -> list[tuple[Any, Any]]:
    """Returns the keys and values of a container, or the attributes of an object.

    The result is a copy, because a thread of the program may change the container.
    """
    if isinstance(value, dict):
        return list(value.items())
    if is_container(value):
        return list(enumerate(list(value)))
    return list(attributes(value).items())


def attributes(value: Any) -> dict[str, Any]:
    """Returns the attributes of an object, without calling properties."""
    found = {**getattr(value, "__dict__", {})}
    kind: type = type(value)
    # Do not use getattr: `__getattr__` may compute a value for an empty slot.
    for name, slot in _slots_of(kind):
        with contextlib.suppress(AttributeError):  # the slot is empty
            found[name] = slot.__get__(value)
    return found


def _suffix(key: Any, number: int) -> str:
    """Returns the subscript of an item in a container, such as "['a']" or "[0]"."""
    is_plain = isinstance(key, str | int)  # repr() of other types may have an address
    return f"[{key!r}]" if is_plain else f"[key {number}]"


@functools.cache
def _slots_of(kind: type) -> list[tuple[str, Any]]:
    return [
        (name, slot)
        for cls in kind.__mro__
        if "__slots__" in vars(cls)
        for name, slot in vars(cls).items()
        if isinstance(slot, types.MemberDescriptorType)
    ]
