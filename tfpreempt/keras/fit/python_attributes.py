"""Plain Python values of a model that change in training: counts, phases, settings.

The values are attributes of the model, its layers, optimizers, losses and metrics, and
of the program's own objects in them. Attributes of library classes count if they are
settings: attributes with the name of a constructor's argument, such as `Dropout.rate`,
`SGD.momentum`, `L2.l2` and `Layer.trainable`. Only values changed since the beginning
of the fit are saved, so a restore does not overwrite a value that a user edits in the
program between two starts. Values that change while a step is traced are excluded,
because the next start traces the step again.

A traced train or test function uses the values from the moment of the trace, whatever a
callback sets later. So the values of that moment are saved too. After a restart these
values are set while the function is traced, and then replaced by the newest values.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import itertools
import logging
import random
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfpreempt import errors
from tfpreempt.checkpoint.state.encoding import readable
from tfpreempt.core import object_graph
from tfpreempt.keras.fit_record import EncodedValue

log = logging.getLogger(__name__)

_CONTAINERS = (dict, list, tuple, collections.deque)
_PLAIN = (
    *(bool, int, float, str, type(None), np.generic, np.ndarray),
    *(random.Random, np.random.Generator, np.random.RandomState),
)
_FIXED = frozenset({bool, int, float, str, type(None)})
_HOLDING = ("variables", "reset_state", "call", "get_config")
"""Methods that identify layers, metrics, losses, optimizers and regularizers."""
_KEEP = ". Keep it in a tf.Variable or a tfpreempt.State"
_SMALL = 1 << 12  # bytes; larger values are not kept for a trace
_LARGE = 1 << 24  # bytes; larger values count as data
_KEPT = "_tfpreempt_attributes"
"""Name on a model of the `Attributes` of the model's last fit in this process."""
_KINDS = {"train": "traced", "test": "tested"}
"""Kinds of entries with the values of a trace, by the kind of Keras' function."""
_UNPLACED = (KeyError, IndexError, AttributeError, TypeError, ValueError)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrackedAttribute:
    """A plain Python value of a model.

    Attributes:
        location: location of the value.
        name: path of the object that holds the value, and key of the value in that
            object, as saved.
        is_setting: whether the value is a library's setting.
        encoded: the value, encoded; for a value that cannot be restored, the problem
            and a description of the value, so that digests distinguish such values.
        problem: reason why the value cannot be restored; None for other values.
    """

    location: object_graph.ObjectPath
    name: tuple[str, Any]
    is_setting: bool
    encoded: EncodedValue
    problem: str | None

    def value(self) -> Any:
        """Returns the decoded value; the object itself if the value cannot be restored.

        Raises:
            CheckpointCorruptedError: `encoded` was not made by `EncodedValue.of`.
        """
        return self.encoded.value() if self.problem is None else self.location.value

    def taken_again(self) -> TrackedAttribute:
        """Returns the value with the current contents of the same object."""
        owner, key = self.name
        return _taken(self.location, owner, key if self.is_setting else None)

    @property
    def is_small(self) -> bool:
        """Whether the value is small enough to be kept for a trace."""
        return self.problem is None and sum(map(len, self.encoded.arrays)) <= _SMALL


_KINDS_WHY = (
    "the function is traced for each kind of data (structure, dtypes and shapes of a "
    "batch), settings have changed since its first trace, and only the settings of the "
    "first trace are restored. Call evaluate() in callbacks with data of the kind of "
    "validation_data, or call make_test_function(force=True) after a change of settings"
)


def _read(saved: EncodedValue) -> Mapping[str, Mapping[tuple[str, Any], EncodedValue]]:
    """Returns the values in a result of `Attributes.capture`, by kind and name.

    The kinds are "newest"; "traced" and "tested", the values when the train or the test
    function was traced; "first", the settings at the fit's first step; and "lost",
    changes that cannot be saved, with the reason instead of a value.
    """
    found: dict[str, Any] = collections.defaultdict(dict)
    arrays = iter(saved.arrays)
    with readable("a fit"):
        for owner, key, head, n, *kind in saved.header:
            encoded = EncodedValue(header=head, arrays=(*itertools.islice(arrays, n),))
            found[str(kind[0]) if kind else "newest"][owner, key] = encoded
    return found


