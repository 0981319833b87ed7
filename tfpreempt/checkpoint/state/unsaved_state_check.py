"""Warns once, by name, of state that a step changes and no commit holds.

A forgotten optimizer, a metric beside the model, `self.n += 1`, `losses.append(loss)`:
after a restart such state starts from scratch without an error. So the values that a
step function reaches are compared before and after one call; a value that changed and
is not saved is named.

A step reaches objects by its arguments, its closure, the globals that its code names,
the object whose method it is, and the functions that it calls. No function is called.
Values of Python and NumPy are compared here. Of the objects of a framework that the
program has imported, an adapter knows the values ("values" in `core/frameworks.py`).

Values alone do not distinguish a count of steps from the newest loss: both are replaced
in each step. So the source is read. Rejected: bytecode, which each version of Python
changes; and the variables that a tf.function captured, because their names ("Variable")
name nothing in the program, and the closure holds them too.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import dataclasses
import functools
import inspect
import itertools
import logging
import random
import textwrap
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tfpreempt.checkpoint.state.state import REGISTRY, State, StateRegistry
from tfpreempt.core import frameworks, reach
from tfpreempt.core.reach import Place

_log = logging.getLogger(__name__)

_SAMPLES = 1 << 16  # of a larger variable or array this many elements are compared
_SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic)
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)

_NOT_CHECKED = (
    "tfpreempt: cannot see what the step changes, so state that a restart would lose "
    "is not named"
)
_ADVICE = "Put them into a named State (tfpreempt.states)."

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


class Values(Protocol):
    """The questions to the adapter of a framework, which is a module.

    Attributes:
        SAVED_WHOLE: classes of objects whose attributes a save of them writes.
        REPLACED: classes of values that cannot change, as numbers and strings cannot: a
            step puts another value in the place.
        ADVICE: where the user is to put what no commit holds.
    """

    SAVED_WHOLE: tuple[type, ...]
    REPLACED: tuple[type, ...]
    ADVICE: str

    def saved(self, checkpoint: Any) -> tuple[list[Any], list[Any]]:
        """Returns the objects and variables that a save of a checkpoint writes, and
        those objects among them of which the save writes the attributes.

        Args:
            checkpoint: as the user gave it; None for named States alone.
        """
        ...

    def variables(self, value: Any) -> Sequence[Any]:
        """Returns the variables of an object of the framework; none of another one."""
        ...

    def sample(self, thing: Any, size: int) -> np.ndarray[Any, Any] | None:
        """Returns about `size` elements of a variable, or of a value in REPLACED that
        is large; None of other things."""
        ...

    def restarts(self, iterator: Any) -> bool:
        """Returns whether an object is an iterator that has a position to save."""
        ...

    def advice_on_iterators(self, unread: Mapping[str, Any]) -> str:
        """Returns what happens to iterators that no commit holds, and what to do."""
        ...


@dataclasses.dataclass(eq=False)
class UnsavedStateCheck:
    """Compares values before and after a call of each step function. Main thread.

    Never raises.

    Args:
        checkpoint: what a save writes; None for named States alone.
        registry: the named States that are saved.
    """

    checkpoint: Any
    registry: StateRegistry = REGISTRY
    # The functions that were checked, by identity; the names in warnings so far; and
    # the call that is under way, with the values before the call.
    _functions: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False)
    _named: set[str] = dataclasses.field(default_factory=set, init=False)
    _call: _Call | None = dataclasses.field(default=None, init=False)

    def before_call(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Notes the values before a call that is not the first one.

        The first call of a step traces the step and makes variables.
        """
        key = _identity(function)
        if key in self._functions:
            return
        self._functions[key] = function
        with _errors_logged():
            call = functools.partial(function, *args, **kwargs)
            values: list[Values] = frameworks.adapters("values")
            self._call = _Call(call, values, self._saved(values))

    def after_call(self) -> None:
        """Warns of the values that the call changed and no commit holds."""
        call, self._call = self._call, None
        if call is None:
            return
        with _errors_logged():
            changed, unread = call.changed(), call.unread
            _warn(
                [name for name in changed if name not in self._named],
                {name: it for name, it in unread.items() if name not in self._named},
                call.values,
            )
            self._named.update(changed, unread)

    def _saved(self, values: Sequence[Values]) -> set[Any]:
        """Returns the keys of the values that a commit holds."""
        roots: list[Any] = []
        for state in self.registry.in_order():
            roots += [state, state.save]
        keys: set[Any] = set()
        whole: tuple[type, ...] = (State,)
        for framework in values:
            whole += framework.SAVED_WHOLE
            saved, with_attributes = framework.saved(self.checkpoint)
            keys |= set(map(id, saved))
            roots += with_attributes
        named = {str(number): root for number, root in enumerate(roots)}
        for place in reachable(named, functools.partial(_is_saved_with, whole)):
            keys |= {id(place.value), (id(place.owner), place.key)}
            keys |= set(map(id, _variables(place.value, values)))
        return keys


@contextlib.contextmanager
def _errors_logged() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - of an object of the user's
        _log.warning(_NOT_CHECKED, exc_info=error)


