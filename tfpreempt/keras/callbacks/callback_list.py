"""The user's callbacks of a fit: checks them before training, and calls their hooks.

The callbacks are not called for a step trained before a restart.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import pathlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfpreempt import errors
from tfpreempt.checkpoint.directory.layout import is_same
from tfpreempt.checkpoint.state.state import State
from tfpreempt.checkpoint.state.unsaved_state_check import SCALARS
from tfpreempt.core.object_graph import GROWING, set_by
from tfpreempt.keras.callbacks import builtin_callbacks
from tfpreempt.keras.callbacks.builtin_callbacks import class_name, has_hooks

log = logging.getLogger(__name__)

_DIRECTORIES = {
    "BackupAndRestore": "backup_dir",
    "ModelCheckpoint": "filepath",
    "OrbaxCheckpoint": "directory",
}
"""By class of a callback, the attribute with the path of the callback's checkpoints."""

_OF_KERAS = frozenset(
    {
        "_chief_worker_only",
        "_model",
        "_supports_tf_logs",
        "async_safe",
        "model",
        "params",
        "validation_data",
    }
)
"""Attributes that Keras sets on every callback, or reads from every callback."""


class UserCallbacks:
    """The callbacks that the user passed to `fit`.

    The constructor moves the PreemptionCallback to the end of the list, so that its
    hooks run last, and refuses callbacks that are incompatible with it.

    Args:
        holder: Keras' CallbackList.
        ours: the PreemptionCallback.
        checkpoint_dir: directory of the PreemptionCallback; no other callback may use
            it.

    Attributes:
        callbacks: the callbacks of the fit, without the PreemptionCallback.

    Raises:
        ConfigurationError: another callback writes to the same directory.
    """

    def __init__(self, holder: Any, ours: Any, checkpoint_dir: str) -> None:
        self._holder = holder
        self.callbacks = [one for one in holder.callbacks if one is not ours]
        self._all = [*self.callbacks, ours]
        self._ours = [ours]
        self._wrapped: list[str] = []
        conflicts(self.callbacks, checkpoint_dir)
        # Callbacks that no warning has named yet, with their numbers and texts at the
        # start. A second PreemptionCallback is refused in its own `on_train_begin`.
        self._unnamed = [
            (one, _plain_values(one))
            for one in self.callbacks
            if not isinstance(one, type(ours))
        ]
        self.name_unsaved()
        holder.callbacks = self._all

    def name_unsaved(self) -> None:
        """Logs a warning with the callbacks whose state is not saved, each once.

        Called at the start and for saves, because a hook may create attributes, and
        other code may change attributes.
        """
        found = [(each, unsupported([each[0]], each[1])) for each in self._unnamed]
        self._unnamed = [each for each, lost in found if not lost]
        if len(self._unnamed) < len(found):
            log.warning(
                "these callbacks have attributes that are not saved: %s. After a "
                "restart, the attributes have their initial values. Add get_state() "
                "and set_state(state), or keep the values in a tfpreempt.State.",
                "; ".join(text for _, lost in found for text in lost),
            )

    def wrap(self, **hooks: Callable[..., None]) -> None:
        """Replaces hooks of Keras' CallbackList by functions, until `unwrap`.

        Args:
            **hooks: functions by name of the hook. A function gets the original hook as
                its first argument, then the arguments of the hook.
        """
        for name, instead in hooks.items():
            hook = functools.partial(instead, getattr(self._holder, name))
            setattr(self._holder, name, hook)
            self._wrapped.append(name)

    def unwrap(self) -> None:
        """Restores the hooks of the CallbackList."""
        while self._wrapped:
            delattr(self._holder, self._wrapped.pop())

    def silence(self) -> None:
        """Makes Keras call only the PreemptionCallback, until `wake`.

        Used while Keras repeats a step that was trained before the restart: the user's
        callbacks were already called for the step.
        """
        self._holder.callbacks = self._ours

    def wake(self, hook: str | None = None, *args: Any) -> None:
        """Makes Keras call the user's callbacks again, after `silence`.

        Args:
            hook: name of a hook to call now, because Keras has already called it for
                the PreemptionCallback; None calls no hook.
            *args: arguments of the hook.
        """
        self._holder.callbacks = self._all
        if hook is not None:
            self.call(hook, *args)

    def call(self, hook: str, *args: Any) -> None:
        """Calls a hook of the user's callbacks.

        Args:
            hook: name of the hook.
            *args: arguments of the hook.
        """
        for callback in self.callbacks:
            getattr(callback, hook)(*args)

    def have_ended_at(self, epoch: int) -> bool:
        """Returns whether an EarlyStopping of Keras has stopped training at an epoch.

        Args:
            epoch: number of the epoch, from 0.
        """
        stoppers = (
            one
            for one in self.callbacks
            if builtin_callbacks.kind(one) == "EarlyStopping"
        )
        return epoch > 0 and any(one.stopped_epoch == epoch for one in stoppers)