@dataclasses.dataclass(slots=True, kw_only=True)
class Trace:
    """The trace of a function of Keras.

    Attributes:
        function: the function traced in this process; None before the first trace.
        values: small values by key with which the function was traced, or is to be
            traced after a restart; empty before the first trace.
        is_due: whether the next call of the function traces with `values`.
        outdated: restored values that differ from the values in the trace of this
            process.
        kinds: element specs of the function's calls in this process; TensorFlow traces
            the function for every spec.
    """

    function: Any = None
    values: dict[Any, TrackedAttribute] = dataclasses.field(default_factory=dict)
    is_due: bool = False
    outdated: list[TrackedAttribute] = dataclasses.field(default_factory=list)
    kinds: list[Any] = dataclasses.field(default_factory=list)


_ended: weakref.WeakValueDictionary[int, Attributes] = weakref.WeakValueDictionary()
"""The values of fits that ended, oldest first, as long as their models exist."""


class Attributes:
    """The Python values of a model, from the beginning of its fit. Main thread.

    A later fit of the same model continues from the first fit. Values that a fit has
    changed, and that did not change afterwards, count as changed in the next fit,
    because a restart skips the first fit and its callbacks. This includes values of
    layers that the model shares with the models of earlier fits. A traced function
    stays traced.

    Args:
        model: the model.

    Attributes:
        traces: traces by Keras' function, "train" or "test".
    """

    def __init__(self, model: Any) -> None:
        self.traces = {name: Trace() for name in _KINDS}
        self._roots = {"model": model}
        self._traced: set[Any] = set()  # keys of values that change with every trace
        self._lost: dict[str, str] = {}  # reasons by change
        # Whether a step was trained, in this process or before a restart.
        self._has_stepped = False
        # Settings by key, as first seen.
        self._settings: dict[Any, TrackedAttribute] = {}
        self._owners: dict[int, Any] = {}  # owners by the id() in a key
        self._reached: object_graph.Reached | None = None  # objects of the newest walk
        # Values found by the newest call of `_look`.
        self._looked: Mapping[Any, TrackedAttribute] = {}
        self._changing: list[Any] = []  # keys of values that may change in place
        self._at_first: dict[Any, TrackedAttribute] = {}  # settings at the first step
        self._at_start: dict[Any, bytes] = {}
        now = self._look()
        self._at_start = {key: each.encoded.digest for key, each in now.items()}
        self._at_end: dict[Any, bytes] = {}
        self._optimizer = getattr(model, "optimizer", None)
        # Functions of the model at the end of the fit.
        self._functions: dict[str, Any] = {}
        at_begin = dict(self._at_start)
        for before in list(_ended.values()):
            self._continue_from(before, at_begin)
        if (last := getattr(model, _KEPT, None)) is not None:
            self._continue(model, last)
        evaluated = getattr(model, "test_function", None)
        is_other = evaluated is not self.traces["test"].function
        if evaluated is not None and is_other and _is_traced(evaluated):
            values = {key: each for key, each in now.items() if each.is_small}
            self.traces["test"] = Trace(function=evaluated, values=values)

    def _continue_from(self, before: Attributes, now: Mapping[Any, bytes]) -> None:
        """Counts values as changed that an earlier fit has changed.

        Args:
            before: values of the earlier fit.
            now: digests of the values at the beginning of this fit.
        """
        is_same_model = before._roots["model"] is self._roots["model"]
        for key, digest in now.items():
            # A key that is no tuple is a path.
            is_of_both = is_same_model or isinstance(key, tuple)
            is_kept = before._at_end.get(key) == digest and key in before._at_start
            if is_of_both and is_kept:
                self._at_start[key] = before._at_start[key]
                if key in before._settings:
                    self._settings[key] = dataclasses.replace(
                        before._settings[key], name=self._settings[key].name
                    )

    def _continue(self, model: Any, before: Attributes) -> None:
        """Continues the traces of the last fit of the model in this process."""
        self._traced = before._traced
        if self._optimizer is before._optimizer:
            self._has_stepped, self._at_first = before._has_stepped, before._at_first
            for name, function in _functions(model).items():
                if function is before._functions[name]:
                    self.traces[name] = before.traces[name]

    def end(self) -> None:
        """Stores the values at the end of the fit for the model's next fit."""
        model = self._roots["model"]
        now = self._look()
        self._at_end = {key: each.encoded.digest for key, each in now.items()}
        # The model outlives the fit, so references to the fit's objects are dropped.
        self._reached, self._looked = None, {}
        self._functions = _functions(model)
        vars(model)[_KEPT] = self
        _ended[id(self)] = self

    def capture(self) -> EncodedValue:
        """Returns the changed values; warns once of changes that cannot be saved."""
        rows: list[tuple[str, Any, EncodedValue, str]] = []  # owner, key, value, kind
        values_of_traces = [
            (_KINDS[name], trace.values) for name, trace in self.traces.items()
        ]
        for key, value in self._look().items():
            digest = value.encoded.digest
            then: dict[str, EncodedValue] = {}
            for kind, traced in values_of_traces:
                was = traced.get(key)
                if was is not None and was.encoded.digest != digest:
                    then[kind] = was.encoded
            is_as_started = digest == self._at_start.get(key)
            if key in self._traced or (is_as_started and not then):
                continue
            if value.problem is not None:
                self.lose(f"the change of {value.location.path}", value.problem + _KEEP)
                continue
            values = {"newest": value.encoded, **then}
            rows += [(*value.name, each, kind) for kind, each in values.items()]
        for name, trace in self.traces.items():
            has_changed = any(kind == _KINDS[name] for *_, kind in rows)
            if has_changed and len(trace.kinds) > 1:
                self.lose(
                    f"the settings of all traces of the {name} function", _KINDS_WHY
                )
        if self.traces["test"].values:  # marks the test function as traced
            rows.append(
                ("model", "test_function", EncodedValue(header=""), _KINDS["test"])
            )
        rows += [
            (*each.name, each.encoded, "first") for each in self._at_first.values()
        ]
        rows += [
            (what, "", EncodedValue(header=why), "lost")
            for what, why in self._lost.items()
        ]
        header = [
            [owner, key, each.header, len(each.arrays)]
            + ([kind] if kind != "newest" else [])
            for owner, key, each, kind in rows
        ]
        arrays = (array for _, _, each, _ in rows for array in each.arrays)
        return EncodedValue(header=header, arrays=tuple(arrays))

    def restore(self, saved: EncodedValue) -> None:
        """Restores the values in a result of `capture`."""
        values = _read(saved)
        self._has_stepped = True
        newest = dict(values["newest"])
        known = {
            key: dataclasses.replace(each, encoded=newest.pop(each.name), problem=None)
            for key, each in self._look().items()
            if each.name in newest
        }
        self._put(known)
        owners = {
            location.path: location.value
            for location in object_graph.walk(self._roots, _enters)
        }
        for (path, name), encoded in newest.items():  # attributes that do not exist yet
            self._set(owners.get(path), name, encoded, path)
        now = self._look()
        for name, trace in self.traces.items():
            then, built, trace.values = values[_KINDS[name]], trace.values, {}
            if name == "test" and not then:
                # The commit is older than the first trace of the test function, so the
                # trace of this start is too early.
                trace.outdated = list(built.values())
                continue
            for key, value in now.items():
                if key in self._traced and key in built:
                    # The next trace changes the value again.
                    trace.values[key] = built[key]
                elif value.is_small:
                    encoded = then.get(value.name, value.encoded)
                    trace.values[key] = dataclasses.replace(value, encoded=encoded)
            pairs = ((built[key], v) for key, v in trace.values.items() if key in built)
            trace.outdated = [
                new for was, new in pairs if was.encoded.digest != new.encoded.digest
            ]
            trace.is_due = bool(trace.outdated) or not built
        for (what, _), reason in values["lost"].items():
            if what not in self._lost:
                why = self._lost[what] = str(reason.header)
                log.warning("%s was not restored by this restart: %s.", what, why)

    def traced_by(
        self,
        step: Callable[..., Any],
        *args: Any,
        name: str = "train",
        is_kept: bool = True,
    ) -> Any:
        """Calls a step that traces a function; changes by the trace are not saved.

        Args:
            step: function to call.
            *args: arguments of the function.
            name: name of the traced function of Keras.
            is_kept: whether later steps use this trace; if not, changes made by the
                trace are undone, because the next trace repeats the changes.
        """
        newest: dict[Any, TrackedAttribute] = {}
        trace = self.traces[name]
        if is_kept and trace.is_due:
            newest = self._put(trace.values)
        before = self._look()
        try:
            return step(*args)
        finally:
            for key, value in self._look().items():
                was = before.get(key, self._settings.get(key))
                if was is not None and was.encoded.digest == value.encoded.digest:
                    continue
                if is_kept:
                    self._traced.add(key)
                elif was is not None and was.problem is None:
                    # An item of a tuple cannot be set; a changed tuple is a new tuple.
                    with contextlib.suppress(*_UNPLACED):
                        _put(
                            value.location.owner,
                            value.location.key,
                            was.encoded.value(),
                        )
            if is_kept and not trace.values:
                trace.values = {k: each for k, each in before.items() if each.is_small}
                if name == "train" and not self._has_stepped:
                    self._has_stepped = True
                    self._at_first = {
                        # A restart finds the owner before the model is built.
                        key: dataclasses.replace(each, name=self._settings[key].name)
                        for key, each in trace.values.items()
                        if each.is_setting
                        and each.encoded.digest != self._at_start[key]
                    }
            if is_kept:
                trace.is_due = False
                self._put(newest)

    @contextlib.contextmanager
    def as_first(self, saved: EncodedValue) -> Iterator[None]:
        """Sets the settings of the fit's first step, which determine the variables.

        Args:
            saved: result of `capture`.
        """
        first = _read(saved)["first"]
        for key, value in self._look().items():
            if value.is_setting and value.name in first:
                self._at_first[key] = dataclasses.replace(
                    value, encoded=first[value.name], problem=None
                )
        settings = self._settings | self._at_first
        newest = self._put({k: v for k, v in settings.items() if v.is_small})
        try:
            yield
        finally:
            self._put(newest)

    def name_due_trace(self) -> None:
        """Warns of test function settings that no trace of this fit restores."""
        trace = self.traces["test"]
        newest = self._look()
        pairs = [(newest.get(key), was) for key, was in trace.values.items()]
        if trace.is_due and any(
            now and now.encoded.digest != was.encoded.digest for now, was in pairs
        ):
            log.warning(
                "the settings with which the test function was traced were not "
                "restored by this restart: this fit is complete and does not "
                "validate again, so evaluate() and the first validation of a later "
                "fit use the newest settings. Call make_test_function(force=True) "
                "after this fit, so that an uninterrupted run uses these settings, "
                "too."
            )

    def forget_trace(self, name: str) -> None:
        """Lets the next trace of a function use the values of that moment."""
        self.traces[name] = Trace()

    def must_trace_again(self, name: str, *, only_for_settings: bool) -> bool:
        """Whether a function with an outdated trace must be traced again.

        Args:
            name: name of Keras' function, which has outdated values.
            only_for_settings: whether to ignore the program's own values. These values
                may differ between workers, and every worker must trace equally often. A
                warning names ignored values.
        """
        outdated = self.traces[name].outdated
        if not only_for_settings or any(value.is_setting for value in outdated):
            return True
        for value in outdated:
            log.warning(
                "the %s function of the interrupted run was traced while "
                "%r of %s was %r. The trace of this restart has another value, because "
                "with several workers only settings of Keras are restored in a trace. "
                "Training continues with that other value. Keep the value in a "
                "tf.Variable.",
                name,
                value.name[1],
                value.name[0],
                value.encoded.value(),
            )
        return False

    def lose(self, what: str, why: str) -> None:
        """Warns once of a change that a restart does not restore.

        Args:
            what: description of the change.
            why: the reason, and advice.
        """
        if what not in self._lost:
            self._lost[what] = why
            log.warning("%s will not be restored after a restart: %s.", what, why)

    def _put(
        self, wanted: Mapping[Any, TrackedAttribute]
    ) -> dict[Any, TrackedAttribute]:
        """Sets values by key, and no other values; returns the replaced values."""
        replaced = {}
        for key, value in self._look().items() if wanted else ():  # models come first
            (path, name), owner = value.name, value.location.owner
            if key in wanted and wanted[key].encoded.digest != value.encoded.digest:
                replaced[key] = value
                self._set(owner, name, wanted[key], path)
            elif value.is_setting and (
                getattr(owner, value.location.key) is not value.location.value
            ):  # setting `trainable` of a model also sets its layers' attribute
                setattr(owner, name, value.location.value)
        return replaced

    def _set(
        self, owner: Any, name: Any, then: TrackedAttribute | EncodedValue, path: str
    ) -> None:
        try:
            _put(owner, name, then.value())
        except (*_UNPLACED, errors.CheckpointCorruptedError) as error:
            why = f"the attribute cannot be set: {error!r}"
            self.lose(f"the change of {name!r} of {path}", why + _KEEP)

    def _look(self) -> Mapping[Any, TrackedAttribute]:
        """Returns the current values by keys that stay equal when a model is built."""
        if self._reached is not None and self._reached.is_unchanged():
            changing = {key: self._looked[key].taken_again() for key in self._changing}
            self._looked = {**self._looked, **changing}
        else:
            reached = object_graph.Reached()
            self._looked = looked = self._look_through(reached)
            self._changing = [
                key
                for key, each in looked.items()
                # A value that cannot be restored has a digest of its repr.
                if (each.problem is not None and _may_change(each.location.value))
                or any(map(_may_change, _leaves(each.location.value)))
            ]
            self._reached = reached
        return self._looked

    def _look_through(
        self, reached: object_graph.Reached
    ) -> dict[Any, TrackedAttribute]:
        """Returns the values of every object in the model.

        Args:
            reached: receives the objects in the model.
        """
        looked: dict[Any, TrackedAttribute] = {}
        paths: dict[int, str] = {}
        dealt_with: set[int] = set()  # containers saved as a whole, or not of the user
        for location in object_graph.walk(self._roots, _enters, reached=reached):
            owner, value = location.owner, location.value
            paths.setdefault(id(value), location.path)
            kind: type = type(owner)
            is_attribute = owner is not None and not object_graph.is_container(owner)
            if is_attribute:
                is_users = _is_users(kind, location.key)
            else:
                is_users = owner is not None and isinstance(location.key, str | int)
            is_users = is_users and id(owner) not in dealt_with
            setting = None
            # A layer may convert a setting to a tensor when the layer is built.
            if is_attribute and not is_users and not isinstance(value, tf.Tensor):
                setting = _setting(kind, location.key)
            is_container = object_graph.is_container(value)
            if not is_users and setting is None:
                if is_container:
                    dealt_with.add(id(value))
                continue
            is_whole = object_graph.is_data(value) or all(
                isinstance(leaf, _PLAIN) for leaf in _leaves(value)
            )
            if is_container and (is_whole or not is_users):
                dealt_with.add(id(value))
            if not (is_whole or (setting is not None and not is_container)):
                continue
            self._owners[id(owner)] = owner
            path = paths[id(owner)]
            if setting is None:
                key = (
                    location.path
                    if object_graph.is_container(owner)
                    else (id(owner), location.key)
                )
                looked[key] = _taken(location, path, None)
                continue
            # The layer may be made after the beginning of the fit.
            key = id(owner), location.key
            found = self._settings.get(key)
            is_seen = found is not None and found.location.value is value
            if found is None or not is_seen or _may_change(value):
                found = _taken(location, path, setting)
            if key not in self._settings:
                self._settings[key] = found
                self._at_start[key] = found.encoded.digest
            if found.location.path != location.path or found.name != (path, setting):
                found = dataclasses.replace(
                    found, location=location, name=(path, setting)
                )
            looked[key] = found
        return looked


