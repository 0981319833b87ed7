"""Saves attributes of a model with plain Python values that training changes.

Examples are counters in user classes, and `Dropout.rate` set by a callback. The module
looks at attributes of the model, its layers, optimizers, losses and metrics, and of
user objects inside of these. Attributes of library classes are saved only if they are
settings: attributes named like a constructor argument, such as `SGD.momentum`, `L2.l2`
and `Layer.trainable`.

A commit has only values that changed since the beginning of the fit. So a restore does
not overwrite a value that the user edits in the program before a restart. Changes made
by the tracing of a step are excluded, because a restart traces the step again.

A traced train or test function keeps using the attribute values from the time of the
trace, even if a callback changes the attributes later. So a commit also contains the
values from the time of the trace. A restart sets these values, traces the function, and
then sets the newest values.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import inspect
import itertools
import logging
import math
import random
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tfpreempt import errors
from tfpreempt.checkpoint.state.encoding import readable
from tfpreempt.checkpoint.state.unsaved_state_check import (
    GENERATORS,
    mark_of_generator,
    sample_of,
)
from tfpreempt.core import frameworks, object_graph
from tfpreempt.core.object_graph import leaves
from tfpreempt.keras.fit_record import EncodedValue

log = logging.getLogger(__name__)

_CONTAINERS = (dict, list, tuple, collections.deque)
_PLAIN = (
    *(bool, int, float, complex, str, type(None), np.generic, np.ndarray, enum.Enum),
    *(random.Random, np.random.Generator, np.random.RandomState),
)
_REFILLED = (dict, list, collections.deque, np.ndarray)
_FIXED = frozenset({bool, int, float, str, type(None)})
_NOT_SAVED = "the value has type {}, which is not saved"
_KEEP = ". Keep the value in a NumPy array, a variable or a tfpreempt.State"
_SMALL = 1 << 12  # bytes; larger values are not stored with a trace
_SAMPLE = 1000  # elements of a tensor that are compared
_LARGE = 1 << 24  # bytes; larger values are regarded as data, and not saved
_KEPT = "_tfpreempt_attributes"
"""Name of a model's attribute for the `Attributes` of its last fit in this process."""
_KINDS = {"train": "traced", "test": "tested"}
"""By function of Keras, the kind (see `_read`) under which a commit has the attribute
values that the function's trace used."""
_UNPLACED = (KeyError, IndexError, AttributeError, TypeError, ValueError)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrackedAttribute:
    """An attribute of a model, and the Python value that the attribute had when read.

    Attributes:
        location: where in the model the value is found.
        name: (path of the object with the attribute, name of the attribute), as saved.
            If the object is a container, the second part is the item's key or index.
        is_setting: whether the attribute is a setting of a library class.
        encoded: the encoded value. If the value cannot be restored: the problem and a
            description of the value, so that `encoded.digest` changes with the value.
        problem: reason why the value cannot be restored; None if it can be restored.
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
        """Reads the value again, because a list or dict may have changed in place.
        Returns a new object with the current value."""
        owner, key = self.name
        return _taken(self.location, owner, key if self.is_setting else None)

    @property
    def is_small(self) -> bool:
        """Whether the value is small enough to be stored with a trace."""
        return self.problem is None and sum(map(len, self.encoded.arrays)) <= _SMALL


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """A value at the beginning of a fit.

    Attributes:
        digest: digest of the encoded value.
        value: the list, dict, deque or array, to distinguish a change in place from a
            replacement; None for other values, and for values that a restore replaces.
    """

    digest: bytes
    value: Any

    @classmethod
    def of(cls, taken: TrackedAttribute) -> _Start:
        value = taken.location.value
        # TensorFlow's wrapper for a list or dict cannot be saved after such a change.
        is_wrapper = type(value).__module__.startswith("tensorflow.")
        is_kept = isinstance(value, _REFILLED) and not is_wrapper
        is_kept &= taken.problem is None
        return cls(digest=taken.encoded.digest, value=value if is_kept else None)


_LORA_WHY = (
    "a restart makes the variables that the model has at the start of the fit. Call "
    "enable_lora() before fit, or between two fits, each with a separate checkpoint_dir"
)
_KINDS_WHY = (
    "the function is traced for each kind of data (structure, dtypes and shapes of a "
    "batch), settings have changed since its first trace, and only the settings of the "
    "first trace are restored. Call evaluate() in callbacks with data of the kind of "
    "validation_data, or call make_test_function(force=True) after a change of "
    "settings. On JAX a smaller last batch is another kind: make all batches equal, or "
    "call make_train_function(force=True) after a change of settings"
)


def _read(saved: EncodedValue) -> Mapping[str, Mapping[tuple[str, Any], EncodedValue]]:
    """Returns the values in a result of `Attributes.capture`, by kind, then by name.

    The kinds are:

    - "newest": the values at the capture;
    - "same": the values of lists, dicts, deques and arrays that are still the objects
      from the beginning of the fit;
    - "traced", "tested": the values when the train or the test function was traced;
    - "first": the settings at the first step of the fit;
    - "lost": changes that cannot be saved, with the reason instead of a value.
    """
    found: dict[str, Any] = collections.defaultdict(dict)
    arrays = iter(saved.arrays)
    with readable("model.fit"):
        for owner, key, head, n, *kind in saved.header:
            encoded = EncodedValue(header=head, arrays=(*itertools.islice(arrays, n),))
            found[str(kind[0]) if kind else "newest"][owner, key] = encoded
    return found


@dataclasses.dataclass(slots=True, kw_only=True)
class Trace:
    """Describes how the train or the test function of a model was traced.

    Attributes:
        function: the function traced in this process; None before the first trace.
        values: small attribute values, by key, at the time of the trace. After a
            restart, before the trace: the values with which the function must be
            traced. Empty before the first trace.
        is_due: whether the next call of the function must set `values` and trace.
        outdated: restored values that differ from the values used by the trace of this
            process.
        kinds: kinds of batches with which the function was called in this process;
            the framework makes a separate trace for every kind. On TensorFlow these
            are element specs.
    """

    function: Any = None
    values: dict[Any, TrackedAttribute] = dataclasses.field(default_factory=dict)
    is_due: bool = False
    outdated: list[TrackedAttribute] = dataclasses.field(default_factory=list)
    kinds: list[Any] = dataclasses.field(default_factory=list)


_ended: weakref.WeakValueDictionary[int, Attributes] = weakref.WeakValueDictionary()
"""The values of fits that ended, oldest first, as long as their models exist."""


class Attributes:
    """Saves and restores the Python attributes of a model during a fit.

    Use on the main thread only.

    A second fit of a model also saves the values that the first fit has changed,
    because a restart skips the first fit with its callbacks. This includes values of
    layers that several models share. Functions that were traced in the first fit are
    not traced again.

    Args:
        model: the model.

    Attributes:
        traces: the trace of the "train" function and of the "test" function.
    """

    def __init__(self, model: Any) -> None:
        self.traces = {name: Trace() for name in _KINDS}
        self._roots = {"model": model}
        self._traced: set[Any] = set()  # keys of values that a trace changes: not saved
        self._lost: dict[str, str] = {}  # change that cannot be restored -> reason
        # Layers with LoRA after the first step of this process; None before.
        self._with_lora: set[str] | None = None
        # Whether a step was trained, in this process or before a restart.
        self._has_stepped = False
        # Settings by key, as read for the first time.
        self._settings: dict[Any, TrackedAttribute] = {}
        # Keeps the objects alive whose id() is in a key.
        self._owners: dict[int, Any] = {}
        # Objects found by the newest traversal of the model.
        self._reached: object_graph.Reached | None = None
        # Values found by the newest call of `_look`.
        self._looked: Mapping[Any, TrackedAttribute] = {}
        # Keys of mutable values, which are read again at each `_look`.
        self._changing: list[Any] = []
        self._at_first: dict[Any, TrackedAttribute] = {}  # settings at the first step
        self._at_start: dict[Any, _Start] = {}
        now = self._look()
        self._at_start = {key: _Start.of(each) for key, each in now.items()}
        self._at_end: dict[Any, bytes] = {}
        self._optimizer = getattr(model, "optimizer", None)
        # Functions of the model at the end of the fit.
        self._functions: dict[str, Any] = {}
        at_begin = {key: each.digest for key, each in self._at_start.items()}
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
        """Makes this fit save the values that an earlier fit has changed, if the values
        are still the same at the beginning of this fit.

        Args:
            before: values of the earlier fit.
            now: digests of the values at the beginning of this fit, by key.
        """
        is_same_model = before._roots["model"] is self._roots["model"]
        for key, digest in now.items():
            # A key is (id of an object, name), or a path, which is valid in one model
            # only.
            is_of_both = is_same_model or isinstance(key, tuple)
            is_kept = before._at_end.get(key) == digest and key in before._at_start
            if is_of_both and is_kept:
                self._at_start[key] = before._at_start[key]
                if key in before._settings:
                    self._settings[key] = dataclasses.replace(
                        before._settings[key], name=self._settings[key].name
                    )

    def _continue(self, model: Any, before: Attributes) -> None:
        """Takes over the traces of the model's last fit in this process."""
        self._traced = before._traced
        if self._optimizer is before._optimizer:
            self._has_stepped, self._at_first = before._has_stepped, before._at_first
            for name, function in _functions(model).items():
                if function is before._functions[name]:
                    self.traces[name] = before.traces[name]

    def end(self) -> None:
        """Stores digests of the attribute values at the end of the fit, for the model's
        next fit."""
        model = self._roots["model"]
        now = self._look()
        self._at_end = {key: each.encoded.digest for key, each in now.items()}
        # Drop references to objects of the fit: this object lives as long as the model.
        self._reached, self._looked = None, {}
        self._functions = _functions(model)
        vars(model)[_KEPT] = self
        _ended[id(self)] = self

    def stepped(self) -> None:
        """Called after the first step of this process."""
        self._with_lora = _layers_with_lora(self._roots["model"])

    def capture(self) -> EncodedValue:
        """Returns the attribute values that this fit, or an earlier fit, has changed.

        Warns once of each change that cannot be saved.
        """
        if self._with_lora is not None:
            new = _layers_with_lora(self._roots["model"]) - self._with_lora
            if new:
                self.lose("the effect of enable_lora() inside fit", _LORA_WHY)
        rows: list[tuple[str, Any, EncodedValue, str]] = []  # owner, key, value, kind
        for key, value in self._look().items():
            digest = value.encoded.digest
            then = {
                _KINDS[name]: trace.values[key].encoded
                for name, trace in self.traces.items()
                if key in trace.values and trace.values[key].encoded.digest != digest
            }
            start = self._at_start.get(key)
            is_as_started = start is not None and start.digest == digest
            if key in self._traced or (is_as_started and not then):
                continue
            if value.problem is not None:
                self.lose(f"the change of {value.location.path}", value.problem + _KEEP)
                continue
            is_same = self._same(key, value) is not None
            values = {"same" if is_same else "newest": value.encoded, **then}
            rows += [(*value.name, each, kind) for kind, each in values.items()]
        for name, trace in self.traces.items():
            has_changed = any(kind == _KINDS[name] for *_, kind in rows)
            if has_changed and len(trace.kinds) > 1:
                self.lose(
                    f"the settings for all traces of the {name} function", _KINDS_WHY
                )
        # With this entry a restart knows that the test function was traced.
        if self.traces["test"].values:
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
        """Restores the attribute values of a commit.

        Args:
            saved: result of `capture`.
        """
        values = _read(saved)
        self._has_stepped = True
        newest = {**values["newest"], **values["same"]}
        known = {
            key: dataclasses.replace(each, encoded=newest.pop(each.name), problem=None)
            for key, each in self._look().items()
            if each.name in newest
        }
        for key, each in known.items():
            if each.name in values["newest"] and key in self._at_start:
                at_start = self._at_start[key]
                self._at_start[key] = dataclasses.replace(at_start, value=None)
        self._put(known)
        owners = {
            location.path: location.value
            for location in object_graph.walk(self._roots, object_graph.may_have_state)
        }
        # Set the saved attributes that the objects of this process do not have yet.
        for (path, name), encoded in newest.items():
            if _may_be_saved(owner := owners.get(path), name):
                self._set(owner, name, encoded, path)
        now = self._look()
        for name, trace in self.traces.items():
            then, built, trace.values = values[_KINDS[name]], trace.values, {}
            if name == "test" and not then:
                # At the time of the commit the test function was not traced yet, so the
                # trace of this process was made too early.
                trace.outdated = list(built.values())
                continue
            for key, value in now.items():
                if key in self._traced and key in built:
                    # Do not use the saved value: tracing changes the value again.
                    trace.values[key] = built[key]
                elif value.is_small:
                    encoded = then.get(value.name, value.encoded)
                    trace.values[key] = dataclasses.replace(value, encoded=encoded)
            pairs = ((built[key], v) for key, v in trace.values.items() if key in built)
            trace.outdated = [
                new for was, new in pairs if was.encoded.digest != new.encoded.digest
            ]
            trace.is_due = bool(trace.outdated) or not built

    def traced_by(
        self,
        step: Callable[..., Any],
        *args: Any,
        name: str = "train",
        is_kept: bool = True,
    ) -> Any:
        """Calls a function that traces. Later commits exclude the attribute values that
        the trace changes.

        Args:
            step: function to call.
            *args: arguments of the function.
            name: the traced function of Keras, "train" or "test".
            is_kept: whether later steps use this trace. If False, the changes made by
                the trace are undone, because the next trace makes them again.
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
                    # Ignore items of a tuple, which cannot be set: the tuple itself is
                    # set.
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
                        # Use the name from before the model was built, because a
                        # restart sets these values before it builds the model.
                        key: dataclasses.replace(each, name=self._settings[key].name)
                        for key, each in trace.values.items()
                        if each.is_setting
                        and each.encoded.digest != self._at_start[key].digest
                    }
            if is_kept:
                trace.is_due = False
                self._put(newest)

    @contextlib.contextmanager
    def as_first(self, saved: EncodedValue) -> Iterator[None]:
        """Context manager: in the body, the settings have their values from the first
        step of the fit, because these settings determine the variables of the model.

        Warns of the changes that the commit lacks.

        Args:
            saved: result of `capture`.
        """
        values = _read(saved)
        # Warn now: the lost changes may also be the cause of an error in the body.
        for (what, _), reason in values["lost"].items():
            if what not in self._lost:
                why = self._lost[what] = str(reason.header)
                log.warning("%s was not restored by this restart: %s.", what, why)
        first = values["first"]
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
        """Logs a warning if this fit, which is complete, has not restored the settings
        with which the test function was traced."""
        trace, newest = self.traces["test"], self._look()
        if trace.is_due and any(
            key in newest and newest[key].encoded.digest != was.encoded.digest
            for key, was in trace.values.items()
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
        """Discards the values of a trace: the next trace uses the current values."""
        self.traces[name] = Trace()

    def must_trace_again(self, name: str, *, only_for_settings: bool) -> bool:
        """Returns whether a function must be traced again because of outdated values.

        Args:
            name: "train" or "test"; the function's trace has outdated values.
            only_for_settings: whether outdated attributes of user classes cause only a
                warning: such attributes may differ between workers, but every worker
                must trace equally often.
        """
        outdated = self.traces[name].outdated
        if not only_for_settings or any(value.is_setting for value in outdated):
            return True
        for value in outdated:
            log.warning(
                "the %s function of the interrupted run was traced while %r of %s was "
                "%r. The trace of this restart has another value, because with several "
                "workers only settings of Keras are restored in a trace. Training "
                "continues with the other value. Keep the value in a tf.Variable.",
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
        """Sets the given attribute values; returns the replaced values, by key."""
        replaced = {}
        # `_look` returns a model before its layers, so a layer's own value is set last.
        for key, value in self._look().items() if wanted else ():
            (path, name), owner = value.name, value.location.owner
            if key in wanted and wanted[key].encoded.digest != value.encoded.digest:
                replaced[key] = value
                self._set(owner, name, wanted[key], path, self._same(key, value))
            elif value.is_setting and (
                getattr(owner, value.location.key) is not value.location.value
            ):  # undo a side effect: `trainable` of a model also changes its layers
                setattr(owner, name, value.location.value)
        return replaced

    def _same(self, key: Any, now: TrackedAttribute) -> Any:
        """Returns the list, dict, deque or array that an attribute has had since the
        beginning of the fit; None for replaced values and for other values."""
        start, value = self._at_start.get(key), now.location.value
        return value if start is not None and start.value is value else None

    def _set(
        self,
        owner: Any,
        name: Any,
        then: TrackedAttribute | EncodedValue,
        path: str,
        same: Any = None,
    ) -> None:
        try:
            value = then.value()
            if not _refill(same, value):
                _put(owner, name, value)
        except (*_UNPLACED, errors.CheckpointCorruptedError) as error:
            why = f"the attribute cannot be set: {error!r}"
            self.lose(f"the change of {name!r} of {path}", why + _KEEP)

    def _look(self) -> Mapping[Any, TrackedAttribute]:
        """Returns the current attribute values, by key.

        When the model is built, the paths of its objects change, but not the keys.
        """
        if self._reached is not None and self._reached.is_unchanged():
            changing = {key: self._looked[key].taken_again() for key in self._changing}
            self._looked = {**self._looked, **changing}
        else:
            reached = object_graph.Reached()
            self._looked = looked = self._look_through(reached)
            self._changing = [
                key
                for key, each in looked.items()
                # Include mutable values that cannot be restored: their digest contains
                # the repr of the value, and so shows a change.
                if (each.problem is not None and _may_change(each.location.value))
                or any(map(_may_change, leaves(each.location.value)))
            ]
            self._reached = reached
        return self._looked

    def _look_through(
        self, reached: object_graph.Reached
    ) -> dict[Any, TrackedAttribute]:
        """Traverses the model, and returns all attribute values, by key.

        Args:
            reached: records the traversed objects, so that later changes can be
                detected.
        """
        looked: dict[Any, TrackedAttribute] = {}
        paths: dict[int, str] = {}
        # Containers whose items are skipped, because the container is saved as a whole,
        # or does not belong to the user.
        dealt_with: set[int] = set()
        known = frameworks.adapters("values")
        tensors = tuple(kind for each in known for kind in each.REPLACED)
        for location in object_graph.walk(
            self._roots, object_graph.may_have_state, reached=reached
        ):
            owner, value = location.owner, location.value
            paths.setdefault(id(value), location.path)
            kind: type = type(owner)
            if owner is None:  # the model
                continue
            is_item, setting = object_graph.is_container(owner), None
            if is_item:
                is_key = isinstance(location.key, str | int)
                is_users = is_key and id(owner) not in dealt_with
            else:
                is_users = _is_users(kind, location.key)
            # Skip tensors: a layer may convert a setting to a tensor when the layer is
            # built.
            if not (is_item or is_users or isinstance(value, tensors)):
                setting = _setting(kind, location.key)
            is_container = object_graph.is_container(value)
            if not is_users and setting is None:
                if is_container:
                    dealt_with.add(id(value))
                continue
            is_whole = (
                object_graph.is_data(value)
                or isinstance(value, tensors)
                or all(isinstance(leaf, _PLAIN) for leaf in leaves(value))
            )
            if is_container and (is_whole or not is_users):
                dealt_with.add(id(value))
            if not (is_whole or (setting is not None and not is_container)):
                continue
            self._owners[id(owner)] = owner
            path = paths[id(owner)]
            if setting is None:
                key = location.path if is_item else (id(owner), location.key)
                looked[key] = taken = _taken(location, path, None)
                if isinstance(value, tensors):
                    # A tensor that is new may be a constant that the first step made.
                    # So its first value counts as its value at the start of the fit:
                    # commits contain the tensor only if the value changes later.
                    self._at_start.setdefault(key, _Start.of(taken))
                continue
            # If the setting is new, because its layer was made during the fit, the
            # value found now counts as the value at the start.
            key = id(owner), location.key
            found = self._settings.get(key)
            if found is None or found.location.value is not value or _may_change(value):
                found = _taken(location, path, setting)
            if key not in self._settings:
                self._settings[key] = found
                self._at_start[key] = _Start.of(found)
            if found.location.path != location.path or found.name != (path, setting):
                found = dataclasses.replace(
                    found, location=location, name=(path, setting)
                )
            looked[key] = found
        return looked


def _is_traced(function: Any) -> bool:
    """Returns whether a function of Keras was traced; True if unknown."""
    cells = getattr(function, "__closure__", None) or ()
    parts = [function, *(cell.cell_contents for cell in cells)]
    name = "experimental_get_tracing_count"
    counts = [getattr(each, name)() for each in parts if hasattr(each, name)]
    return any(counts) or not counts


def _layers_with_lora(model: Any) -> set[str]:
    layers = model._flatten_layers()
    return {each.name for each in layers if getattr(each, "lora_enabled", False)}


def _functions(model: Any) -> dict[str, Any]:
    return {name: getattr(model, f"{name}_function", None) for name in _KINDS}


def _may_be_saved(owner: Any, name: Any) -> bool:
    """Returns whether `capture` can have saved an attribute of an object.

    Another user may have written the commit. With any other name, the commit could
    change the internals of a library.
    """
    if owner is None or object_graph.is_container(owner):
        return True
    kind: type = type(owner)
    is_name = isinstance(name, str) and not name.startswith("__")
    return is_name and (_is_users(kind, name) or _setting(kind, name) is not None)


@functools.cache
def _is_users(kind: type, key: str) -> bool:
    """Returns whether an attribute was defined by the user, not by Keras or
    TensorFlow."""
    is_hidden = not object_graph.is_user_code(kind) and key.startswith("_")
    return not is_hidden and not object_graph.is_set_by_library(kind, key)


@functools.cache
def _setting(kind: type, key: str) -> str | None:
    """Returns the name of the attribute to assign, such as "trainable", to change the
    setting in the attribute `key`, such as "_trainable"; None if `key` is no
    setting."""
    if not hasattr(kind, "get_config"):
        return None
    names, public = _arguments(kind), key.removeprefix("_")
    if key in names:
        return key
    has_setter = getattr(getattr(kind, public, None), "fset", None) is not None
    return public if public in names and has_setter else None


@functools.cache
def _arguments(kind: type) -> frozenset[str]:
    """Returns the names of the constructor arguments of a class.

    Includes the base classes, and excludes constructors written by the user.
    """
    kinds = (each for each in kind.__mro__ if not object_graph.is_user_code(each))
    makers = (vars(each).get("__init__") for each in kinds)
    functions = filter(inspect.isfunction, map(inspect.unwrap, filter(None, makers)))
    names = (inspect.signature(each).parameters for each in functions)
    return frozenset[str]().union(*names)


def _may_change(value: Any) -> bool:
    """Returns whether a value is mutable, or contains mutable values."""
    if isinstance(value, tuple | frozenset):
        return any(map(_may_change, value))
    is_scalar = isinstance(value, np.generic) and not isinstance(value, np.void)
    is_fixed = is_scalar or type(value) in _FIXED
    return isinstance(value, object_graph.GROWING) or (
        isinstance(value, _PLAIN) and not is_fixed
    )


def _taken(
    location: object_graph.ObjectPath, owner: str, setting: str | None
) -> TrackedAttribute:
    encoded, problem, value = EncodedValue(header=""), None, location.value
    found = list(leaves(value))
    arrays = (leaf for leaf in found if isinstance(leaf, np.ndarray))
    if setting is not None and not all(isinstance(leaf, _PLAIN) for leaf in found):
        encoded = EncodedValue(header=id(value))
        problem = _NOT_SAVED.format(type(value).__name__)
    elif hasattr(value, "dtype") and not isinstance(value, _PLAIN):
        encoded = EncodedValue(header=_content(value))
        problem = _NOT_SAVED.format(type(value).__name__)
    elif object_graph.is_data(value) or sum(each.nbytes for each in arrays) > _LARGE:
        size = f"{object_graph.MANY} items or {_LARGE >> 20} MiB"
        problem = f"values of more than {size} are regarded as data and not saved"
    else:
        try:
            encoded = EncodedValue.of(_bare(value))
        except errors.SaveError as error:
            is_generator = isinstance(value, GENERATORS)
            mark = mark_of_generator(value) if is_generator else value
            encoded = EncodedValue(header=repr(mark))
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
    """Returns a container as plain Python, without wrappers of TensorFlow or Keras.

    Raises:
        SaveError: a restore would not give the container the same type, such as
            Counter.
    """
    if object_graph.is_container(value):
        kind = type(getattr(value, "__wrapped__", value))
        is_wrapper = kind.__module__.partition(".")[0] in object_graph.FRAMEWORKS
        if kind not in _CONTAINERS and not is_wrapper:
            raise errors.SaveError(
                f"a restore would change the type of the value ({kind.__name__})"
            )
    if isinstance(value, dict):
        return {key: _bare(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_bare, value))
    if isinstance(value, list | collections.deque):
        return list(map(_bare, value))
    return value


def _content(tensor: Any) -> str:
    """Returns some elements of a tensor as text: another text at a later call means
    that a step has replaced the tensor."""
    # A symbolic tensor has no elements, and raises an error.
    with contextlib.suppress(*_UNPLACED, RuntimeError):
        # A larger tensor counts as data, like a larger array, and is not compared. The
        # rows of a RaggedTensor have no fixed size.
        if math.prod(each or 1 for each in tensor.shape) <= _LARGE >> 2:
            some = sample_of(frameworks.adapters("values"), tensor, _SAMPLE)
            return "" if some is None else repr(some.tolist())
    return ""


def _refill(now: Any, value: Any) -> bool:
    """Replaces the contents of a list, dict, deque or array.

    Training has changed the object in place, so other parts of the program may use the
    same object: a global variable, or a callback that fills the buffer of a model.

    Args:
        now: the object; None if the attribute has another object than in the
            interrupted run.
        value: the new contents.

    Returns:
        False if the object cannot hold the contents; the object is then unchanged.
    """
    if isinstance(now, np.ndarray) and isinstance(value, np.ndarray):
        if (now.shape, now.dtype) != (value.shape, value.dtype):
            return False
        now[...] = value
    elif isinstance(now, dict) and isinstance(value, dict):
        now.clear()
        now.update(value)
    elif isinstance(now, list | collections.deque) and isinstance(value, list):
        now.clear()
        now.extend(value)
    else:
        return False
    return True


def _put(owner: Any, key: Any, value: Any) -> None:
    if object_graph.is_container(owner):
        owner[key] = value
        return
    now = getattr(owner, key, None)
    if isinstance(now, collections.deque):
        value = collections.deque(value, now.maxlen)
    setattr(owner, key, value)