def unsupported(
    callbacks: Sequence[Any], at_start: Mapping[str, Any] | None = None
) -> list[str]:
    """Returns the names of callbacks whose state may be lost, with the reason.

    Every attribute of a user's class is regarded as state, except values that training
    cannot change: functions, classes, modules, the model; and numbers and texts that
    only `__init__` assigns. A class attribute is regarded as state if a method assigns
    it, or if it is mutable, such as a list, and its name is not in capitals. A callback
    that holds a `State` is accepted: the `State` is assumed to have all its values.

    Args:
        callbacks: callbacks of the fit, without the PreemptionCallback.
        at_start: numbers and texts in the attributes at the start of the fit: a value
            that has changed since then is state; None if the fit now starts.
    """
    lost = []
    named = {"Callback", *builtin_callbacks.REMEMBERED}
    for callback in callbacks:
        # Find the nearest base class of Keras whose state is listed in `REMEMBERED`.
        kinds = type(callback).__mro__
        of_keras = (
            kind
            for kind in kinds
            if kind.__module__.startswith(builtin_callbacks.ROOTS)
        )
        anchor = next((kind for kind in of_keras if kind.__name__ in named), None)
        if anchor is kinds[0]:
            continue
        attributes = {**_defaults(type(callback)), **getattr(callback, "__dict__", {})}
        has_state = any(isinstance(v, State) for v in (callback, *attributes.values()))
        hooks = [hook for hook in ("get_state", "set_state") if hasattr(callback, hook)]
        if has_state or has_hooks(callback):
            continue
        if len(hooks) == 1:
            lost.append(
                f"{class_name(callback)} (has only {hooks[0]}; expected both get_state "
                "and set_state)"
            )
            continue
        understood = _OF_KERAS | (set_by(anchor) if anchor is not None else set())
        plain = _plain_values(callback)
        understood |= {
            name
            for name in plain.keys() - set_by(kinds[0], after_init=True)
            if at_start is None or (name, plain[name]) in at_start.items()
        }
        unknown = [
            name
            for name, value in attributes.items()
            if name not in understood and not _is_fixed(value, callback)
        ]
        if unknown:
            lost.append(f"{class_name(callback)} ({', '.join(unknown)})")
    return lost


def _plain_values(callback: Any) -> dict[str, Any]:
    """Returns the numbers and texts in a callback's attributes, by name."""
    attributes = getattr(callback, "__dict__", {})
    return {name: value for name, value in attributes.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    """Returns whether a value is a number or text, or a tuple of such values."""
    is_text = isinstance(value, (*SCALARS, pathlib.PurePath))
    return is_text or (type(value) is tuple and all(map(_is_plain, value)))


def _defaults(kind: type) -> dict[str, Any]:
    """Returns the class attributes of the user's classes that training may change, by
    name."""
    found: dict[str, Any] = {}
    for each in reversed(kind.__mro__):
        if not each.__module__.startswith(builtin_callbacks.ROOTS):
            found.update(vars(each))
    return {
        name: value
        for name, value in found.items()
        if not name.startswith("__")
        and not inspect.isdatadescriptor(value)
        and (
            name in set_by(kind)
            or isinstance(value, State)
            or (isinstance(value, GROWING) and not name.isupper())
        )
    }


def conflicts(callbacks: Sequence[Any], checkpoint_dir: str | os.PathLike[str]) -> None:
    """Raises an error for callbacks that write checkpoints into the directory of the
    PreemptionCallback.

    A BackupAndRestore of Keras with another directory only causes a warning.

    Args:
        callbacks: callbacks of the fit, without the PreemptionCallback.
        checkpoint_dir: directory of the PreemptionCallback.

    Raises:
        ConfigurationError: a callback writes into `checkpoint_dir` or below, or deletes
            a directory that contains `checkpoint_dir`.
    """
    ours = os.path.realpath(checkpoint_dir)
    for callback in callbacks:
        kind = builtin_callbacks.kind(callback)
        if kind not in _DIRECTORIES:
            continue
        attribute = _DIRECTORIES[kind]
        given = os.fspath(getattr(callback, attribute))
        # If the path has a format field such as {epoch}, compare the directory above
        # it.
        head, field, _ = given.partition("{")
        theirs = os.path.realpath(os.path.dirname(head) if field else head)
        is_backup = kind == "BackupAndRestore"
        if _is_inside(theirs, ours) or (is_backup and _is_inside(ours, theirs)):
            raise errors.ConfigurationError(
                f"{class_name(callback)} has {attribute}={given!r}, and "
                f"PreemptionCallback has checkpoint_dir={os.fspath(checkpoint_dir)!r}: "
                "one directory contains the other, so each callback would overwrite or "
                "delete files of the other. Use two separate directories, side by side."
            )
        if is_backup:
            log.warning(
                "%s (backup_dir=%r) is in the same fit as PreemptionCallback. Both "
                "load weights and set the first epoch at the start, which is a "
                "conflict. Remove %s: PreemptionCallback restores the same.",
                class_name(callback),
                callback.backup_dir,
                class_name(callback),
            )


def _is_fixed(value: Any, callback: Any) -> bool:
    """Returns whether training cannot change a value, so that no save is needed.

    Functions and classes do not change. Layers, models and metrics are callable too,
    but have variables, so they may change.
    """
    if callable(value):
        model = getattr(callback, "model", None)
        return value is model or not hasattr(type(value), "variables")
    return isinstance(value, types.ModuleType)


def _is_inside(inner: str, outer: str) -> bool:
    above = pathlib.PurePath(inner).parents
    return any(is_same(str(each), outer) for each in (inner, *above))
