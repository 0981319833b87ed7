"""The position in a PyDataset (Keras 3) or Sequence (tf_keras), saved as an index.

An interrupted epoch resumes with the remaining batches, in the original order. Keras
shuffles the indices when the first batch of an epoch is requested. Up to Keras 3.15 the
shuffle uses Python's global generator, so the state of the generator is saved; from
3.16 on the shuffle uses a generator seeded with the number of the epoch. This module
reads the batches in place of Keras, one pass at a time, so the order does not depend on
the number of workers.

A sequence may change its attributes between epochs, in the hooks `on_epoch_begin` and
`on_epoch_end`. If the sequence has the methods `get_state` and `set_state`, commits
contain its state. Without these methods, a restart calls the hooks again. If the
original call of a hook drew random numbers, the restart first sets the global random
generators to the states before the original call. A hook may also read other state,
such as the weights of the model at the end of that epoch. So commits contain checksums
of the attributes that the hooks have changed, and a restart names different attributes.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import logging
import multiprocessing.pool
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tfpreempt.checkpoint.state import data_order
from tfpreempt.checkpoint.state.data_order import Order
from tfpreempt.checkpoint.state.encoding import (
    check_bit_generator,
    decode,
    encode,
    readable,
)
from tfpreempt.checkpoint.state.unsaved_state_check import (
    GENERATORS,
    mark_of_array,
    mark_of_generator,
)
from tfpreempt.core import frameworks, object_graph
from tfpreempt.core.reachable_values import reachable
from tfpreempt.core.source_code import GLOBAL_GENERATORS, draws_globally
from tfpreempt.keras.callbacks.builtin_callbacks import has_hooks
from tfpreempt.keras.data.counted_dataset import CountedDataset
from tfpreempt.keras.data.position import Position, Tracker
from tfpreempt.keras.fit_protocol import Fit

log = logging.getLogger(__name__)

_KERAS = ("keras", "tf_keras", "builtins")
_PLAIN = (bool, int, float, str, type(None), np.generic)
_ITEMS = 1000  # items compared, of a list
_ELEMENTS = 1 << 16  # elements compared, of a tensor
HOOKS = ("on_epoch_begin", "on_epoch_end")
_UNSEEDED = (
    "the training data change between epochs (on_epoch_begin, on_epoch_end), and no "
    "random seed is set. If the data are shuffled there, a restarted run has another "
    "order in the interrupted epoch, and trains on some samples twice and on others "
    "not at all. Call keras.utils.set_random_seed() first, or give the class "
    "get_state() and set_state(state)"
)

_CHANGES = (
    "the training data have attributes, or draw from generators, that change "
    "outside of the data's own on_epoch_end: %s. After a restart, they have the "
    "initial values of the program, so batches that depend on them differ from an "
    "uninterrupted run. Derive each batch of __getitem__ from its index, and change "
    "attributes in on_epoch_end of the data only, or give the class get_state() and "
    "set_state(state)."
)
_OTHER_RESULTS = (
    "this restart has called the hooks of the training data (on_epoch_begin, "
    "on_epoch_end) again, and these attributes have other values than in the "
    "interrupted run: %s. The hooks read state that is no longer the same, such as the "
    "weights of the model, so the batches differ from an uninterrupted run. Give the "
    "class get_state() and set_state(state)."
)
_DRAWN = (
    "the training data are %s, which draws random numbers for each batch in the order "
    "in which batches are read. After a restart within an epoch, the order and the "
    "count of batches start again from the beginning, so the batches differ from an "
    "uninterrupted run. %s, or give the class get_state() and set_state(state)."
)
_DRAWING = {
    "Iterator": (
        "an iterator of ImageDataGenerator (total_batches_seen)",
        "Read images with keras.utils.image_dataset_from_directory or tfpreempt.data, "
        "and augment in layers of the model",
    ),
    "TimeseriesGenerator": (
        "a TimeseriesGenerator with shuffle=True",
        "Use keras.utils.timeseries_dataset_from_array with a seed",
    ),
}
"""Keras' own classes whose batches depend on more than the index: name and advice."""
_GLOBAL = (
    "Draw the random numbers of a batch from np.random.default_rng((seed, index)), not "
    "from the global generators of Python and NumPy"
)