def _is_traced(function: Any) -> bool:
    """Whether a function of Keras was traced; True if unknown."""
    cells = getattr(function, "__closure__", None) or ()
    parts = [function, *(cell.cell_contents for cell in cells)]
    name = "experimental_get_tracing_count"
    counts = [getattr(each, name)() for each in parts if hasattr(each, name)]
    return any(counts) or not counts


def _functions(model: Any) -> dict[str, Any]:
    return {name: getattr(model, f"{name}_function", None) for name in _KINDS}


@functools.cache
def _enters(kind: type) -> bool:
    return any(hasattr(kind, n) for n in _HOLDING) or object_graph.is_user_code(kind)


@functools.cache
def _is_users(kind: type, key: str) -> bool:
    """Whether an attribute is the user's, and not set by Keras or TensorFlow."""
    is_hidden = not object_graph.is_user_code(kind) and key.startswith("_")
    return not is_hidden and not object_graph.is_set_by_library(kind, key)


@functools.cache
def _setting(kind: type, key: str) -> str | None:
    """Returns the name by which a library's setting is set; None for a non-setting."""
    if not hasattr(kind, "get_config"):
        return None
    names, public = _arguments(kind), key.removeprefix("_")
    if key in names:
        return key
    has_setter = getattr(getattr(kind, public, None), "fset", None) is not None
    return public if public in names and has_setter else None


