"""Restores a tf.train.Checkpoint through a handle; its own method does the reading."""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from typing import Any

from tfpreempt import errors
from tfpreempt.checkpoint.catalog import Entry
from tfpreempt.checkpoint.handling import contents
from tfpreempt.core.threads import OwnedThread
from tfpreempt.storage import paths


def checked_prefix(found: Entry, where: str) -> str:
    """TensorFlow's prefix of a local checkpoint.

    Raises:
        CheckpointError: it has none.
        ConfigurationError: TensorFlow would not find it under this path.
    """
    prefix = contents.tensorflow_prefix(found)
    if prefix is None:
        raise errors.CheckpointError(
            f"{where} holds no tf.train.Checkpoint, or more than one; expected one "
            "`.index` file. Name one of many by its prefix; named States are loaded by "
            "load_state()."
        )
    paths.check_restorable(prefix)
    return prefix


def check_object(given: Any) -> None:
    """Refuses what has no checkpoint's `restore`, before anything is read.

    Raises:
        ConfigurationError: it is none; says what to pass.
    """
    # A CheckpointManager has none; a class has one, but not yet an object for it.
    if callable(getattr(given, "restore", None)) and not isinstance(given, type):
        return
    advice = "make one of what is to be restored: tf.train.Checkpoint(model=model)"
    if hasattr(given, "checkpoint") and hasattr(given, "latest_checkpoint"):
        advice = "pass its .checkpoint"
    raise errors.ConfigurationError(
        f"restore() got {given!r}; expected a tf.train.Checkpoint: {advice}."
    )


def restored_from_copy(
    copy: contextlib.AbstractContextManager[str], tf_checkpoint: Any
) -> Any:
    """Restores from a copy that outlives the reading.

    Variables that a model makes later are read when they are made. What reads them is
    TensorFlow's restore coordinator, which the status holds, and every such variable's
    promise; the copy stays until that is gone, else until the process ends.
    """
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(copy)
        found = contents.of_path(directory)
        prefix = checked_prefix(found, directory)
        status = tf_checkpoint.restore(prefix)
        reader = getattr(status, "_checkpoint", None)
        _keep(stack.pop_all(), reader)
    return status


def _keep(stack: contextlib.ExitStack, reader: object) -> None:
    """Closes the stack when the reader is gone, at the latest when the process ends."""
    once = threading.Lock()

    def close() -> None:
        if once.acquire(blocking=False):
            stack.close()

    def collected() -> None:
        # This may run anywhere, in the middle of what holds the cache's lock.
        atexit.unregister(close)
        OwnedThread("tfpreempt-copy", close).start()

    atexit.register(close)
    with contextlib.suppress(TypeError):  # None, or what can't be referred to weakly
        weakref.finalize(reader, collected).atexit = False
