"""The state of the other callbacks of a fit: captured at a commit, restored after it.

Both happen at the same point of the program: before a train step, where a validation
begins, or after a training. All of it runs on the main thread, with no hook of a
callback on its way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfpreempt import errors
from tfpreempt.checkpoint.state.encoding import decode, encode, readable
from tfpreempt.keras.callbacks import files, known
from tfpreempt.keras.record import Encoded

log = logging.getLogger(__name__)


def capture(callbacks: Sequence[Any], *, leaves_out: bool = False) -> Encoded:
    """What the callbacks remember in memory; equal on all workers.

    Args:
        callbacks: those of the fit, without our own.
        leaves_out: one that fails is left out, and named: a commit is worth more.

    Raises:
        SaveError: `get_state()` of one of them gives what cannot be kept; whatever that
            raises itself.
    """
    arrays: list[bytes] = []
    header: dict[str, Any] = {}
    for name, callback in _by_name(callbacks).items():
        before, entry = len(arrays), {}
        try:
            if found := known.capture(callback):
                path = f"The callback {name} cannot be saved: its state"
                entry["keras"] = encode(found, path, arrays, takes_tensors=True)
            if known.has_hooks(callback):
                path = f"The callback {name} cannot be saved: get_state()"
                entry["own"] = encode(callback.get_state(), path, arrays)
        except Exception as error:
            if not leaves_out:
                raise
            del arrays[before:]
            log.error(
                "tfpreempt: the state of %s is left out of this commit, and would "
                "begin anew after a restart from it: %s",
                name,
                error,
            )
        else:
            header |= {name: entry} if entry else {}
    return Encoded(header=header, arrays=tuple(arrays))


def restore(
    callbacks: Sequence[Any], states: Encoded, *, extends: bool = False
) -> None:
    """Gives the callbacks back what they remembered.

    Callbacks are matched by class, and by their order among those of one class. One
    that is missing on either side is named in a warning.

    Args:
        callbacks: those of the fit; their hooks of the resumed position have run.
        states: what `capture` gave.
        extends: the state is that of the end of a fit, and more epochs follow.

    Raises:
        CheckpointDamagedError: `capture` did not give it.
    """
    for callback, entry in _matched(
        callbacks,
        states.header,
        lambda each: known.kind(each) in known.KEPT or known.has_hooks(each),
    ):
        with readable(callback):
            if "keras" in entry:
                remembered = decode(entry["keras"], states.arrays)
                known.restore(callback, remembered, extends=extends)
            own = "own" in entry
            given = decode(entry["own"], states.arrays) if own else None
        if own and known.has_hooks(callback):
            callback.set_state(given)


def capture_files(callbacks: Sequence[Any]) -> Encoded:
    """What the callbacks of this worker keep in files: the text of each CSVLogger.

    It may be called before the training begins, too. For a fit that is not to train,
    that keeps what `on_train_begin` of a CSVLogger throws away; `restore_files` puts it
    back.

    Raises:
        OSError: a file cannot be read.
    """
    arrays: list[bytes] = []
    header = {
        name: encode(
            files.capture(callback), f"The callback {name}", arrays, takes_bytes=True
        )
        for name, callback in _by_name(callbacks).items()
        if known.kind(callback) == files.KIND
    }
    return Encoded(header=header, arrays=tuple(arrays))


def restore_files(
    callbacks: Sequence[Any], states: Encoded, *, extends: bool = False
) -> None:
    """Writes the files back; see `restore`.

    Raises:
        CheckpointDamagedError: `capture_files` did not give it.
        OSError: a file cannot be written.
    """
    for callback, entry in _matched(
        callbacks, states.header, lambda each: known.kind(each) == files.KIND
    ):
        with readable(callback):
            found = decode(entry, states.arrays)
            files.restore(callback, found, extends=extends)


def _by_name(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Callbacks by class name; the second of a class has "#2" behind it."""
    found: dict[str, Any] = {}
    counts: dict[str, int] = {}
    for callback in callbacks:
        name = known.class_name(callback)
        counts[name] = counts.get(name, 0) + 1
        found[name if counts[name] == 1 else f"{name}#{counts[name]}"] = callback
    return found


def _matched(
    callbacks: Sequence[Any], header: Any, is_kept: Callable[[Any], bool]
) -> Iterator[tuple[Any, Any]]:
    """Callbacks with what is saved for them; a warning for those without a partner."""
    now = _by_name(callbacks)
    if not isinstance(header, dict):
        raise errors.CheckpointDamagedError(
            f"What was saved for the callbacks of a fit is a {type(header).__name__}; "
            "expected an entry for each by its name"
        )
    for name, callback in now.items():
        if name in header:
            yield callback, header[name]
        elif is_kept(callback):
            log.warning(
                "tfpreempt: the checkpoint has no state for the callback %s, so it "
                "begins anew",
                name,
            )
    for name in header:
        if name not in now and not name.endswith(".ProgbarLogger"):
            log.warning(
                "tfpreempt: the checkpoint has the state of a callback %s, which this "
                "fit does not have; it is left out",
                name,
            )