class SequenceTracker(Tracker):
    """Saves the index of the next batch, and the calls of the sequence's hooks."""

    kind = "sequence"
    is_shared = True

    def __init__(self, fit: Fit, data: CountedDataset) -> None:
        super().__init__(fit, data)
        assert fit.sequence is not None
        self._options = fit.sequence
        self._sequence = fit.sequence.data
        if not fit.sequence.repeats:
            data.dataset = fit.distribute(self._pass)
        # The state of Python's generator from which the order of the pass is drawn, or
        # an int that seeds a new generator.
        self._shuffle_state: Any = None
        # The indices of this pass, in order; empty while unknown.
        self._order: list[int] = []
        # Calls as [hook, states of the generators before the call; None if nothing was
        # drawn].
        self._calls: list[list[Any]] = []
        # Calls since the epoch began, which Keras itself repeats after a restart.
        self._again: list[list[Any]] = []
        # Checksums of the attributes that the calls have changed, by name.
        self._results: dict[str, int] = {}
        # (number of calls, state of the sequence, checksums) at the beginning of the
        # epoch.
        self._before_epoch: tuple[int, Any, dict[str, int]] = (0, None, {})
        self._has_state = has_hooks(self._sequence)
        # A comparable value for each attribute, from the beginning of the epoch or the
        # newest call of a hook.
        self._marks: dict[str, Any] = {}
        self._are_changes_named = False
        # Random generators outside of the model: functions that read their states.
        self._generators: Mapping[str, Callable[[], Any]] | None = None
        if not self._has_state and (found := _drawing(self._sequence)) is not None:
            self._are_changes_named = True
            log.warning(_DRAWN, *found)
        for hook in HOOKS:
            if hasattr(fit.adapter, hook):
                self._watch(hook)
        mro = type(self._sequence).__mro__
        users = [k for k in mro if k.__module__.partition(".")[0] not in _KERAS]
        changes = any(hook in vars(kind) for hook in HOOKS for kind in users)
        if changes and not self._has_state and not fit.pipelines.is_seeded():
            log.warning("%s.", _UNSEEDED)

    def epoch_begins(self) -> None:
        state = encode(self._sequence.get_state()) if self._has_state else None
        self._before_epoch = (len(self._calls), state, dict(self._results))

    def epoch_ends(self) -> None:
        self._name_changes()
        self._marks = {}  # a callback may set attributes when the next epoch begins

    def begins(self, iterator: Any) -> None:
        self._mark()
        self._order = []
        epoch = getattr(self.fit.adapter, "_epoch", None)  # from Keras 3.16 on
        self._shuffle_state = random.getstate() if epoch is None else int(epoch)

    def save(self, iterator: Any, position: Position) -> Position:
        self._name_changes()
        calls, state, results = self._before_epoch
        more = {
            "shuffle": self._shuffle_state,
            "calls": self._calls[:calls],
            "again": self._calls[calls:],
            "state": state,
            "results": results,
        }
        order = self._fingerprint(position.batches)
        return dataclasses.replace(position, more=more, order=order)

    def _fingerprint(self, batches: int) -> Order:
        """Returns the fingerprint of the order of the first `batches` batches; empty if
        the order is unknown."""
        if not batches or len(self._order) < batches:
            return {}
        return {"permutation": data_order.of_indices(self._order[:batches])}

    def prepare(self, position: Position) -> Sequence[str]:
        more = position.more
        self._shuffle_state = more["shuffle"]
        self._calls, self._again = [*more["calls"]], [*more["again"]]
        if self._has_state:
            self._sequence.set_state(decode(more["state"]))
        else:
            for hook, generators in self._calls:
                with readable("model.fit"):  # else a commit could name any method
                    HOOKS.index(hook)
                set_generators(generators)
                getattr(self._sequence, hook, lambda: None)()
            self._compare_results(more.get("results", {}))
        if position.batches:
            rest = self._rest(position.batches)
            here = self._fingerprint(position.batches)
            data_order.check(position.order, here, "The batches of the training data")
            self.data.instead = self.fit.first_iterator, rest
        return ()

    def extend(self, position: Position, iterator: Any) -> None:
        self.begins(iterator)

    def _compare_results(self, saved: Mapping[str, int]) -> None:
        """Logs a warning with the attributes that differ from the interrupted run,
        after all hooks were called again.

        Args:
            saved: checksums of the interrupted run; empty in an earlier version.
        """
        now = _checksums(_marks(self._sequence))
        self._results = {name: now.get(name, 0) for name in saved}
        if other := sorted(name for name in saved if now.get(name) != saved[name]):
            log.warning(_OTHER_RESULTS, ", ".join(other))

    def _name_changes(self) -> None:
        """Logs a warning, once, with the attributes of the sequence that have changed
        since they were recorded."""
        before = self._marks
        now = self._current_marks() if before else {}
        changed = [name for name in before if now.get(name) != before[name]]
        if changed:
            self._are_changes_named = True
            self._marks = {}
            log.warning(_CHANGES, ", ".join(sorted(changed)))

    def _mark(self) -> None:
        """Records the attributes of the sequence."""
        if not self._has_state and not self._are_changes_named:
            if self._generators is None:
                self._generators = _generators_of(self._sequence, self.fit.model)
            self._marks = self._current_marks()

    def _current_marks(self) -> dict[str, Any]:
        states = {name: read() for name, read in (self._generators or {}).items()}
        return {**states, **_marks(self._sequence)}

    def _watch(self, hook: str) -> None:
        """Wraps a hook of the fit's data adapter, to record the calls of the hook."""
        inner: Callable[[], None] = getattr(self.fit.adapter, hook)

        def noted() -> None:
            self._name_changes()
            if self._again:
                set_generators(self._again.pop(0)[1])
            before, values = generators(), _checksums(_marks(self._sequence))
            inner()
            now = _checksums(_marks(self._sequence))
            changed = {n: now[n] for n in now if now[n] != values.get(n)}
            self._results |= changed
            attributes = vars(self._sequence)
            if any(isinstance(attributes.get(name), GENERATORS) for name in changed):
                self._generators = None  # the hook may have replaced a generator
            drew = encode(before) != encode(generators())
            self._calls.append([hook, before if drew else None])
            self._mark()

        setattr(self.fit.adapter, hook, noted)

    def _pass(self) -> Iterator[Any]:
        """Yields the batches of a pass over the data, in an order that is drawn as by
        Keras: at the first read, and up to Keras 3.15 from Python's generator."""
        state = self._shuffle_state
        shuffler = random.Random(state) if isinstance(state, int) else random
        yield from self._read(self._draw_order(shuffler), 0)

    def _rest(self, batches: int) -> Any:
        """Returns the dataset of the remaining batches of an epoch.

        Args:
            batches: number of batches already trained.
        """
        state = self._shuffle_state
        shuffler = random.Random(state if isinstance(state, int) else None)
        if not isinstance(state, int):
            shuffler.setstate(state)
        order = self._draw_order(shuffler)
        return self.fit.distribute(lambda: self._read(order, batches))

    def _draw_order(self, shuffler: Any) -> list[int] | None:
        """Returns the indices of a pass in order; None for an endless sequence, which
        is read in ascending order.

        Args:
            shuffler: random generator of Python.
        """
        if (length := self.fit.sequence_length) is None:
            return None
        self._order = [*range(length)]
        if self._options.shuffles:
            shuffler.shuffle(self._order)
        return self._order

    def _read(self, order: list[int] | None, batches: int) -> Iterator[Any]:
        """Yields the batches of a pass. Workers read ahead, if the user has requested
        workers.

        Keras' own workers cannot be used, because they do not stop after a pass: those
        of tf_keras begin another pass by themselves, if they are not stopped in time.

        Args:
            order: result of `_draw_order`.
            batches: number of batches at the beginning of the pass to leave out.
        """
        options, standardize = self._options, self.fit.adapter._standardize_batch
        left = itertools.count(batches) if order is None else iter(order[batches:])
        if options.workers < (1 if options.has_processes else 2):
            for index in left:
                yield standardize(self._sequence[index])
            return
        if options.has_processes:
            pool = multiprocessing.Pool(options.workers, _share, (self._sequence,))
            get: Callable[[int], Any] = _item
        else:
            pool = multiprocessing.pool.ThreadPool(options.workers)
            get = self._sequence.__getitem__
        with contextlib.closing(pool):
            first = itertools.islice(left, max(options.ahead, options.workers))
            waiting = collections.deque(pool.apply_async(get, (i,)) for i in first)
            while waiting:
                yield standardize(waiting.popleft().get())
                for index in itertools.islice(left, 1):
                    waiting.append(pool.apply_async(get, (index,)))


