"""The state of the user's callbacks in a fit: captured at commits, restored at resumes.

A state is restored at the point of the loop where it was captured: before a train step,
at the beginning of a validation, or at the end of the training. Capture and restore run
on the main thread, between the hooks of the callbacks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfpreempt import errors
from tfpreempt.checkpoint.state.encoding import decode, encode, readable
from tfpreempt.keras.callbacks import builtin_callbacks, callback_files
from tfpreempt.keras.fit_record import EncodedValue

log = logging.getLogger(__name__)


def capture(callbacks: Sequence[Any], *, leaves_out: bool = False) -> EncodedValue:
    """Returns a copy of the state of the callbacks, without their log files.

    Args:
        callbacks: callbacks of the fit, without the PreemptionCallback.
        leaves_out: whether an error of a callback is logged, not raised, so that the
            commit lacks only the state of this callback.

    Raises:
        SaveError: `get_state()` of a callback returns a value that cannot be saved.
        Exception: an error raised by `get_state()` itself.
    """
    arrays: list[bytes] = []
    header: dict[str, Any] = {}
    for name, callback in _by_name(callbacks).items():
        before, entry = len(arrays), {}
        try:
            if found := builtin_callbacks.capture(callback):
                path = f"The callback {name} cannot be saved: its state"
                entry["keras"] = encode(found, path, arrays, takes_tensors=True)
            if builtin_callbacks.has_hooks(callback):
                path = f"The callback {name} cannot be saved: get_state()"
                entry["own"] = encode(callback.get_state(), path, arrays)
        except Exception as error:
            if not leaves_out:
                raise
            del arrays[before:]
            log.error(
                "this commit lacks the state of the callback %s. After a restart from "
                "this commit, the callback starts with its initial state: %s",
                name,
                error,
            )
        else:
            header |= {name: entry} if entry else {}
    return EncodedValue(header=header, arrays=tuple(arrays))


def restore(
    callbacks: Sequence[Any], states: EncodedValue, *, extends: bool = False
) -> None:
    """Restores the state of the callbacks.

    A saved state belongs to the callback of the same class; several callbacks of one
    class are matched in their order. A warning names callbacks without a saved state,
    and saved states without a callback.

    Args:
        callbacks: callbacks of the fit, after the calls of their hooks up to the
            resumed position.
        states: result of `capture`.
        extends: whether the state was saved at the end of a fit that now continues with
            more epochs.

    Raises:
        CheckpointCorruptedError: the states were not made by `capture`.
    """
    for callback, entry in _matched(
        callbacks,
        states.header,
        lambda each: (
            builtin_callbacks.kind(each) in builtin_callbacks.KEPT
            or builtin_callbacks.has_hooks(each)
        ),
    ):
        with readable(callback):
            if "keras" in entry:
                remembered = decode(entry["keras"], states.arrays)
                builtin_callbacks.restore(callback, remembered, extends=extends)
            own = "own" in entry
            given = decode(entry["own"], states.arrays) if own else None
        if own and builtin_callbacks.has_hooks(callback):
            callback.set_state(given)


def capture_files(callbacks: Sequence[Any]) -> EncodedValue:
    """Returns the files of this worker's callbacks: the text of each CSVLogger.

    The function may be called before training begins. `on_train_begin` of a CSVLogger
    then truncates the file, and `restore_files` writes the text back. So the text is
    not lost if the fit trains no step.

    Args:
        callbacks: callbacks of the fit.

    Raises:
        OSError: a file cannot be read.
    """
    arrays: list[bytes] = []
    header = {
        name: encode(
            callback_files.capture(callback),
            f"The callback {name}",
            arrays,
            takes_bytes=True,
        )
        for name, callback in _by_name(callbacks).items()
        if builtin_callbacks.kind(callback) == callback_files.KIND
    }
    return EncodedValue(header=header, arrays=tuple(arrays))


def restore_files(
    callbacks: Sequence[Any], states: EncodedValue, *, extends: bool = False
) -> None:
    """Writes the saved text to the files of the callbacks.

    Args:
        callbacks: callbacks of the fit, after their `on_train_begin`.
        states: result of `capture_files`.
        extends: whether the state was saved at the end of a fit that now continues with
            more epochs.

    Raises:
        CheckpointCorruptedError: the states were not made by `capture_files`.
        OSError: a file cannot be written.
    """
    for callback, entry in _matched(
        callbacks,
        states.header,
        lambda each: builtin_callbacks.kind(each) == callback_files.KIND,
    ):
        with readable(callback):
            found = decode(entry, states.arrays)
            callback_files.restore(callback, found, extends=extends)


def _by_name(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Returns callbacks by class name. The name of the second callback of the same
    class ends with "#2", and so on."""
    found: dict[str, Any] = {}
    counts: dict[str, int] = {}
    for callback in callbacks:
        name = builtin_callbacks.class_name(callback)
        counts[name] = counts.get(name, 0) + 1
        found[name if counts[name] == 1 else f"{name}#{counts[name]}"] = callback
    return found


def _matched(
    callbacks: Sequence[Any], header: Any, is_kept: Callable[[Any], bool]
) -> Iterator[tuple[Any, Any]]:
    """Yields callbacks with their saved states. Logs a warning for a callback without a
    saved state, and for a saved state without a callback.

    Args:
        callbacks: callbacks of the fit.
        header: saved states by name.
        is_kept: function that returns whether commits contain the state of a callback.
    """
    now = _by_name(callbacks)
    if not isinstance(header, dict):
        raise errors.CheckpointCorruptedError(
            f"The saved state of the callbacks of a fit is a {type(header).__name__}; "
            "expected a dict with an entry for each callback"
        )
    for name, callback in now.items():
        if name in header:
            yield callback, header[name]
        elif is_kept(callback):
            log.warning(
                "the checkpoint has no state for the callback %s, so the callback "
                "starts with its initial state",
                name,
            )
    for name in header:
        if name not in now and not name.endswith(".ProgbarLogger"):
            log.warning(
                "the checkpoint has the state of a callback %s, but this fit has no "
                "callback of this name; the state is ignored",
                name,
            )
