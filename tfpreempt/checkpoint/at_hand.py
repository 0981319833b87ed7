"""What a function has at hand, and which names it changes: a walk over Python code.

A training step gets at what it trains by its arguments, its closure, the globals that
its code names, the object that it is a method of, and the functions that it calls.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfpreempt.checkpoint.state import State
from tfpreempt.core import reach
from tfpreempt.core.reach import Place

_ROUNDS = 8  # of methods that call methods of what other methods hold
_MOST_PLACES = 20_000
_ANY_ITEM = object()


class AtHand:
    """The places that a function reaches, and what its code does to them.

    Only code of the program itself is read, and nothing is called.

    Args:
        function: a function, a method, a partial, a tf.function or a callable object.
        args: what it is called with.
        kwargs: likewise.

    Attributes:
        places: what is at hand, the shortest way to it first.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._roots: dict[str, Place] = {}
        self._read: set[types.FunctionType] = set()
        self._names: set[str] = set()  # that it uses
        self._changed: set[Any] = set()  # names, and keys of items
        self._call(function, args, kwargs)
        for _ in range(_ROUNDS):
            known = len(self._read)
            roots = {path: place.value for path, place in self._roots.items()}
            found = itertools.islice(reach.walk(roots, _may_hold), _MOST_PLACES)
            self.places = [
                each if each.owner is not None else self._roots[each.path]
                for each in found
            ]
            for place in self.places:
                self._read_methods(place.value)
            if len(self._read) == known:
                break

    def changes(self, place: Place) -> bool:
        """Whether a function reads what lies there, then assigns it anew: `n += 1`."""
        keys = {place.key}
        if isinstance(place.owner, dict | list) and place.path.endswith("]"):
            keys = {("item", place.key), _ANY_ITEM}
        return bool(keys & self._changed)

    # --- what it names ---------------------------------------------------------------

    def _call(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        if isinstance(function, functools.partial):
            kwargs = {**function.keywords, **kwargs}
            self._call(function.func, (*function.args, *args), kwargs)
        elif hasattr(type(function), "python_function"):  # a tf.function
            self._call(inspect.unwrap(function.python_function), args, kwargs)
        elif isinstance(function, types.MethodType):
            holder: Any = function.__self__
            if type(holder).__name__ == "TfMethodTarget":  # a tf.function's stand-in
                holder = holder.target
            self._call(function.__func__, (holder, *args), kwargs)
        elif reach.is_of_program(type(function)):
            self._call(type(function).__call__, (function, *args), kwargs)
        else:
            code = getattr(function, "__code__", None)
            names = code.co_varnames[: code.co_argcount] if code is not None else ()
            self._bind(names, args, kwargs)
            is_new = code is not None and function not in self._read
            if is_new and reach.is_module_of_program(function.__module__):
                self._read.add(function)
                self._read_function(function)

    def _bind(
        self, names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        others = (f"args[{number}]" for number in itertools.count())
        given = zip(itertools.chain(names, others), args, strict=False)
        known = {id(place.value) for place in self._roots.values()}
        for name, value in {**dict(given), **kwargs}.items():
            if id(value) not in known:
                self._find(Place(path=name, value=value))

    def _read_function(self, function: types.FunctionType) -> None:
        code, held = function.__code__, function.__globals__
        named = self._read_code(code)
        places = [
            Place(path=name, value=cell.cell_contents, owner=cell, key=name)
            for name, cell in zip(
                code.co_freevars, function.__closure__ or (), strict=True
            )
            if cell != types.CellType()  # it was assigned
        ]
        for name in sorted(named & held.keys()):
            places.append(Place(path=name, value=held[name], owner=held, key=name))
        for place in sorted(places, key=lambda each: _is_function(each.value)):
            self._find(place)

    def _find(self, place: Place) -> None:
        value = place.value
        if isinstance(value, types.ModuleType):
            if reach.is_module_of_program(value.__name__):
                held = vars(value)
                for name in sorted(self._names & held.keys()):
                    path = f"{place.path}.{name}"
                    self._find(Place(path=path, value=held[name], owner=held, key=name))
        elif _is_function(value):
            self._call(value, (), {})
        else:
            path, numbers = place.path, itertools.count(2)
            while path in self._roots and not _is_same(self._roots[path], place):
                path = f"{place.path} ({next(numbers)})"
            self._roots.setdefault(path, dataclasses.replace(place, path=path))

    def _read_methods(self, value: Any) -> None:
        """A function, or an object's methods, as far as the code names them."""
        if _is_function(value):
            self._call(value, (), {})
        if not reach.is_of_program(type(value)):
            return
        for name in sorted(self._names):
            method = inspect.getattr_static(type(value), name, None)
            if isinstance(method, property):
                method = method.fget
            if _is_function(method):
                self._call(method, (), {})

    # --- code ------------------------------------------------------------------------

    def _read_code(self, code: types.CodeType) -> set[str]:
        """Notes what it uses and changes; returns the globals that it names."""
        named: set[str] = set()
        read: set[Any] = set()
        before: list[dis.Instruction] = []
        for each in dis.get_instructions(code):
            kind, _, what = each.opname.partition("_")
            if what in ("GLOBAL", "NAME"):
                named.add(each.argval)
            if what in ("GLOBAL", "NAME", "DEREF", "ATTR", "METHOD"):
                self._names.add(each.argval)
                self._note(kind, each.argval, read)
            elif each.opname in ("BINARY_SUBSCR", "STORE_SUBSCR"):
                # In `x[key] += 1` the key is copied first, and swapped later.
                is_augmented = before[-1].opname == "COPY"
                key = before[-3 if is_augmented else -1]
                is_known = key.opname == "LOAD_CONST"
                if is_augmented or is_known:
                    item = ("item", key.argval) if is_known else _ANY_ITEM
                    self._note(kind, item, read)
                if is_augmented:
                    self._note("STORE", item, read)
            before.append(each)
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                named |= self._read_code(inner)
        return named

    def _note(self, kind: str, key: Any, read: set[Any]) -> None:
        if kind != "STORE":
            read.add(key)
        elif key in read:
            self._changed.add(key)


def _may_hold(value: Any) -> bool:
    """Whether to look into an object: one of the program that does not save itself."""
    return reach.is_of_program(type(value)) and not isinstance(value, State)


def _is_same(one: Place, other: Place) -> bool:
    return one.value is other.value and one.owner is other.owner


def _is_function(value: Any) -> bool:
    kinds = (types.FunctionType, types.MethodType, functools.partial)
    return isinstance(value, kinds) or hasattr(type(value), "python_function")