_shared: Any = None
"""In a process that reads batches: the sequence."""


def _share(sequence: Any) -> None:
    global _shared
    _shared = sequence


def _item(index: int) -> Any:
    return _shared[index]


def _drawing(sequence: Any) -> tuple[str, str] | None:
    """Returns a description of a sequence that draws random numbers for each batch, and
    advice: an entry of `_DRAWING`, or `_GLOBAL` with the name of the function that
    draws. None for other sequences."""
    for kind in type(sequence).__mro__:
        library, _, module = kind.__module__.partition(".")
        if library not in _KERAS or ".preprocessing." not in f".{module}":
            continue
        if kind.__name__ == "TimeseriesGenerator" and not sequence.shuffle:
            continue
        if kind.__name__ in _DRAWING:
            return _DRAWING[kind.__name__]
    called = ("__getitem__",)
    for location in reachable({"": sequence}, object_graph.is_user_code, called):
        function = location.value
        if object_graph.is_user_function(function) and draws_globally(function):
            return f"read by {function.__qualname__}", _GLOBAL
    return None


def _generators_of(sequence: Any, model: Any) -> dict[str, Callable[[], Any]]:
    """Returns the random generators of NumPy and Python from which a sequence may draw,
    and the SeedGenerators of Keras that are not in the model: functions that read their
    states, by name. Another warning names the global generators."""
    found = reachable({"": sequence}, object_graph.is_user_code, ("__getitem__",))
    states: dict[str, Callable[[], Any]] = {
        location.path.lstrip("."): functools.partial(mark_of_generator, location.value)
        for location in found
        if isinstance(location.value, GENERATORS)
        if not any(location.value is each for each in GLOBAL_GENERATORS)
    }
    for each in frameworks.adapters("values"):
        known = set(map(id, each.variables(model)))
        states |= {
            location.path.lstrip("."): functools.partial(_state, each, variable)
            for location in found
            for variable in each.variables(location.value)
            if "seed_generator" in str(getattr(variable, "name", ""))
            if id(variable) not in known
        }
    return states


