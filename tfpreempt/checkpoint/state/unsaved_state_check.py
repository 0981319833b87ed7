"""Warns once of values that a training step changes and no commit holds.

Examples: a forgotten optimizer, a metric beside the model, `self.n += 1`,
`losses.append(loss)`. After a restart such a value is the initial value again, without
an error. So the values that a step function can reach are compared before and after a
call. The warning names the values that have changed and are not saved.

`core/reachable_values.py` finds the values that a step function can reach. Values of
Python and NumPy are compared here; variables of a framework are found by the
framework's adapter ("values" in `core/frameworks.py`). Of the values that a step
replaces, only those are named whose new value is computed from the old value, see
`core/source_code.py`.

In a `model.fit`, Keras calls the functions of the program: steps, losses, layers and
hooks of callbacks. `watch` records the values that these functions can reach, and
`compare` names the values that have changed since.

The check does not use the list of variables that a tf.function has captured: names in
this list, such as "Variable", do not occur in the program, and the closure has the
variables too.
"""

from __future__ import annotations

import array
import collections
import contextlib
import dataclasses
import enum
import functools
import inspect
import io
import itertools
import logging
import numbers
import os
import random
import stat
import sys
import traceback
import types
import weakref
import zlib
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, ClassVar, Protocol

import numpy as np

from tfpreempt.checkpoint.state.random_state import num_spawned
from tfpreempt.checkpoint.state.state import REGISTRY, State, StateRegistry
from tfpreempt.core import frameworks, object_graph
from tfpreempt.core.object_graph import ObjectPath
from tfpreempt.core.reachable_values import reachable
from tfpreempt.core.source_code import (
    GLOBAL_GENERATORS,
    called_callbacks,
    calls_of_adapt,
    derived_keys,
    draws_of_loops,
    fetched_by_loops,
    is_updated,
    reset_before_use,
    set_at_begin,
    set_at_steps,
    updated_keys,
)

_log = logging.getLogger(__name__)

_SAMPLES = 1 << 16  # elements compared, of an array, variable or list with more
SCALARS = (numbers.Number, str, bytes, type(None), np.generic, enum.Enum)
_BUFFERS = (bytearray, array.array)
GENERATORS = (
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
    np.random.SeedSequence,
    random.Random,
)

_NOT_CHECKED = (
    "cannot check whether the step changes state that is not in the commits; a restart "
    "may lose such state without a warning. Training continues"
)
_NOTHING = (
    "no State is registered, so the commits hold only the step and the random "
    "generators. Put everything that a step changes into named States "
    "(tfpreempt.states); create the States before the handler, and keep references to "
    "the States"
)
_ADVICE = "Put these values into a named State (tfpreempt.states)."
_ADVICE_ON_GENERATORS = (
    "An iterator of Python starts from the beginning in a restarted run, so skip the "
    "items that were read (itertools.islice with handler.total_run_calls), or select "
    "each batch by the number of the step."
)
_IN_A_FIT = (
    "training changes values that are not in the commits: %s. A restarted run starts "
    "with their initial values. Make variables and models attributes of the fitted "
    "model; put other values into a tfpreempt.State, or into a callback with "
    "get_state() and set_state() (docs/fit/callbacks.md)."
)
_OF_VALIDATION_DATA = (
    " Change no attributes of the validation data in their on_epoch_end, see "
    "docs/fit/restored-state.md."
)
_UNREAD_IN_A_FIT = (
    "training can read from %s, whose contents are not in the commits. A restarted run "
    "reads them from the beginning. Make an iterator over a tf.data.Dataset an "
    "attribute of the fitted model; keep the contents of a queue in a tf.Variable."
)

_EMPTIED_IN_A_FIT = (
    "training can write to %s, which the program has opened with mode 'w'. A restarted "
    "run that opens the same path deletes the lines that the interrupted run has "
    "written. Open the file with mode 'a', or use a CSVLogger."
)

