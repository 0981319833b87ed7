"""What a step changes and no commit holds: told once, by name.

A forgotten optimizer, a metric beside the model, `self.n += 1`, `losses.append(loss)`:
after a restart they begin anew, and nothing shows it. So what the step function has at
hand is compared before and after one call of it; what differs, and is not saved, is
named.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import types
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfpreempt.checkpoint.at_hand import AtHand
from tfpreempt.checkpoint.iterator_state import KEEP_SERVICE_OUT, reads_data_service
from tfpreempt.checkpoint.shuffle_seeds import parts
from tfpreempt.checkpoint.state import REGISTRY, State, StateRegistry
from tfpreempt.checkpoint.untracked import attach
from tfpreempt.checkpoint.variables import local_parts, walk
from tfpreempt.core import reach, seams
from tfpreempt.core.reach import Place

_log = logging.getLogger(__name__)

_SAMPLES = 1 << 16  # of a larger variable or array this many elements are compared
_SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic)
_SAVED_WHOLE = (State, tf.train.experimental.PythonState, tf.train.Checkpoint)
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)

_UNSEEN = (
    "tfpreempt: cannot see what the step changes, so what of it a restart would lose "
    "is not named"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """Something that a step may change.

    Attributes:
        path: what it is called.
        thing: kept alive, so that its id stays its own.
        mark: equal as long as its value is.
    """

    path: str
    thing: Any
    mark: Any


@dataclasses.dataclass(eq=False)
class Unsaved:
    """Watches a call of each step function. Main thread; never raises.

    Args:
        checkpoint: what a save writes; None for named States alone.
        registry: the named States that go along.
    """

    checkpoint: Any
    registry: StateRegistry = REGISTRY
    # The functions that were watched, by identity; what was named; and the call that is
    # under way, with what there was before it.
    _functions: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False)
    _named: set[str] = dataclasses.field(default_factory=set, init=False)
    _call: tuple[Any, Sequence[Any], Mapping[str, Any]] | None = dataclasses.field(
        default=None, init=False
    )
    _before: dict[Any, _Seen] = dataclasses.field(default_factory=dict, init=False)

    def look(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Before a call. The first one is not the one to watch: it traces, and makes
        variables."""
        key = _identity(function)
        if key in self._functions:
            return
        self._functions[key] = function
        try:
            hand, held = AtHand(function, args, kwargs), self._held()
            self._before = _seen(hand, lambda key: key not in held)
            self._call = function, args, kwargs
        except Exception as error:  # noqa: BLE001 - of an object of the user's
            _log.warning(_UNSEEN, exc_info=error)

    def compare(self) -> None:
        """After that call: warns of what it changed and no commit holds."""
        if self._call is None:
            return
        call, self._call = self._call, None
        before, self._before = self._before, {}
        try:
            hand, held = AtHand(*call), self._held()
            after = _seen(hand, lambda key: key in before and key not in held)
            changed = [
                seen.path
                for key, seen in after.items()
                if seen.mark != before[key].mark
            ]
            unread = {
                place.path: place.value
                for place in hand.places
                if _is_lost(place.value, held)
            }
        except Exception as error:  # noqa: BLE001 - of an object of the user's
            _log.warning(_UNSEEN, exc_info=error)
            return
        _warn(
            [name for name in dict.fromkeys(changed) if name not in self._named],
            {name: each for name, each in unread.items() if name not in self._named},
        )
        self._named.update(changed, unread)

    def _held(self) -> set[Any]:
        """The keys of what a commit takes along."""
        places: list[Place] = []
        roots: list[Any] = list(self.registry.in_order())
        for state in roots:
            places += AtHand(state.save, (), {}).places
        saved: list[tuple[str, Any]] = []
        if self.checkpoint is not None:
            saved += attach(self.checkpoint).own
            saved += walk(self.checkpoint)
        held: set[Any] = set()
        for _, obj in saved:
            held |= {id(obj), *map(id, local_parts(obj))}
            if isinstance(obj, tf.train.experimental.PythonState):
                roots.append(obj)
        own = {str(number): root for number, root in enumerate(roots)}
        places += reach.walk(own, _is_saved_with)
        for place in places:
            held |= {id(place.value), (id(place.owner), place.key)}
            held |= set(map(id, _variables(place.value)))
        return held


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


def _seen(hand: AtHand, wants: Callable[[Any], bool]) -> dict[Any, _Seen]:
    found: dict[Any, _Seen] = {}
    for place in hand.places:
        for key, thing in _things(hand, place):
            if wants(key) and key not in found:
                found[key] = _Seen(path=place.path, thing=thing, mark=_mark(thing))
    return found


def _things(hand: AtHand, place: Place) -> Iterator[tuple[Any, Any]]:
    """What lies in a place and may change: by its identity, or, where another value
    takes the place of the old one, by the place."""
    value = place.value
    if isinstance(value, np.ndarray):
        if value.flags.writeable and not isinstance(value, np.memmap):
            yield id(value), value
    elif isinstance(value, _GENERATORS):
        yield id(value), value
    elif isinstance(value, reach.GROWING):
        if not reach.is_set_by_library(place.owner, place.key):
            yield id(value), value
    elif isinstance(value, (*_SCALARS, tf.Tensor)):
        if hand.changes(place):
            yield (id(place.owner), place.key), value
    else:
        yield from ((id(part), part) for part in _variables(value))


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


def _is_lost(iterator: Any, held: set[Any]) -> bool:
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
