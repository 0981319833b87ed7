"""Finds the values that functions of the program can reach.

A function reaches objects by its arguments and their default values, its closure, the
globals named in its code, the object of a bound method, and the functions that it
calls. The search calls no function.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from tfpreempt.core import object_graph
from tfpreempt.core.object_graph import ObjectPath

MAX_LOCATIONS = 20_000
"""Locations in the result of `reachable`."""
_IMPLICIT = {
    *("__call__", "__next__", "__iter__", "__getitem__", "__setitem__"),
    *("__enter__", "__exit__"),
}
"""Methods that code calls without their names."""


def reachable(
    roots: Mapping[str, Any],
    enters: Callable[[type], bool],
    called: Iterable[str] = (),
) -> list[ObjectPath]:
    """Returns the locations of the values that some objects and functions can reach.

    The nearest locations come first; at most 20,000 are returned. Only functions of the
    user's program are searched, not functions of libraries. A method of an object is
    searched only if the code of a searched function contains the method's name, also as
    a text: `getattr(hook, "after_step")()`.

    Args:
        roots: objects and functions at which the search starts, by name; a
            `functools.partial` stands for a call of a function.
        enters: function that receives a class, and returns whether to search the
            attributes of its objects.
        called: names of further methods that a library calls.
    """
    found = object_graph.walk(roots, enters, also=_Functions(called).locations_below)
    return list(itertools.islice(found, MAX_LOCATIONS))


class _Functions:
    """Finds the values that functions use, in one search: every call of `reachable`
    creates a new `_Functions`."""

    def __init__(self, called: Iterable[str] = ()) -> None:
        self._names = {*_IMPLICIT, *called}
        self._kinds: dict[type, None] = {}  # classes of the program's objects, in order

    def locations_below(self, location: ObjectPath) -> Iterator[ObjectPath]:
        """Yields the locations of the values that a function or a frame uses.

        For an object or a class of the program, yields the class attributes, and the
        methods whose names occur in the code of the functions searched so far. For
        other values, yields nothing.

        Args:
            location: location of a function, a call (`functools.partial`), a frame, or
                an object.
        """
        value = location.value
        if isinstance(value, types.FrameType):
            code = value.f_code
            if value.f_locals is not value.f_globals:
                for name, inner in dict(value.f_locals).items():
                    yield ObjectPath(path=name, value=inner, owner=code, key=name)
            yield from self._used(code, value.f_globals)
        elif isinstance(value, functools.partial):
            for name, argument in _arguments(value).items():
                yield ObjectPath(path=name, value=argument)
            yield ObjectPath(path="self", value=value.func)
        elif isinstance(value, types.MethodType):
            owner: Any = value.__self__
            # TensorFlow's wrapper for the object of a method that is a tf.function.
            if type(owner).__name__ == "TfMethodTarget":
                owner = owner.target
            yield ObjectPath(path="", value=functools.partial(value.__func__, owner))
        elif isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
            if not isinstance(value.__self__, types.ModuleType | type | None):
                # The program's name, such as `append` for `append = losses.append`.
                yield ObjectPath(path=location.path, value=value.__self__)
        elif hasattr(type(value), "python_function"):  # a tf.function
            yield ObjectPath(path="", value=inspect.unwrap(value.python_function))
        elif object_graph.is_user_function(value):
            yield from self._named_by(value)
        else:
            kind = value if isinstance(value, type) else type(value)
            if object_graph.is_user_code(kind) and kind not in self._kinds:
                self._kinds[kind] = None
                yield from _class_attributes(kind)
                yield from _methods([kind], self._names)

    def _named_by(self, function: types.FunctionType) -> Iterator[ObjectPath]:
        code = function.__code__
        cells = function.__closure__ or ()
        for name, cell in zip(code.co_freevars, cells, strict=True):
            if cell != types.CellType():  # the cell has a value
                yield ObjectPath(
                    path=name, value=cell.cell_contents, owner=cell, key=name
                )
        for name, value in _defaults(function).items():
            yield ObjectPath(path=name, value=value, owner=function, key=name)
        for name, value in vars(function).items():
            path = f"{function.__name__}.{name}"
            yield ObjectPath(path=path, value=value, owner=function, key=name)
        yield from self._used(code, function.__globals__)

    def _used(
        self, code: types.CodeType, variables: Mapping[str, Any]
    ) -> Iterator[ObjectPath]:
        """Yields the globals and the methods whose names occur in code."""
        names = _names(code)
        yield from _globals(_global_names(code), names, variables)
        names |= _texts(code.co_consts)
        new, self._names = names - self._names, names | self._names
        yield from _methods(self._kinds, new)


def _arguments(call: functools.partial[Any]) -> dict[str, Any]:
    """Returns the arguments of a call, by parameter name."""
    try:
        signature = inspect.signature(call.func)
        return signature.bind_partial(*call.args, **call.keywords).arguments
    except (TypeError, ValueError):  # a C function, or wrong arguments
        return {"args": call.args, **call.keywords}


def _defaults(function: types.FunctionType) -> dict[str, Any]:
    """Returns the default values of a function's parameters, by name."""
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return {**dict(zip(names, values, strict=True)), **(function.__kwdefaults__ or {})}