_ADAPTS_IN_A_FIT = (
    "training calls %s. A layer keeps the adapted values beside its variables, in no "
    "commit, so a restarted run has the values from before the fit. Call adapt() in "
    "on_train_begin, or normalize with variables of the model, such as a "
    "BatchNormalization."
)
_CONTENTS = ("value", "_value", "arrays")
"""Attributes of the ready-made States with the saved values."""
_FEW = 64  # elements compared, of a restored variable
_SHOWN = 5  # changed values named in a warning
_ITEMS = 100  # items compared, of a list that a function replaces
_BY_THE_STEP = (
    "The step changes state that is not in the commits",
    "The step reads from",
)
_BY_THE_LOOP = (
    "The loop changes state that is not in the commits",
    "The loop reads from",
)
_DRAWN_BY_THE_LOOP = (
    "the loop draws random numbers outside of its step: %s. A commit has the state of "
    "the global generator after the draw, so a restarted run draws other numbers, for "
    "example another permutation for the rest of an epoch. Draw in the step function; "
    "or from a generator that is seeded with the number of the epoch or step, such as "
    "numpy.random.default_rng((seed, epoch)); or keep the numbers in a named State."
)
_FETCHED_BY_THE_LOOP = (
    "the loop fetches batches outside of its step, from %s. If run() saves and exits, "
    "the saved position is after a batch that no step has trained, so each restart "
    "loses a batch. Pass the iterator to the step function, and call next(iterator) "
    "in the function."
)
_DRAWN_BY_THE_STEP = (
    "the step draws random numbers with %s, whose state cannot be saved: a restarted "
    "run draws the first numbers again. Use a tf.random.Generator that is in the "
    "tf.train.Checkpoint, keras.random with a SeedGenerator, or tf.random.stateless_*."
)
_SET_AT_STEPS = (
    "the loop changes state at certain steps only: %s. A run that restarts after such "
    "a step does not execute the statement again, and has the earlier state. Let the "
    "condition hold at later steps too (step >= 10 instead of step == 10), or keep the "
    "value in a named State."
)
_RESTORED = (
    "the program has changed variables after the restore and before the first step: "
    "%s. So this run differs from an uninterrupted run. The handler restores the "
    "newest commit when the handler is created: assign initial values, create "
    "iterators, restore other checkpoints and load weights before, or only if "
    "handler.total_run_calls is 0. Increase a counter, split a random key, draw random "
    "numbers and create the iterator of the next epoch inside the step or after run()."
)
LOOKS = (1, 2, 3, 10, 100, 1000)
"""Numbers of completed steps of a process after which the loop is searched: the search
of a large model may take a second, so the loop is not searched at each save. Also
numbers of comparisons in a fit with more than `_MANY` locations."""
_MANY = 5_000
_REFERENCES = 3
"""`sys.getrefcount` of the dict `frame.f_locals`, if the program has no reference to
the dict."""


class Values(Protocol):
    """Functions for the objects of a framework, such as TensorFlow. The framework's
    adapter, a module, implements the functions.

    Attributes:
        SAVED_WHOLE: classes of objects that are saved with every attribute.
        REPLACED: classes of immutable values; a step replaces such a value by a new
            object, as with numbers and strings.
        ADVICE: text for the warning: where the user can put a value so that commits
            contain the value.
    """

    SAVED_WHOLE: tuple[type, ...]
    REPLACED: tuple[type, ...]
    ADVICE: str

    def saved(self, checkpoint: Any) -> tuple[list[Any], list[Any]]:
        """Returns the objects and variables that a checkpoint saves.

        Args:
            checkpoint: checkpoint object of the user; None for named States alone.

        Returns:
            The objects and variables; and the objects that are saved with every
            attribute.
        """
        ...

    def named_variables(
        self, checkpoint: Any, *, with_states: bool
    ) -> Iterable[tuple[str, Any]]:
        """Returns the variables that a checkpoint saves, with their paths.

        Args:
            checkpoint: checkpoint object of the user; None for named States alone.
            with_states: whether the result includes the arrays in named States, and
                the iterators.
        """
        ...

    def variables(self, value: Any) -> Sequence[Any]:
        """Returns the variables of an object; empty for objects of other frameworks."""
        ...

    def sample(self, thing: Any, size: int) -> np.ndarray[Any, Any] | None:
        """Returns about `size` elements of a variable, or of a value of a class in
        REPLACED; None for other objects.
        """
        ...

    def arrays(self, thing: Any) -> Sequence[Any]:
        """Returns the immutable arrays in an object or a State."""
        ...

    def with_nan(self, checkpoint: Any, states: Iterable[State]) -> Iterator[str]:
        """Yields texts that name the floating-point variables of a checkpoint, and the
        arrays of named States, that contain NaN."""
        ...

    def hidden_draws(self, function: Any) -> Sequence[str]:
        """Returns the random ops of a traced function whose state cannot be saved;
        empty for other objects."""
        ...

    def restarts(self, iterator: Any) -> bool:
        """Returns whether a restarted run would read an iterator from the beginning.

        Returns False for objects of other kinds.
        """
        ...

    def advice_on_iterators(self, unread: Mapping[str, Any]) -> str:
        """Returns text for the warning: advice on iterators without a saved
        position."""
        ...


