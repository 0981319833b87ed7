"""Callbacks that do not go together with ours, told before the training begins."""

from __future__ import annotations

import logging
import os
import types
from collections.abc import Sequence
from typing import Any

from tfpreempt import errors
from tfpreempt.checkpoint.state import State
from tfpreempt.core.reach import set_by
from tfpreempt.keras.callbacks import known
from tfpreempt.keras.callbacks.known import class_name, has_hooks

log = logging.getLogger(__name__)

_DIRECTORIES = {
    "BackupAndRestore": "backup_dir",
    "ModelCheckpoint": "filepath",
    "OrbaxCheckpoint": "directory",
}
"""The attribute that says where a callback writes checkpoints."""

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
"""Attributes that Keras gives to every callback, or reads from it."""


def unsupported(callbacks: Sequence[Any]) -> list[str]:
    """Names the callbacks whose state may be lost, with the reason.

    Nothing tells a setting from something remembered, so any attribute that a class of
    the user has set counts, unless its value cannot change in training: functions,
    classes, modules, the model. A callback that has a `State` is taken to keep there
    all that it remembers.
    """
    lost = []
    for callback in callbacks:
        names = _unknown_attributes(callback)
        hooks = [hook for hook in ("get_state", "set_state") if hasattr(callback, hook)]
        if _has_own_state(callback) or has_hooks(callback):
            continue
        if len(hooks) == 1:
            lost.append(
                f"{class_name(callback)} (of get_state and set_state only "
                f"{hooks[0]} is there)"
            )
        elif names:
            lost.append(f"{class_name(callback)} ({', '.join(names)})")
    return lost


def conflicts(callbacks: Sequence[Any], checkpoint_dir: str | os.PathLike[str]) -> None:
    """Refuses callbacks that write checkpoints of their own into our directory.

    Args:
        callbacks: those of the fit, without our own.
        checkpoint_dir: our directory.

    Raises:
        ConfigurationError: one writes there or below; or it deletes a directory that
            ours lies in.
    """
    ours = os.path.realpath(checkpoint_dir)
    for callback in callbacks:
        kind = known.kind(callback)
        if kind not in _DIRECTORIES:
            continue
        attribute = _DIRECTORIES[kind]
        given = os.fspath(getattr(callback, attribute))
        theirs = os.path.realpath(_fixed_part(given))
        deletes_ours = kind == "BackupAndRestore" and _is_inside(ours, theirs)
        if _is_inside(theirs, ours) or deletes_ours:
            raise errors.ConfigurationError(
                f"{class_name(callback)} has {attribute}={given!r}, and the "
                "checkpoint_dir of PreemptionCallback is "
                f"{os.fspath(checkpoint_dir)!r}: one lies in the other, so that they "
                "would overwrite or delete each other's files. Give each a directory "
                "of its own, side by side."
            )


def warn_of_backup(callbacks: Sequence[Any]) -> None:
    """Warns of Keras' own BackupAndRestore; it is left as it is."""
    for callback in callbacks:
        if known.kind(callback) == "BackupAndRestore":
            log.warning(
                "tfpreempt: %s (backup_dir=%r) is in the same fit. It loads weights "
                "and sets the first epoch at the start, against what "
                "PreemptionCallback restores. Remove it: PreemptionCallback does its "
                "work.",
                class_name(callback),
                callback.backup_dir,
            )


def _has_own_state(callback: Any) -> bool:
    values = (callback, *_attributes(callback).values())
    return any(isinstance(value, State) for value in values)


def _unknown_attributes(callback: Any) -> list[str]:
    """Attributes that nobody saves and that could change in training."""
    anchor = next(filter(_is_understood, type(callback).__mro__), None)
    if anchor is type(callback):
        return []
    understood = _OF_KERAS | (set_by(anchor) if anchor is not None else set())
    return [
        name
        for name, value in _attributes(callback).items()
        if name not in understood and not _is_fixed(value, callback)
    ]


def _attributes(callback: Any) -> dict[str, Any]:
    return getattr(callback, "__dict__", {})


def _is_understood(cls: type) -> bool:
    """Whether all that this class of Keras itself remembers is saved."""
    is_named = cls.__name__ == "Callback" or cls.__name__ in known.REMEMBERED
    return is_named and known.is_of_keras(cls)


def _is_fixed(value: Any, callback: Any) -> bool:
    """Whether a value cannot be something remembered in training.

    Layers, models and metrics can be called, but hold variables.
    """
    if callable(value):
        model = getattr(callback, "model", None)
        return value is model or not hasattr(type(value), "variables")
    return isinstance(value, types.ModuleType)


def _fixed_part(path: str) -> str:
    """The path, or, if it has format fields such as {epoch}, the directory above."""
    head, field, _ = path.partition("{")
    return os.path.dirname(head) if field else head


def _is_inside(inner: str, outer: str) -> bool:
    return inner == outer or inner.startswith(os.path.join(outer, ""))