@functools.cache
def _arguments(kind: type) -> frozenset[str]:
    """Returns the constructor arguments of a class's library bases.

    The class itself is included if it is a library's class.
    """
    kinds = (each for each in kind.__mro__ if not object_graph.is_user_code(each))
    makers = (vars(each).get("__init__") for each in kinds)
    functions = filter(inspect.isfunction, map(inspect.unwrap, filter(None, makers)))
    names = (inspect.signature(each).parameters for each in functions)
    return frozenset[str]().union(*names)


def _may_change(value: Any) -> bool:
    """Whether the contents of a value may change in the same object."""
    if isinstance(value, tuple | frozenset):
        return any(map(_may_change, value))
    is_scalar = isinstance(value, np.generic) and not isinstance(value, np.void)
    is_fixed = is_scalar or type(value) in _FIXED
    return isinstance(value, object_graph.GROWING) or (
        isinstance(value, _PLAIN) and not is_fixed
    )


def _leaves(value: Any) -> Iterator[Any]:
    """Yields the items of nested containers; yields any other value itself."""
    if object_graph.is_container(value) or isinstance(value, set | frozenset):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    else:
        yield value


def _taken(
    location: object_graph.ObjectPath, owner: str, setting: str | None
) -> TrackedAttribute:
    encoded, problem = EncodedValue(header=""), None
    leaves = list(_leaves(location.value))
    arrays = (leaf for leaf in leaves if isinstance(leaf, np.ndarray))
    if setting is not None and not all(isinstance(leaf, _PLAIN) for leaf in leaves):
        encoded = EncodedValue(header=id(location.value))
        problem = f"a {type(location.value).__name__} is not a plain value"
    elif (
        object_graph.is_data(location.value)
        or sum(each.nbytes for each in arrays) > _LARGE
    ):
        size = f"{object_graph.MANY} items or {_LARGE >> 20} MiB"
        problem = f"more than {size} are taken for data"
    else:
        try:
            encoded = EncodedValue.of(_bare(location.value), "it")
        except errors.SaveError as error:
            encoded = EncodedValue(header=repr(_state_of(location.value)))
            problem = str(error)
    if problem is not None:
        encoded = EncodedValue(header=[problem, encoded.header])
    return TrackedAttribute(
        location=location,
        name=(owner, setting or location.key),
        is_setting=setting is not None,
        encoded=encoded,
        problem=problem,
    )


def _bare(value: Any) -> Any:
    """Returns a container without the wrappers of TensorFlow or Keras.

    Raises:
        SaveError: the container has a type that a restore would change, such as
            Counter.
    """
    if object_graph.is_container(value):
        kind = type(getattr(value, "__wrapped__", value))
        is_wrapper = kind.__module__.partition(".")[0] in object_graph.FRAMEWORKS
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
    if object_graph.is_container(owner):
        owner[key] = value
        return
    now = getattr(owner, key, None)
    if isinstance(now, collections.deque):
        value = collections.deque(value, now.maxlen)
    setattr(owner, key, value)
