"""Warns once, by name, of state that a step changes and no commit holds.

A forgotten optimizer, a metric beside the model, `self.n += 1`, `losses.append(loss)`:
after a restart such state starts from scratch without an error. So the values that a
step function reaches are compared before and after one call; a value that changed and
is not saved is named.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import random
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfpreempt.checkpoint.iterator_state import KEEP_SERVICE_OUT, reads_data_service
from tfpreempt.checkpoint.shuffle_seeds import parts
from tfpreempt.checkpoint.state import REGISTRY, State, StateRegistry
from tfpreempt.checkpoint.step_inspection import (
    is_updated,
    reachable,
    updated_keys,
)
from tfpreempt.checkpoint.untracked import attach
from tfpreempt.checkpoint.variables import local_parts, walk
from tfpreempt.core import reach, seams
from tfpreempt.core.reach import Place

_log = logging.getLogger(__name__)

_SAMPLES = 1 << 16  # of a larger variable or array this many elements are compared
_SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic)
_SAVED_WHOLE = (State, tf.train.experimental.PythonState, tf.train.Checkpoint)
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)

_NOT_CHECKED = (
    "tfpreempt: cannot see what the step changes, so state that a restart would lose "
    "is not named"
)


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
            self._call = _Call(call, self._saved())

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
            )
            self._named.update(changed, unread)

    def _saved(self) -> set[Any]:
        """Returns the keys of the values that a commit holds."""
        roots: list[Any] = []
        for state in self.registry.in_order():
            roots += [state, state.save]
        saved: list[tuple[str, Any]] = []
        if self.checkpoint is not None:
            saved += attach(self.checkpoint).own
            saved += walk(self.checkpoint)
        keys: set[Any] = set()
        for _, obj in saved:
            keys |= {id(obj), *map(id, local_parts(obj))}
            if isinstance(obj, tf.train.experimental.PythonState):
                roots.append(obj)
        named = {str(number): root for number, root in enumerate(roots)}
        for place in reachable(named, _is_saved_with):
            keys |= {id(place.value), (id(place.owner), place.key)}
            keys |= set(map(id, _variables(place.value)))
        return keys


@contextlib.contextmanager
def _errors_logged() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - of an object of the user's
        _log.warning(_NOT_CHECKED, exc_info=error)


def _is_searched(value: Any) -> bool:
    """Whether to look into an object: one of the program that does not save itself."""
    return reach.is_of_program(type(value)) and not isinstance(value, State)


def _is_saved_with(value: Any) -> bool:
    """Whether a State that holds it may save what lies in it.

    By its kind: to compare a variable may read it, and for an ON_READ one that is a
    collective that no other worker takes part in.
    """
    return isinstance(value, _SAVED_WHOLE) or reach.is_of_program(type(value))


def _identity(function: Any) -> Any:
    """What tells a step from others; a method is a new object each time."""
    if isinstance(function, types.MethodType):
        return id(function.__self__), id(function.__func__)
    return id(function)


class _Call:
    """One call of a step, with the values before the call.

    Attributes:
        unread: the iterators that start from the beginning after a restart, by name.
    """

    def __init__(self, call: functools.partial[Any], saved: set[Any]) -> None:
        self._roots = {"": call}
        places = reachable(self._roots, _is_searched)
        self._updated = updated_keys(places)
        self._before = {  # the place and the thing keep their ids in use
            key: (place, thing, _mark(thing))
            for key, (place, thing) in _things(places, self._updated).items()
            if key not in saved
        }
        self.unread = {
            place.path: place.value for place in places if _restarts(place.value, saved)
        }

    def changed(self) -> list[str]:
        """Returns the names of the values that are others now."""
        places = reachable(self._roots, _is_searched)
        things = _things(places, self._updated)
        changed = {
            id(things[key][0]): things[key][0].path
            for key, (_, _, mark) in self._before.items()
            if key in things and _mark(things[key][1]) != mark
        }
        counts = collections.Counter[str]()
        names = []
        for path in changed.values():
            counts[path] += 1
            names.append(path if counts[path] == 1 else f"{path} ({counts[path]})")
        return names


def _things(places: Iterable[Place], updated: set[Any]) -> dict[Any, tuple[Place, Any]]:
    """Returns what may change, and where: by the thing's identity, or by the place
    where another value replaces the old one."""
    found: dict[Any, tuple[Place, Any]] = {}
    for place in places:
        value = place.value
        if not isinstance(value, (*_SCALARS, tf.Tensor)):
            for thing in _mutable(place):
                found.setdefault(id(thing), (place, thing))
        elif is_updated(place, updated):
            found.setdefault((id(place.owner), place.key), (place, value))
    return found


def _mutable(place: Place) -> Sequence[Any]:
    """Returns the things in a place that a step may change."""
    value = place.value
    if isinstance(value, np.ndarray):
        is_memory = value.flags.writeable and not isinstance(value, np.memmap)
        return [value] if is_memory else []
    if isinstance(value, reach.GROWING):
        return [] if reach.is_set_by_library(place.owner, place.key) else [value]
    return [value] if isinstance(value, _GENERATORS) else _variables(value)


def _variables(value: Any) -> Sequence[Any]:
    """The local tf.Variables of a variable, model, optimizer, metric or generator."""
    if found := local_parts(value):
        return found
    if isinstance(value, type):
        return []
    if hasattr(type(value), "variables"):
        try:
            all_of_it = value.variables
            many = all_of_it() if callable(all_of_it) else all_of_it
        except ValueError:  # a layer that is not built
            return []
        return [part for each in many for part in local_parts(each)]
    if isinstance(value, tf.random.Generator):
        return local_parts(value.state)
    return local_parts(getattr(value, "__dict__", {}).get("state"))


def _mark(thing: Any) -> Any:
    """Equal as long as the value is; of what is large a sample."""
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
    if not isinstance(thing, np.ndarray):
        flat = tf.reshape(thing, [-1])
        thing = flat[:: max(1, len(flat) // _SAMPLES)].numpy()
    sample = np.asarray(thing.flat[:: max(1, thing.size // _SAMPLES)])
    if sample.dtype.hasobject:
        return thing.shape, repr(sample.tolist())
    return thing.shape, zlib.crc32(sample.tobytes())


# --- iterators -----------------------------------------------------------------------


def _restarts(iterator: Any, held: set[Any]) -> bool:
    """Whether it is a dataset iterator that begins anew after a restart."""
    found = _datasets(iterator)
    if id(iterator) in held or not found or None in found:
        return False
    return not any(map(_begins_late, parts(*found)))


def _datasets(iterator: Any) -> list[Any]:
    """The datasets below a dataset iterator; none for another object."""
    if isinstance(iterator, tf.distribute.DistributedIterator):
        return [
            getattr(each, "iterator", each)._dataset for each in iterator._iterators
        ]
    if isinstance(iterator, tf.data.Iterator | tf.data.NumpyIterator):
        return [getattr(iterator, "_iterator", iterator)._dataset]
    return []


def _begins_late(dataset: Any) -> bool:
    """Whether a part of a pipeline leaves out what comes first: the steps before."""
    kind = type(dataset).__name__
    return kind == "_SkipDataset" or (kind == "_RangeDataset" and dataset._start != 0)


# --- words ---------------------------------------------------------------------------


def _warn(changed: Sequence[str], unread: Mapping[str, Any]) -> None:
    problems = []
    if changed:
        problems.append(
            f"The step changes what no commit holds: {', '.join(changed)}. A restarted "
            "run begins with these anew. Put variables, models, optimizers and metrics "
            "into the tf.train.Checkpoint; a metric of Keras 3 is no object for it: "
            "make it an attribute of a model that is there (model.mean = mean). "
            "Numbers, lists and arrays go into a named State (tfpreempt.states), or "
            "numbers into a tf.Variable."
        )
    if unread:
        is_theirs = any(map(_is_of_tensorflow, unread.values()))
        is_service = all(
            reads_data_service(*_datasets(each)) for each in unread.values()
        )
        problems.append(
            f"The step reads from {', '.join(unread)}, and no commit holds the "
            "position in these data. "
            + (
                f"{KEEP_SERVICE_OUT}."
                if is_service
                else "A restarted run reads them from the beginning. "
                + (_MAKE_OURS if is_theirs else "Put the iterator into the ")
                + "tf.train.Checkpoint, or let it begin behind what was read: "
                "iter(dataset.skip(handler.total_run_calls))."
            )
        )
    if problems:
        _log.warning("tfpreempt: %s", " ".join(problems))


def _is_of_tensorflow(iterator: Any) -> bool:
    """Whether TensorFlow made it for a strategy, so that nobody can save it."""
    is_distributed = isinstance(iterator, tf.distribute.DistributedIterator)
    return is_distributed and not isinstance(iterator, seams.trackable_base.Trackable)


_MAKE_OURS = (
    "TensorFlow cannot save a distributed iterator; make it with "
    "tfpreempt.data.distribute(dataset, strategy), which gives the same batches, and "
    "put it into the "
)