def _is_searched(kind: type) -> bool:
    """Whether the program has the class, and its objects do not save themselves."""
    return reach.is_of_program(kind) and not issubclass(kind, State)


def _is_saved_with(whole: tuple[type, ...], kind: type) -> bool:
    """Whether a State that holds an object of a class may save what lies in the object.

    By the class: to compare a variable may read it, and for an ON_READ one that is a
    collective that no other worker takes part in.
    """
    return issubclass(kind, whole) or reach.is_of_program(kind)


def _identity(function: Any) -> Any:
    """What tells a step from others; a method is a new object each time."""
    if isinstance(function, types.MethodType):
        return id(function.__self__), id(function.__func__)
    return id(function)


class _Call:
    """One call of a step, with the values before the call.

    Attributes:
        values: the adapters of the frameworks.
        unread: the iterators that start from the beginning after a restart, by name.
    """

    def __init__(
        self,
        call: functools.partial[Any],
        values: Sequence[Values],
        saved: set[Any],
    ) -> None:
        self.values = values
        self._roots = {"": call}
        places = reachable(self._roots, _is_searched)
        self._updated = updated_keys(places)
        self._before = {  # the place and the thing keep their ids in use
            key: (place, thing, self._mark(thing))
            for key, (place, thing) in self._things(places).items()
            if key not in saved
        }
        self.unread = {
            place.path: place.value
            for place in places
            if id(place.value) not in saved
            if any(each.restarts(place.value) for each in values)
        }

    def changed(self) -> list[str]:
        """Returns the names of the values that are others now."""
        things = self._things(reachable(self._roots, _is_searched))
        changed = {
            id(things[key][0]): things[key][0].path
            for key, (_, _, mark) in self._before.items()
            if key in things and self._mark(things[key][1]) != mark
        }
        counts = collections.Counter[str]()
        names = []
        for path in changed.values():
            counts[path] += 1
            names.append(path if counts[path] == 1 else f"{path} ({counts[path]})")
        return names

    def _things(self, places: Iterable[Place]) -> dict[Any, tuple[Place, Any]]:
        """Returns the things that may change, and their places: by the identity of the
        thing, or by the place where another value replaces the old one."""
        replaced = sum((each.REPLACED for each in self.values), _SCALARS)
        found: dict[Any, tuple[Place, Any]] = {}
        for place in places:
            value = place.value
            if not isinstance(value, replaced):
                for thing in self._mutable(place):
                    found.setdefault(id(thing), (place, thing))
            elif is_updated(place, self._updated):
                found.setdefault((id(place.owner), place.key), (place, value))
        return found

    def _mutable(self, place: Place) -> Sequence[Any]:
        """Returns the things in a place that a step may change."""
        value = place.value
        if isinstance(value, np.ndarray):
            is_memory = value.flags.writeable and not isinstance(value, np.memmap)
            return [value] if is_memory else []
        if isinstance(value, reach.GROWING):
            kind: type = type(place.owner)
            return [] if reach.is_set_by_library(kind, place.key) else [value]
        is_generator = isinstance(value, _GENERATORS)
        return [value] if is_generator else _variables(value, self.values)

    def _mark(self, thing: Any) -> Any:
        """Returns a value that is equal as long as the thing is; of large things a
        sample."""
        if isinstance(thing, np.random.Generator):
            return repr(thing.bit_generator.state)
        if isinstance(thing, np.random.RandomState):
            return repr(thing.get_state())
        if isinstance(thing, random.Random):
            return hash(thing.getstate())
        if isinstance(thing, reach.GROWING):
            return len(thing)  # what else may change in it has a place of its own
        if isinstance(thing, _SCALARS):
            return type(thing), repr(thing)
        if isinstance(thing, np.ndarray):
            return _mark_of_array(thing)
        for each in self.values:
            if (sample := each.sample(thing, _SAMPLES)) is not None:
                return _mark_of_array(sample)
        return type(thing), repr(thing)


def _variables(value: Any, values: Sequence[Values]) -> Sequence[Any]:
    """Returns the variables of an object, of whatever framework."""
    return [variable for each in values for variable in each.variables(value)]


def _mark_of_array(array: np.ndarray[Any, Any]) -> Any:
    sample = np.asarray(array.flat[:: max(1, array.size // _SAMPLES)])
    if sample.dtype.hasobject:
        return array.shape, repr(sample.tolist())
    return array.shape, zlib.crc32(sample.tobytes())


def _warn(
    changed: Sequence[str], unread: Mapping[str, Any], values: Sequence[Values]
) -> None:
    problems = []
    if changed:
        advice = " ".join(each.ADVICE for each in values) or _ADVICE
        problems.append(
            f"The step changes what no commit holds: {', '.join(changed)}. A restarted "
            f"run begins with these anew. {advice}"
        )
    if unread:
        problems.append(
            f"The step reads from {', '.join(unread)}, and no commit holds the "
            "position in these data."
        )
    for each in values:
        mine = {name: it for name, it in unread.items() if each.restarts(it)}
        if mine:
            problems.append(each.advice_on_iterators(mine))
    if problems:
        _log.warning("tfpreempt: %s", " ".join(problems))