@dataclasses.dataclass(eq=False)
class UnsavedStateCheck:
    """Compares the values before and after a call of a step function, once for every
    step function, and warns of changed values that no commit holds.

    Used on the main thread. Methods log errors, and raise no error.

    Args:
        checkpoint: checkpoint object that a save writes; None if the program has only
            named States.
        registry: registry of the named States.
    """

    checkpoint: Any
    registry: StateRegistry = REGISTRY
    # Step functions compared so far, by identity; the names in warnings so far; the
    # keys of the values with these names; the call in progress, with the values before
    # the call; the loop, with its values before its second step; and whether a warning
    # of an error was logged.
    _functions: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False)
    _named: set[str] = dataclasses.field(default_factory=set, init=False)
    _known: set[Any] = dataclasses.field(default_factory=set, init=False)
    _call: _Call | None = dataclasses.field(default=None, init=False)
    _loop: _Call | None = dataclasses.field(default=None, init=False)
    _has_failed: bool = dataclasses.field(default=False, init=False)
    _compared: int = dataclasses.field(default=0, init=False)  # calls of `compare`
    # Fingerprints of the restored variables, by path; empty after the comparison.
    _restored: dict[str, list[Any]] = dataclasses.field(
        default_factory=dict, init=False
    )
    _with_states: bool = dataclasses.field(default=False, init=False)
    # The checks in use: another open handler saves the variables of its Checkpoint.
    _in_use: ClassVar[weakref.WeakSet[UnsavedStateCheck]] = weakref.WeakSet()

    def __post_init__(self) -> None:
        self._in_use.add(self)

    def watch_restored(self, *, with_states: bool) -> None:
        """Records the variables that the start has restored, for `compare_restored`.

        States and iterators are recorded only if the commit was made at the beginning
        of a `run()`. A loop that changes a State in front of `run()` has then changed
        the State before the commit, and changes the State again after the restart. In
        the same way, the loop replaces an iterator that was restored in the middle of
        the data.

        Args:
            with_states: whether the commit was made at the beginning of a `run()`.
        """
        with self._errors_logged():
            self._with_states = with_states
            self._restored = self._marks_of_variables(with_states)

    def compare_restored(self) -> None:
        """Logs a warning with the variables that the program has changed between the
        restore and the first step."""
        restored, self._restored = self._restored, {}
        if not restored:
            return
        with self._errors_logged():
            now = self._marks_of_variables(self._with_states)
            changed = [path for path in restored if restored[path] != now.get(path)]
            if changed:
                _log.warning(_RESTORED, shortened(changed))

    def _marks_of_variables(self, with_states: bool) -> dict[str, Any]:
        found = collections.defaultdict[str, list[Any]](list)
        for state in self.registry.in_order() if with_states else ():
            found[state.name].append(mark_of_contents(state))
            for each in object_graph.attributes(state).values():
                if isinstance(each, GENERATORS):
                    found[state.name].append(repr(mark_of_generator(each)))
                elif isinstance(each, Iterator):
                    found[state.name].append(each)
        for each in _adapters():
            variables = each.named_variables(self.checkpoint, with_states=with_states)
            for path, variable in variables:
                # Of an iterator, the object is recorded, so that the object exists as
                # long as the record, and no other object has its id().
                if isinstance(variable, Iterator):
                    found[path].append(variable)
                else:
                    sample = each.sample(variable, _FEW)
                    found[path].append("" if sample is None else repr(sample.tolist()))
        return dict(found)

    def before_call(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Records the values that a step function can reach, before a call of the step
        function. Does nothing if the function was compared before.

        For the first call of a step function, the training loop does not call this
        method, because the first call traces the function and creates variables.
        """
        # Python makes a new bound method at each access: its object and function decide
        # whether two methods are equal.
        is_method = isinstance(function, types.MethodType)
        key = function if is_method else id(function)
        if key in self._functions:
            return
        self._functions[key] = function
        if self.checkpoint is None and not self.registry.in_order():
            _log.warning(_NOTHING)
        with self._errors_logged():
            call = functools.partial(function, *args, **kwargs)
            self._call = _Call({"": call}, self._saved(), self.registry)

    def after_call(self) -> None:
        """Logs a warning with the values that the call has changed and no commit
        holds."""
        call, self._call = self._call, None
        if call is None:
            return
        with self._errors_logged():
            locations = call.search()
            changed = call.changed(locations)
            self._warn(_BY_THE_STEP, changed, call.unread)
            drawn = [
                op
                for location in locations
                for each in _adapters()
                for op in each.hidden_draws(location.value)
                if op not in self._named
            ]
            self._named.update(drawn)
            if drawn:
                _log.warning(_DRAWN_BY_THE_STEP, ", ".join(drawn[:3]))

    def watch_loop(
        self,
        frame: types.FrameType | None,
        *,
        is_before_step: bool,
        is_last: bool = False,
    ) -> None:
        """Records the values that the training loop can reach; later calls compare.

        The loop consists of the running functions of the program. A loop changes values
        without a call of the step function, such as a replay buffer. A loop may also
        read batches by `next(iterator)` or `iterator.get_next()`, and pass the batches
        to the step function; the first call names such iterators, and random numbers
        that the loop draws outside of its step. Called after the numbers of steps in
        `LOOKS`, and before the exit after a notice.

        Args:
            frame: the frame of a caller of `run()`.
            is_before_step: whether the boundary is in front of a step, as in `run()`.
                Another boundary may come after the step of a batch, so that a save has
                the correct position of a saved iterator.
            is_last: whether later calls follow only before an exit. Then later calls
                do not compare lists and dicts, so that the program can delete them.
        """
        if self._has_failed:
            return
        frames = [
            each
            for each, _ in traceback.walk_stack(frame)
            if object_graph.is_user_module(each.f_globals.get("__name__", ""))
        ]
        roots = {str(number): each for number, each in enumerate(frames)}
        found, unread = dict[Any, str](), dict[str, Any]()
        with self._errors_logged():
            try:
                if self._loop is not None:
                    found = self._loop.changed(self._loop.search(roots))
                else:
                    saved = self._saved()
                    self._loop = _Call(roots, saved, self.registry)
                    # Keep no reference, so that the program can delete an iterator.
                    unread, self._loop.unread = self._loop.unread, {}
                    self._known.update(self._loop.skipping)
                    if drawn := draws_of_loops(frames, State):
                        _log.warning(_DRAWN_BY_THE_LOOP, ", ".join(drawn))
                    if is_before_step and (fetched := fetched_by_loops(frames, saved)):
                        _log.warning(_FETCHED_BY_THE_LOOP, ", ".join(fetched))
                    called = called_callbacks(frames).items()
                    found = {id(x): name for name, x in called if id(x) not in saved}
                    if lines := set_at_steps(frames, State):
                        _log.warning(_SET_AT_STEPS, "; ".join(lines))
            finally:
                for each in frames:
                    _drop_copy(each)
            self._warn(_BY_THE_LOOP, found, unread)
            if is_last and self._loop is not None:
                self._loop.release()

    def watch(
        self,
        roots: Mapping[str, Any],
        *,
        called: Iterable[str],
        kept: Iterable[ObjectPath],
        savers: Sequence[Any],
    ) -> None:
        """Records the values that functions of the program can reach, for `compare`.

        Args:
            roots: functions and objects of the program that a library calls, by name.
            called: names of methods that the library calls.
            kept: locations of values that need no warning here: commits hold the
                values, or another warning names the values.
            savers: functions that save values; the values that they reach are saved.
        """
        with self._errors_logged():
            call = _Call(roots, self._saved(savers), self.registry, called)
            call.leave_out(kept)
            self._call = call
            if call.adapting:
                _log.warning(_ADAPTS_IN_A_FIT, ", ".join(call.adapting))
            if call.emptied:
                _log.warning(_EMPTIED_IN_A_FIT, ", ".join(call.emptied.values()))

    def compare(self) -> None:
        """Logs a warning with the values that have changed since `watch`, and that no
        commit holds. Names each value once."""
        if (call := self._call) is None:
            return
        self._compared += 1
        if call.locations > _MANY and self._compared not in LOOKS:
            return
        with self._errors_logged():
            found = call.changed(call.search()).values()
            new = [name for name in found if name not in self._named]
            unread = [name for name in call.unread if name not in self._named]
            self._named.update(new, unread)
            if new:
                is_of_data = any(each.startswith("validation_data.") for each in new)
                more = _OF_VALIDATION_DATA if is_of_data else ""
                _log.warning(_IN_A_FIT + more, ", ".join(new))
            if unread:
                _log.warning(_UNREAD_IN_A_FIT, ", ".join(unread))

    def _warn(
        self,
        begins: tuple[str, str],
        changed: Mapping[Any, str],
        unread: Mapping[str, Any],
    ) -> None:
        """Logs a warning of values and iterators that have no name in a warning yet.

        Args:
            begins: beginnings of the sentences about the values and the iterators.
            changed: names of changed values, by key.
            unread: iterators whose position is not saved, by name.
        """
        known, named = self._known, self._named
        new = {key: name for key, name in changed.items() if key not in known}
        read = {name: it for name, it in unread.items() if id(it) not in known}
        names = [name for name in new.values() if name not in named]
        iterators = {name: it for name, it in read.items() if name not in named}
        known.update(new, map(id, read.values()))
        named.update(new.values(), read)
        values = _adapters()
        problems = []
        if names:
            # TensorFlow's adapter is the first, and JAX has no checkpoint object.
            first = values[:1] if self.checkpoint is not None else values[-1:]
            advice = first[0].ADVICE if first else _ADVICE
            problems.append(
                f"{begins[0]}: {', '.join(names)}. A restarted run starts with the "
                f"initial values. {advice}"
            )
        if iterators:
            problems.append(
                f"{begins[1]} {', '.join(iterators)}, but the commits lack the "
                "position in these data."
            )
        for each in values:
            mine = {name: it for name, it in iterators.items() if each.restarts(it)}
            if mine:
                problems.append(each.advice_on_iterators(mine))
        if any(map(_is_python_iterator, iterators.values())):
            problems.append(_ADVICE_ON_GENERATORS)
        if problems:
            _log.warning("%s", " ".join(problems))

    def forget(self) -> None:
        """Drops the recorded values, at the end of the handler or fit."""
        self._call = self._loop = None
        self._in_use.discard(self)

    @contextlib.contextmanager
    def _errors_logged(self) -> Iterator[None]:
        """Logs an error, the first one as a warning."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - from a user's object
            level = logging.DEBUG if self._has_failed else logging.WARNING
            _log.log(level, _NOT_CHECKED, exc_info=error)
            self._has_failed, self._loop = True, None

    def _saved(self, savers: Sequence[Any] = ()) -> set[Any]:
        """Returns the keys of the values that a commit holds; `_Call._things` defines
        the keys.

        Args:
            savers: further functions that save the values that they reach.
        """
        values = _adapters()
        roots: list[Any] = [*savers, *GLOBAL_GENERATORS]
        for state in self.registry.in_order():
            roots += [state, state.save]
        keys: set[Any] = set()
        whole: tuple[type, ...] = (State,)
        for framework in values:
            whole += framework.SAVED_WHOLE
            for check in list(self._in_use):
                saved, with_attributes = framework.saved(check.checkpoint)
                keys |= set(map(id, saved))
                roots += with_attributes
        named = {str(number): root for number, root in enumerate(roots)}
        for location in reachable(named, functools.partial(_is_saved_with, whole)):
            keys |= {id(location.value), (id(location.owner), location.key)}
            keys |= set(map(id, _variables(location.value, values)))
            if isinstance(location.value, np.random.Generator):
                bits = location.value.bit_generator
                keys |= {id(bits), id(getattr(bits, "seed_seq", None))}
            elif isinstance(location.value, np.random.RandomState):
                keys.add(id(getattr(location.value, "_bit_generator", None)))
        return keys


def _adapters() -> list[Values]:
    """Returns the adapters of the frameworks that the program has imported."""
    return frameworks.adapters("values")


def _drop_copy(frame: types.FrameType) -> None:
    """Clears the copy of its variables that a frame keeps, before Python 3.13, after a
    read of `f_locals`. The copy would keep objects alive that the program deletes.

    If the program has called `locals()`, the result is the same dict, and stays.
    """
    variables = frame.f_locals
    is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED
    is_copy = is_function and type(variables) is dict
    # The frame, this function, and the argument of `getrefcount` refer to the dict.
    if is_copy and sys.getrefcount(variables) <= _REFERENCES:
        variables.clear()


def _is_searched(kind: type) -> bool:
    """Returns whether the check looks at the attributes of a class's objects: the
    program defines the class, and the class is no State."""
    return object_graph.is_user_code(kind) and not issubclass(kind, State)


def _is_saved_with(whole: tuple[type, ...], kind: type) -> bool:
    """Returns whether a State that refers to an object may save the object's contents.

    Only the object's class is examined, no value, because the read of an ON_READ
    variable is a collective operation, and would wait for workers that do not take
    part. `whole` has the classes that are saved with every attribute.
    """
    return issubclass(kind, whole) or object_graph.is_user_code(kind)


class _Call:
    """A call of a step function, with the values before the call.

    Args:
        roots: the function with its arguments, or functions and objects, by name.
        saved: keys of the values that a commit holds; these are not compared.
        registry: registry of the named States.
        called: names of further methods that a library calls.

    Attributes:
        locations: number of locations found.
        unread: iterators whose position is not saved, by name.
        skipping: `id()` of the iterators that skip the items of earlier steps.
        adapting: calls of `layer.adapt` in functions that a library calls.
        emptied: names of open files that a restarted program empties when it opens the
            files again, by location (owner and name there).
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        saved: set[Any],
        registry: StateRegistry,
        called: Iterable[str] = (),
    ) -> None:
        self._values = _adapters()
        self._registry = registry
        self._called = frozenset(called)
        frames = [each for each in roots.values() if isinstance(each, types.FrameType)]
        # A frame would keep its local variables alive: later frames are given again.
        self._roots = {} if frames else roots
        locations, held = self.search(roots), self._held()
        self.locations = len(locations)
        # With the owner: another frame may have variables of the same names.
        self._fresh = set[Any]()
        for frame in frames:
            derived, code = derived_keys(frame, saved, State), frame.f_code
            cells = {("name", each) for each in code.co_cellvars + code.co_freevars}
            self._fresh |= {_owner_and_key(frame, name) for _, name in derived}
            self._fresh |= {(types.CellType, key) for key in derived & cells}
        # An iterator in a frame counts only if a function calls `next(iterator)`.
        self._updated = updated_keys(locations)
        # By whether a fresh variable has the container: ids of containers. A comparison
        # of the items would keep a container alive that each pass of the loop replaces.
        lists = {True: set[int](), False: set[int]()}
        for each in locations if frames else ():
            if object_graph.is_container(each.value):
                lists[self._is_fresh(each)].add(id(each.value))
        replaced = lists[True] - lists[False]
        # By key: a reference to the object whose id() is in the key, and the mark.
        self._before = {
            key: (
                _reference(thing if isinstance(key, int) else location.owner),
                self._mark(key, thing, held),
            )
            for key, (location, thing) in self._things(locations).items()
            if key not in saved and (_is_scalar(thing) or id(thing) not in saved)
            if not (self._is_fresh(location) or id(location.owner) in replaced)
        }
        self.adapting: Collection[str] = ()
        self.emptied: dict[Any, str] = {}
        self.leave_out(reset_before_use(locations))
        if self._called:  # a restart calls hooks of the beginning again
            self.emptied = {
                (id(each.owner), each.key): each.path
                for each in locations
                if _is_emptied(each.value)
            }
            self.leave_out(set_at_begin(locations, self._updated))
            self.adapting = calls_of_adapt(locations, self._called)
        self.unread = {
            location.path: location.value
            for location in locations
            if id(location.value) not in saved
            if not frames or self._is_updated(location)
            if _is_python_iterator(location.value, saved)
            or any(each.restarts(location.value) for each in self._values)
        }
        self.skipping = {
            id(location.value)
            for location in locations
            if isinstance(location.value, Iterator) and self._is_fresh(location)
        }

    def search(self, roots: Mapping[str, Any] | None = None) -> list[ObjectPath]:
        """Returns the locations of the values that the call can reach.

        Args:
            roots: the current frames of a loop, as at the beginning; None for a call.
        """
        return reachable(roots or self._roots, _is_searched, self._called)

    def leave_out(self, locations: Iterable[ObjectPath]) -> None:
        """Excludes the values at some locations from the comparison."""
        for location in locations:
            key = id(location.owner), location.key
            self._before.pop(key, None)
            self.emptied.pop(key, None)
            for thing in (location.value, *_variables(location.value, self._values)):
                if not _is_scalar(thing):
                    self._before.pop(id(thing), None)

    def release(self) -> None:
        """Drops the references to lists and dicts, except the namespaces of modules.

        Lists and dicts have no weak references.
        """
        self._before = {
            key: (reference, mark)
            for key, (reference, mark) in self._before.items()
            if not object_graph.is_container(thing := reference())
            or (isinstance(thing, dict) and "__builtins__" in thing)
        }

    def changed(self, locations: Iterable[ObjectPath]) -> dict[Any, str]:
        """Returns the names of the values that the call has changed, by key, without
        arrays that the States have.

        Args:
            locations: result of `search` after the call.
        """
        things = self._things(locations)
        held = self._held()
        changed = {
            key: (location, self._arrays(thing), mark)
            for key, (reference, mark) in self._before.items()
            if key in things
            for location, thing in (things[key],)
            if reference() is (thing if isinstance(key, int) else location.owner)
            if self._mark(key, thing, held) != mark
        }
        new = {
            id(each): found
            for _, arrays, mark in changed.values()
            if isinstance(mark, frozenset)
            for each in arrays
            if id(each) not in held
            if (found := self._mark_of_array(each)) not in mark
        }
        # A State may have a copy of an array. Count the equal arrays, because one copy
        # does not save two arrays.
        lacking = collections.Counter(new.values())
        if lacking:
            used = {id(each) for _, it in things.values() for each in self._arrays(it)}
            copies = (each for number, each in held.items() if number not in used)
            lacking.subtract(map(self._mark_of_array, copies))
        paths = {
            id(location): (key, location.path)
            for key, (location, arrays, mark) in changed.items()
            if not isinstance(mark, frozenset)
            or any(lacking[new.get(id(each))] > 0 for each in arrays)
        }
        counts = collections.Counter[str]()
        names: dict[Any, str] = {}
        for key, path in paths.values():
            above = (each + end for each in names.values() for end in ".[")
            if path.startswith(tuple(above)):
                continue  # a part of an object that is named
            counts[path] += 1
            names[key] = path if counts[path] == 1 else f"{path} ({counts[path]})"
        return names

    def _is_fresh(self, location: ObjectPath) -> bool:
        """Returns whether a location is a variable that a restart sets again."""
        owner = location.owner
        is_cell = isinstance(owner, types.CellType)  # of a frame that is not known
        owner = types.CellType if is_cell else id(owner)
        return (owner, ("name", location.key)) in self._fresh

    def _is_updated(self, location: ObjectPath) -> bool:
        """Returns whether a function updates the value at a location, and a restart
        does not set the value again."""
        is_fresh = self._is_fresh(location)
        return not is_fresh and is_updated(location, self._updated)

    def _held(self) -> dict[int, Any]:
        """Returns the arrays that the States have at present, by id."""
        states = self._registry.in_order()
        return {id(array): array for each in states for array in self._arrays(each)}

    def _arrays(self, thing: Any) -> list[Any]:
        return [array for each in self._values for array in each.arrays(thing)]

    def _mark_of_array(self, array: Any) -> Any:
        return mark_of_array(np.asarray(sample_of(self._values, array)))

    def _things(
        self, locations: Iterable[ObjectPath]
    ) -> dict[Any, tuple[ObjectPath, Any]]:
        """Returns the values to compare, with their locations, by key.

        The key of a mutable object is its id(). The key of an immutable value is its
        location (owner and name there), because a step puts a new object at the
        location. A step may also replace a tree of immutable values, such as a dict of
        JAX arrays.
        """
        replaced = sum((each.REPLACED for each in self._values), SCALARS)
        found: dict[Any, tuple[ObjectPath, Any]] = {}
        for location in locations:
            value = location.value
            is_replaced = isinstance(value, replaced)
            if not is_replaced:
                for thing in self._mutable(location):
                    found.setdefault(id(thing), (location, thing))
            if self._is_updated(location) and (
                is_replaced
                or isinstance(value, list | tuple | dict | np.ndarray)
                or _is_searched(type(value))
                or self._arrays(value)
                or sample_of(self._values, value) is not None
            ):
                found.setdefault((id(location.owner), location.key), (location, value))
        return found

    def _mutable(self, location: ObjectPath) -> Sequence[Any]:
        """Returns the objects at a location that a step may change."""
        value = location.value
        if isinstance(value, np.ndarray):
            is_memory = value.flags.writeable and not isinstance(value, np.memmap)
            return [value] if is_memory else []
        if isinstance(value, object_graph.GROWING):
            kind: type = type(location.owner)
            return [] if object_graph.is_set_by_library(kind, location.key) else [value]
        is_whole = isinstance(value, GENERATORS + _BUFFERS)
        return [value] if is_whole else _variables(value, self._values)

    def _mark(self, key: Any, thing: Any, held: Mapping[int, Any]) -> Any:
        """Returns a fingerprint of an object: equal while the object is unchanged, or
        while the States have its arrays.

        Of a large array or variable, only a sample of the elements is read.

        Args:
            key: key of the object, as in `_things`.
            thing: the object.
            held: the arrays of the States, by id.
        """
        if isinstance(thing, GENERATORS):
            return mark_of_generator(thing)
        if isinstance(thing, _BUFFERS):
            # A copy, because a thread of the program cannot resize a buffer in use.
            copied = bytes(thing[:: 1 + len(thing) // _SAMPLES])
            return len(thing), zlib.crc32(copied)
        if isinstance(thing, object_graph.GROWING) and isinstance(key, int):
            # A container may have exchanged items: a full replay buffer keeps its
            # length. The values of a dict have locations of their own, but the method
            # `update` of a Counter adds to its values.
            # Copies, because a thread of the program may change the container.
            parts: list[Any] = list(thing)
            mark: Callable[[Any], Any] = hash if isinstance(thing, dict) else id
            if isinstance(thing, collections.Counter):
                parts, mark = list(thing.items()), repr
            few = parts[:: 1 + len(parts) // _SAMPLES]
            return len(parts), hash(tuple(map(mark, few)))
        if _is_scalar(thing):
            return type(thing), repr(thing)
        if arrays := self._arrays(thing):
            marks = (None if id(x) in held else self._mark_of_array(x) for x in arrays)
            return frozenset(marks)
        if isinstance(thing, np.ndarray):
            return mark_of_array(thing)
        if isinstance(thing, list | tuple | dict):
            items = thing.values() if isinstance(thing, dict) else thing
            return [
                len(each)
                if object_graph.is_container(each)
                # The text of an object of an unknown class may be long.
                else self._mark(key, each, held)
                for each in itertools.islice(items, _ITEMS)
            ]
        if _is_searched(type(thing)):  # such as a dataclass, which a step replaces
            return {
                name: self._mark(key, each, held)
                for name, each in object_graph.attributes(thing).items()
                if _is_scalar(each) or isinstance(each, np.ndarray)
            }
        if (sample := sample_of(self._values, thing)) is not None:
            return mark_of_array(sample)
        return type(thing), id(thing)


def _reference(thing: Any) -> Callable[[], Any]:
    """Returns a function that returns an object, or None after the program has deleted
    the object. Without a weak reference, the check would keep large values alive."""
    try:
        return weakref.ref(thing)
    except TypeError:  # a number, a list or a dict
        return lambda: thing


def _owner_and_key(frame: types.FrameType, name: str) -> tuple[int, Any]:
    """Returns the `id()` of the owner, as in `ObjectPath`, and the key of a variable
    that a frame sets, or of an attribute such as `self.step`. The owner of a variable
    is the code of a function, or the namespace of a module."""
    variables = frame.f_locals
    owner, _, attribute = name.rpartition(".")
    if owner:
        return id(variables.get(owner)), ("name", attribute)
    is_global = variables is frame.f_globals or name not in variables
    return id(frame.f_globals if is_global else frame.f_code), ("name", name)


def _is_python_iterator(value: Any, saved: Container[Any] = ()) -> bool:
    """Returns whether a value is an iterator of Python, such as a generator, whose
    position cannot be saved.

    Returns False for a generator that is a method of a saved object, such as a loader,
    and for the generator in which the training loop runs.

    Args:
        value: any object.
        saved: `id()` of the saved objects.
    """
    if isinstance(value, types.GeneratorType) and (frame := value.gi_frame):
        owner = frame.f_locals.get("self")
        _drop_copy(frame)
        is_of_saved = owner is not None and id(owner) in saved
        if value.gi_running or is_of_saved:
            return False
    is_of_python = type(value).__module__ in ("builtins", "itertools")
    return is_of_python and isinstance(value, Iterator)


def _is_emptied(value: Any) -> bool:
    """Returns whether a value is an open file whose contents were deleted when the
    program opened the file."""
    if not isinstance(value, io.IOBase) or value.closed:
        return False
    # A file without a path, such as a standard stream, is not opened again by its name.
    is_path = isinstance(getattr(value, "name", None), str)
    is_written = "w" in str(getattr(value, "mode", "")) and value.fileno() > 2
    return is_path and is_written and stat.S_ISREG(os.fstat(value.fileno()).st_mode)


def _is_scalar(thing: Any) -> bool:
    """Returns whether a value is a number or text: many locations may refer to the same
    number, so its id() does not identify a location."""
    return isinstance(thing, SCALARS)


def mark_of_contents(state: State) -> int | None:
    """Returns a fingerprint of the values in a ready-made State; None for other States
    and for values such as JAX arrays."""
    if object_graph.is_user_code(type(state)):
        return None
    attributes = object_graph.attributes(state)
    found = [attributes[key] for key in _CONTENTS if key in attributes]
    return _mark_of_plain(found) if found else None


def _mark_of_plain(value: Any) -> int | None:
    """Returns a fingerprint of numbers, texts and NumPy arrays, also in containers;
    None for other values."""
    marks = list[Any]()
    for each in object_graph.leaves(value):
        if not isinstance(each, (*SCALARS, np.ndarray)):
            return None
        marks.append(mark_of_array(each) if isinstance(each, np.ndarray) else each)
    return zlib.crc32(repr(marks).encode())


def _variables(value: Any, values: Sequence[Values]) -> Sequence[Any]:
    """Returns the variables in an object, of all frameworks. The items of a container
    have locations of their own."""
    if _is_scalar(value) or object_graph.is_container(value):
        return []
    return [variable for each in values for variable in each.variables(value)]


def sample_of(
    values: Sequence[Values], thing: Any, size: int = _SAMPLES
) -> np.ndarray[Any, Any] | None:
    """Returns about `size` elements of an object of a framework; None for an object of
    no framework.

    Args:
        values: the adapters of the frameworks.
        thing: the object.
        size: number of elements.
    """
    samples = (each.sample(thing, size) for each in values)
    return next((each for each in samples if each is not None), None)


def shortened(names: Sequence[str]) -> str:
    """Returns the first names of a list, as text for a warning."""
    more = ", ..." if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def mark_of_generator(generator: Any) -> Any:
    """Returns a fingerprint of the state of a random generator of `GENERATORS`."""
    if isinstance(generator, np.random.Generator):
        return mark_of_generator(generator.bit_generator)
    if isinstance(generator, np.random.BitGenerator):
        state, spawned = repr(generator.state), num_spawned(generator)
        # Existing commits have the checksum of `state` for the attributes of a dataset.
        return (state, spawned) if spawned else state
    if isinstance(generator, np.random.SeedSequence):
        return generator.n_children_spawned
    if isinstance(generator, np.random.RandomState):
        return repr(generator.get_state())
    if isinstance(generator, random.SystemRandom):
        return None  # has no state
    return hash(generator.getstate())


def raw_bytes(array: np.ndarray[Any, Any]) -> bytes:
    """Returns the bytes of an array for a fingerprint; of an array of objects, the
    bytes of their text."""
    is_plain = not array.dtype.hasobject
    return array.tobytes() if is_plain else repr(array.tolist()).encode()


def sample_of_array(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the elements of an array, or some elements of a large array."""
    return np.asarray(array.flat[:: max(1, array.size // _SAMPLES)])


def mark_of_array(array: np.ndarray[Any, Any]) -> Any:
    """Returns a fingerprint of an array, or of a sample of a large array."""
    sample = sample_of_array(array)
    if sample.dtype.hasobject:
        return array.shape, repr(sample.tolist())
    return array.shape, zlib.crc32(sample.tobytes())
