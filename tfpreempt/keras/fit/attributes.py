"""Plain Python values of a model that its training changes: counts, phases, lists.

They are attributes of the model, its layers, optimizers, losses and metrics, and of the
program's own objects in them. Only what has changed since the fit began is saved: what
a user edits in the program between two starts is not overwritten. What changes while a
step is traced is left out, because the next start traces it again.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tfpreempt import errors
from tfpreempt.checkpoint.encoding import readable
from tfpreempt.core import reach
from tfpreempt.keras.record import Encoded

log = logging.getLogger(__name__)

_CONTAINERS = (dict, list, tuple, collections.deque)
_PLAIN = (
    *(bool, int, float, str, type(None), np.generic, np.ndarray),
    *(random.Random, np.random.Generator, np.random.RandomState),
)
_HOLDING = ("variables", "reset_state", "call")  # of layers, metrics and losses
_LARGE = 1 << 24  # bytes; what has more is taken for data
_UNPLACED = (KeyError, IndexError, AttributeError, TypeError, ValueError)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One of them.

    Attributes:
        place: where it lies.
        owner: the path of what holds it.
        encoded: what it can be made of again; of what cannot, how it looks.
        problem: why it cannot be made again; None if it can.
    """

    place: reach.Place
    owner: str
    encoded: Encoded
    problem: str | None

    @property
    def digest(self) -> bytes:
        """Equal where the values are, bit for bit."""
        found = hashlib.sha256(repr((self.encoded.header, self.problem)).encode())
        for array in self.encoded.arrays:
            found.update(array)
        return found.digest()


class Attributes:
    """Those of one model, from the beginning of its fit. Main thread.

    Args:
        model: the model.
    """

    def __init__(self, model: Any) -> None:
        self._roots = {"model": model}
        self._traced: set[str] = set()
        self._named: set[str] = set()
        self._at_start = {path: value.digest for path, value in self._look()}

    def capture(self) -> Encoded:
        """What has changed since the fit began; what cannot be saved is named, once."""
        header: list[Any] = []
        arrays: list[bytes] = []
        for path, value in self._look():
            if path in self._traced or value.digest == self._at_start.get(path):
                continue
            if value.problem is not None:
                self._name(path, value.problem)
                continue
            place, found = [value.owner, value.place.key], value.encoded
            header.append([*place, found.header, len(found.arrays)])
            arrays += found.arrays
        return Encoded(header=header, arrays=tuple(arrays))

    def restore(self, saved: Encoded) -> None:
        """Sets what `capture` gave."""
        owners = {place.path: place.value for place in reach.walk(self._roots, _enters)}
        left = iter(saved.arrays)
        with readable("a fit"):
            found = [
                (owner, key, Encoded(header=head, arrays=(*itertools.islice(left, n),)))
                for owner, key, head, n in saved.header
            ]
        for owner, key, encoded in found:
            try:
                _put(owners[owner], key, encoded.value())
            except (*_UNPLACED, errors.CheckpointDamagedError) as error:
                why = f"there is no place for it: {error!r}"
                self._name(f"{key!r} of {owner}", why)

    def traced_by(
        self, step: Callable[..., Any], *args: Any, is_kept: bool = True
    ) -> Any:
        """Calls a step that is traced by it; what it changes is made by its trace.

        Args:
            step: what to call.
            args: for it.
            is_kept: whether the steps to come use this trace; if not, what it does is
                taken back, because the next trace does it once more.
        """
        before = dict(self._look())
        try:
            return step(*args)
        finally:
            for path, value in self._look():
                was = before.get(path)
                if was is not None and was.digest == value.digest:
                    continue
                if is_kept:
                    self._traced.add(path)
                elif was is not None and was.problem is None:
                    # Not a tuple's item: it is another tuple.
                    with contextlib.suppress(*_UNPLACED):
                        _put(value.place.owner, value.place.key, was.encoded.value())

    def _name(self, path: str, why: str) -> None:
        if path not in self._named:
            self._named.add(path)
            log.warning(
                "tfpreempt: %s changes in training and does not come back after a "
                "restart: %s. Keep it in a tf.Variable or a tfpreempt.State.",
                path,
                why,
            )

    def _look(self) -> Iterator[tuple[str, Value]]:
        paths: dict[int, str] = {}
        dealt_with: set[int] = set()  # containers, whole or not a user's
        for place in reach.walk(self._roots, _enters):
            owner, value = place.owner, place.value
            paths.setdefault(id(value), place.path)
            is_users = id(owner) not in dealt_with and _is_users(owner, place.key)
            leaves = _leaves(value)
            if (
                not is_users
                or reach.is_data(value)
                or all(isinstance(leaf, _PLAIN) for leaf in leaves)
            ):
                if reach.is_container(value):
                    dealt_with.add(id(value))
                if is_users:
                    yield place.path, _taken(place, paths[id(owner)])


def _enters(value: Any) -> bool:
    kind: type = type(value)
    return _is_entered(kind)


@functools.cache
def _is_entered(kind: type) -> bool:
    return any(hasattr(kind, n) for n in _HOLDING) or reach.is_of_program(kind)


def _is_users(owner: Any, key: Any) -> bool:
    """Whether an attribute is not one that Keras or TensorFlow sets themselves."""
    if owner is None:
        return False
    if reach.is_container(owner):
        return isinstance(key, str | int)
    is_hidden = not reach.is_of_program(type(owner)) and key.startswith("_")
    return not is_hidden and not reach.is_set_by_library(owner, key)


def _leaves(value: Any) -> Iterator[Any]:
    """What is in a container, and in those within; another value itself."""
    if reach.is_container(value) or isinstance(value, set | frozenset):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    else:
        yield value


def _taken(place: reach.Place, owner: str) -> Value:
    encoded, problem = Encoded(header=""), None
    arrays = (leaf for leaf in _leaves(place.value) if isinstance(leaf, np.ndarray))
    if reach.is_data(place.value) or sum(each.nbytes for each in arrays) > _LARGE:
        size = f"{reach.MANY} items or {_LARGE >> 20} MiB"
        problem = f"more than {size} are taken for data"
    else:
        try:
            encoded = Encoded.of(_bare(place.value), "it")
        except errors.SaveError as error:
            encoded = Encoded(header=repr(_state_of(place.value)))
            problem = str(error)
    return Value(place=place, owner=owner, encoded=encoded, problem=problem)


def _bare(value: Any) -> Any:
    """A container without what TensorFlow or Keras have wrapped around it.

    Raises:
        SaveError: it is of a kind that would come back as another, such as Counter.
    """
    if reach.is_container(value):
        kind = type(getattr(value, "__wrapped__", value))
        is_wrapper = kind.__module__.partition(".")[0] in reach.FRAMEWORKS
        if kind not in _CONTAINERS and not is_wrapper:
            raise errors.SaveError(f"a {kind.__name__} would come back as another kind")
    if isinstance(value, dict):
        return {key: _bare(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_bare, value))
    if isinstance(value, list | collections.deque):
        return list(map(_bare, value))
    return value


def _state_of(value: Any) -> Any:
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    getter = getattr(value, "getstate", None) or getattr(value, "get_state", None)
    return value if getter is None else getter()


def _put(owner: Any, key: Any, value: Any) -> None:
    if reach.is_container(owner):
        owner[key] = value
        return
    now = getattr(owner, key, None)
    if isinstance(now, collections.deque):
        value = collections.deque(value, now.maxlen)
    setattr(owner, key, value)
