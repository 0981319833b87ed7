"""Finds the objects that a training step can reach, and the numbers that it updates.

A step reaches objects by its arguments, its closure, the globals that its code names,
the object whose method it is, and the functions that it calls. No function is called.

Values alone do not tell a count of steps from the newest loss: both are replaced in
each step. So the source is read. Rejected: bytecode, which each version of Python
changes; and the variables that a tf.function captured, because their names ("Variable")
name nothing in the program, and the closure holds them too.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tfpreempt.core import reach
from tfpreempt.core.reach import Place

_ANY_ITEM = ("item", ...)  # whose index or dict key is not in the source
_MOST_PLACES = 20_000


def reachable(roots: Mapping[str, Any], enters: Callable[[type], bool]) -> list[Place]:
    """Returns the places that objects and functions reach, nearest first.

    Only the program's own functions are looked into, and only those methods of an
    object that one of these functions names.

    Args:
        roots: objects and functions, by name; a `functools.partial` stands for a call.
        enters: whether to look into the attributes of objects of a class.
    """
    found = reach.walk(roots, enters, also=_Functions().places_below)
    return list(itertools.islice(found, _MOST_PLACES))


class _Functions:
    """The functions of one walk: which names their code uses."""

    def __init__(self) -> None:
        self._names = {"__call__"}
        self._kinds: dict[type, None] = {}  # of the program's objects, in order

    def places_below(self, value: Any) -> Iterator[Place]:
        """Yields the places that a function, or a method of an object, names."""
        if isinstance(value, functools.partial):
            for name, argument in _arguments(value).items():
                yield Place(path=name, value=argument)
            yield Place(path="self", value=value.func)
        elif isinstance(value, types.MethodType):
            owner: Any = value.__self__
            if type(owner).__name__ == "TfMethodTarget":  # a tf.function's stand-in
                owner = owner.target
            yield Place(path="", value=functools.partial(value.__func__, owner))
        elif hasattr(type(value), "python_function"):  # a tf.function
            yield Place(path="", value=inspect.unwrap(value.python_function))
        elif _is_of_program(value):
            yield from self._named_by(value)
        elif reach.is_of_program(type(value)) and type(value) not in self._kinds:
            self._kinds[type(value)] = None
            yield from _methods([type(value)], self._names)

    def _named_by(self, function: types.FunctionType) -> Iterator[Place]:
        code = function.__code__
        cells = function.__closure__ or ()
        for name, cell in zip(code.co_freevars, cells, strict=True):
            if cell != types.CellType():  # the name is assigned
                yield Place(path=name, value=cell.cell_contents, owner=cell, key=name)
        names = _names(code)
        yield from _globals(names, function.__globals__)
        new, self._names = names - self._names, names | self._names
        yield from _methods(self._kinds, new)


def _arguments(call: functools.partial[Any]) -> dict[str, Any]:
    """Returns the arguments of a call by the names of the parameters."""
    try:
        signature = inspect.signature(call.func)
        return signature.bind_partial(*call.args, **call.keywords).arguments
    except (TypeError, ValueError):  # of a function in C, or of other parameters
        return {"args": call.args, **call.keywords}


def _names(code: types.CodeType) -> set[str]:
    """Returns the names of globals and attributes in code and its inner functions."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _globals(
    names: set[str],
    variables: Mapping[str, Any],
    prefix: str = "",
    above: Sequence[types.ModuleType] = (),
) -> Iterator[Place]:
    """Yields those globals of a module, and of the modules in it, that code names."""
    for name in sorted(names & variables.keys()):
        path, value = f"{prefix}{name}", variables[name]
        if not isinstance(value, types.ModuleType):
            yield Place(path=path, value=value, owner=variables, key=name)
        elif reach.is_module_of_program(value.__name__) and value not in above:
            yield from _globals(names, vars(value), f"{path}.", (*above, value))


def _methods(kinds: Iterable[type], names: Iterable[str]) -> Iterator[Place]:
    for kind, name in itertools.product(list(kinds), sorted(names)):
        method = inspect.getattr_static(kind, name, None)
        method = method.fget if isinstance(method, property) else method
        if isinstance(method, types.FunctionType) or hasattr(method, "python_function"):
            yield Place(path=name, value=method)


def updated_keys(places: Iterable[Place]) -> set[Any]:
    """Returns the keys of places whose new value functions compute from the old one.

    `n += 1` and `n = f(n)` do, `loss = f(x)` does not. Functions without source, such
    as those that were typed at a prompt, are passed over.

    Args:
        places: where the functions are found.
    """
    keys = set()
    for function in {place.value for place in places if _is_of_program(place.value)}:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, SyntaxError, TypeError):  # no source, or a lambda's line
            continue
        outer = set[str]()
        for node in ast.walk(tree):
            match node:
                case ast.Global(names) | ast.Nonlocal(names):
                    outer.update(names)
                case ast.AugAssign(target=target):
                    keys.add(_key(target, outer))
                case ast.Assign(targets=[target], value=value):
                    if ast.unparse(target) in map(ast.unparse, ast.walk(value)):
                        keys.add(_key(target, outer))
    return keys


def is_updated(place: Place, keys: set[Any]) -> bool:
    """Returns whether the key of a place is one of `updated_keys`."""
    if isinstance(place.owner, dict | list) and place.path.endswith("]"):
        return bool(keys & {("item", place.key), _ANY_ITEM})
    return place.key in keys


def _key(target: ast.expr, outer: set[str]) -> Any:
    match target:
        case ast.Name(name):
            return name if name in outer else ""  # a local variable is no state
        case ast.Attribute(attr=name):
            return name
        case ast.Subscript(slice=ast.Constant(key)):
            return "item", key
    return _ANY_ITEM


def _is_of_program(value: Any) -> bool:
    is_function = isinstance(value, types.FunctionType)
    return is_function and reach.is_module_of_program(value.__module__ or "")
