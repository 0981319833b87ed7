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
import hashlib
import json
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tfpreempt import errors
from tfpreempt.checkpoint.encoding import decode, encode
from tfpreempt.core import reach
from tfpreempt.keras.callbacks.state import CallbackStates

log = logging.getLogger(__name__)

_PLAIN = (bool, int, float, str, type(None), np.generic)
_CONTAINERS = (dict, list, tuple, collections.deque)
_WRAPPERS = ("keras", "tf_keras", "tensorflow")
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_HOLDING = ("variables", "reset_state", "call")  # of layers, metrics and losses
_LARGE = 1 << 24  # bytes; what has more is taken for data
_UNPLACED = (KeyError, IndexError, AttributeError, TypeError, ValueError)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One of them.

    Attributes:
        place: where it lies.
        owner: the path of what holds it.
        packed: JSON that it can be made of again; of what cannot, how it looks.
        arrays: the bytes of its arrays.
        problem: why it cannot be made again; None if it can.
    """

    place: reach.Place
    owner: str
    packed: str
    arrays: tuple[bytes, ...]
    problem: str | None

    @property
    def digest(self) -> bytes:
        """Equal where the values are, bit for bit."""
        found = hashlib.sha256(repr((self.packed, self.problem)).encode())
        for array in self.arrays:
            found.update(array)
        return found.digest()


class Attributes:
    """Those of one model, from the beginning of its fit. Main thread.

    Args:
        model: the model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._traced: set[str] = set()
        self._named: set[str] = set()
        self._at_start = self._digests()

    def capture(self) -> CallbackStates:
        """What has changed since the fit began; what cannot be saved is named, once."""
        header: list[Any] = []
        arrays: list[bytes] = []
        for path, value in self._take():
            if path in self._traced or value.digest == self._at_start.get(path):
                continue
            if value.problem is not None:
                self._name(path, value.problem)
                continue
            entry = {"owner": value.owner, "key": value.place.key}
            header.append({**entry, "value": value.packed, "arrays": len(value.arrays)})
            arrays += value.arrays
        return CallbackStates(header=header, arrays=tuple(arrays))

    def restore(self, states: CallbackStates) -> None:
        """Sets what `capture` gave."""
        owners = {place.path: place.value for place in self._walk()}
        left = iter(states.arrays)
        for entry in states.header:
            arrays = [next(left) for _ in range(entry["arrays"])]
            try:
                value = decode(json.loads(entry["value"]), arrays)
                _put(owners[entry["owner"]], entry["key"], value)
            except _UNPLACED as error:
                path = f"{entry['key']!r} of {entry['owner']}"
                self._name(path, f"there is no place for it: {error!r}")

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Takes back what the body, which only traces, does to them."""
        before = dict(self._take())
        yield
        for path, value in self._take():
            was = before.get(path)
            if was is None or was.problem is not None or was.digest == value.digest:
                continue
            owner, key = value.place.owner, value.place.key
            with contextlib.suppress(*_UNPLACED):  # a tuple's item: it is another tuple
                _put(owner, key, decode(json.loads(was.packed), was.arrays))

    def traced_by(self, step: Callable[..., Any], *args: Any) -> Any:
        """Calls a step for the first time; what it changes is made by its trace."""
        before = self._digests()
        try:
            return step(*args)
        finally:
            self._traced |= dict(self._digests().items() - before.items()).keys()

    def _name(self, path: str, why: str) -> None:
        if path not in self._named:
            self._named.add(path)
            log.warning(
                "tfpreempt: %s changes in training and does not come back after a "
                "restart: %s. Keep it in a tf.Variable or a tfpreempt.State.",
                path,
                why,
            )

    def _walk(self) -> Iterator[reach.Place]:
        return reach.walk({"model": self._model}, _enters)

    def _digests(self) -> dict[str, bytes]:
        return {path: value.digest for path, value in self._take()}

    def _take(self) -> Iterator[tuple[str, Value]]:
        paths: dict[int, str] = {}
        dealt_with: set[int] = set()  # containers, whole or not a user's
        for place in self._walk():
            owner, value = place.owner, place.value
            paths.setdefault(id(value), place.path)
            is_users = id(owner) not in dealt_with and _is_users(owner, place.key)
            if not is_users or reach.is_data(value) or _is_plain(value):
                if reach.is_container(value):
                    dealt_with.add(id(value))
                if is_users:
                    yield place.path, _packed(place, paths[id(owner)])


def _enters(value: Any) -> bool:
    kind: type = type(value)
    return any(hasattr(kind, n) for n in _HOLDING) or reach.is_of_program(kind)


def _is_users(owner: Any, key: Any) -> bool:
    """Whether an attribute is not one that Keras or TensorFlow sets themselves."""
    if owner is None:
        return False
    if reach.is_container(owner):
        return isinstance(key, str | int)
    kinds = type(owner).__mro__
    library = next((kind for kind in kinds if not reach.is_of_program(kind)), object)
    is_hidden = library is kinds[0] and key.startswith("_")
    return not is_hidden and key not in reach.set_by(library)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if reach.is_container(value) or isinstance(value, set | frozenset):
        return all(map(_is_plain, value))
    return isinstance(value, (*_PLAIN, *_GENERATORS, np.ndarray))


def _size(value: Any) -> int:
    """Bytes of its arrays."""
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    if reach.is_container(value):
        return sum(map(_size, value))
    return value.nbytes if isinstance(value, np.ndarray) else 0


def _packed(place: reach.Place, owner: str) -> Value:
    if reach.is_data(place.value) or _size(place.value) > _LARGE:
        why = f"more than {reach.MANY} items or {_LARGE >> 20} MiB are taken for data"
        return Value(place=place, owner=owner, packed="", arrays=(), problem=why)
    arrays: list[bytes] = []
    problem = None
    try:
        packed = json.dumps(encode(_bare(place.value), "it", arrays))
    except errors.SaveError as error:
        packed, problem = repr(_state_of(place.value)), str(error)
    return Value(
        place=place,
        owner=owner,
        packed=packed,
        arrays=tuple(arrays),
        problem=problem,
    )


def _bare(value: Any) -> Any:
    """A container without what TensorFlow or Keras have wrapped around it.

    Raises:
        SaveError: it is of a kind that would come back as another, such as Counter.
    """
    if reach.is_container(value):
        kind = type(getattr(value, "__wrapped__", value))
        is_wrapper = kind.__module__.partition(".")[0] in _WRAPPERS
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