def _names(code: types.CodeType) -> set[str]:
    """Returns the names of globals and attributes in code and its inner functions."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _texts(constants: Iterable[Any]) -> set[str]:
    """Returns the texts in the constants of code and its inner functions."""
    found = set[str]()
    for each in constants:
        if isinstance(each, types.CodeType):
            found |= _texts(each.co_consts)
        elif isinstance(each, tuple | frozenset):
            found |= _texts(each)
        elif isinstance(each, str):
            found.add(each)
    return found


@functools.cache
def _global_names(code: types.CodeType) -> frozenset[str]:
    """Returns the names of globals in code and its inner functions. An attribute may
    have the name of a global: `self.losses` does not use the global `losses`."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    own = frozenset(
        each.argval
        for each in dis.get_instructions(code)
        if each.opname.endswith(("_GLOBAL", "_GLOBALS", "_NAME"))
    )
    return own.union(*map(_global_names, inner))


def _globals(
    found: Set[str],
    names: set[str],
    variables: Mapping[str, Any],
    prefix: str = "",
    above: Sequence[types.ModuleType] = (),
) -> Iterator[ObjectPath]:
    """Yields the locations of those globals of a module whose names occur in code.

    If such a global is a module of the program, the search continues in the module.

    Args:
        found: names of the globals of the module.
        names: names that occur in the code.
        variables: namespace of the module.
        prefix: beginning of the paths, such as "module.".
        above: modules through which the search came here; not searched again.
    """
    for name in sorted(found & variables.keys()):
        path, value = f"{prefix}{name}", variables[name]
        if not isinstance(value, types.ModuleType):
            yield ObjectPath(path=path, value=value, owner=variables, key=name)
        elif object_graph.is_user_module(value.__name__) and value not in above:
            inside = f"{path}.", (*above, value)
            yield from _globals(names, names, vars(value), *inside)


def _class_attributes(kind: type) -> Iterator[ObjectPath]:
    """Yields the locations of a class's attributes, without methods, properties and
    inner classes. Layers and models are callable, too."""
    for name, value in vars(kind).items():
        # A classmethod, a tf.function and a function of jax.jit are routines.
        is_code = inspect.isroutine(value) or inspect.isdatadescriptor(value)
        is_code = is_code or isinstance(value, type)
        if not is_code and not name.startswith("__"):
            path = f"{kind.__name__}.{name}"
            yield ObjectPath(path=path, value=value, owner=kind, key=name)


def _methods(kinds: Iterable[type], names: Iterable[str]) -> Iterator[ObjectPath]:
    for kind, name in itertools.product(list(kinds), sorted(names)):
        for method in _definitions(kind, name):
            yield ObjectPath(path=name, value=method)


def _definitions(kind: type, name: str) -> Iterator[Any]:
    """Yields the method of a class with a name, and the methods of base classes that
    the method calls by `super()`."""
    for base in kind.__mro__:
        if name not in vars(base):
            continue
        method: Any = vars(base)[name]
        if isinstance(method, classmethod | staticmethod):
            method = method.__func__
        method = method.fget if isinstance(method, property) else method
        function = inspect.unwrap(getattr(method, "python_function", method))
        if not isinstance(function, types.FunctionType):
            return
        yield method
        if "super" not in _names(function.__code__):
            return