def _state(values: Any, variable: Any) -> list[int]:
    state: list[int] = values.sample(variable, 8).tolist()
    return state


def _marks(sequence: Any) -> dict[str, Any]:
    """Returns a comparable value for every attribute, to detect changes."""
    found: dict[str, Any] = {}
    for name, value in getattr(sequence, "__dict__", {}).items():
        if isinstance(value, _PLAIN):
            found[name] = repr(value)
        elif isinstance(value, GENERATORS):
            found[name] = mark_of_generator(value)
        elif isinstance(value, object_graph.GROWING):
            items = itertools.islice(list(value), _ITEMS)
            plain = [each for each in items if isinstance(each, _PLAIN)]
            found[name] = len(value), repr(plain)
        elif isinstance(value, np.ndarray) and not isinstance(value, np.memmap):
            found[name] = mark_of_array(value)
        elif (sample := _sample(value)) is not None:
            found[name] = mark_of_array(sample)
    return found


def _sample(value: Any) -> np.ndarray[Any, Any] | None:
    """Returns elements of a tensor of TensorFlow or of an array of JAX; None for other
    values."""
    for each in frameworks.adapters("values"):
        if isinstance(value, each.REPLACED):
            # A symbolic tensor has no elements, and raises an error.
            with contextlib.suppress(AttributeError, TypeError, RuntimeError):
                sample: np.ndarray[Any, Any] | None = each.sample(value, _ELEMENTS)
                return sample
    return None


def _checksums(marks: Mapping[str, Any]) -> dict[str, int]:
    """Returns checksums of the results of `_marks`, equal in every process."""
    return {name: zlib.crc32(repr(mark).encode()) for name, mark in marks.items()}


def generators() -> tuple[Any, Any]:
    """Returns the states of the global generators of Python and NumPy."""
    return random.getstate(), np.random.get_state(legacy=False)


def set_generators(states: Any) -> None:
    """Sets the global generators to recorded states; does nothing for None.

    Raises:
        CheckpointCorruptedError: the states were not recorded by `generators`.
    """
    if states is not None:
        with readable("model.fit"):
            of_python, of_numpy = states
            check_bit_generator(of_numpy)
            random.setstate(of_python)
            np.random.set_state(of_numpy)
