"""What the handler needs of TensorFlow beside the checkpoint."""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf

from tfpreempt import errors
from tfpreempt.checkpoint.variables import out_of_scope

COUNTER = "checkpointed_runs"
"""The name under which TensorFlow's own handler saves the number of runs."""

END_OF_DATA = (StopIteration, StopAsyncIteration, tf.errors.OutOfRangeError)
"""What a step raises where the data end: no error, and equal on all workers."""

PEER_GONE = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)
"""What a collective raises when another worker has died."""

_POISONED = re.compile(
    "poisoned|incarnation|context_id|cancelled|aborted|unavailable|connect",
    re.IGNORECASE,
)


def is_lost_worker(error: BaseException) -> bool:
    """Whether an error may come of the loss of a remote worker.

    What it was to give to an op that is read later is an `InternalError`, "Remote
    address looked up from remote data found to be poisoned".
    """
    if isinstance(error, tf.errors.InternalError):
        return _POISONED.search(str(error)) is not None
    return isinstance(error, PEER_GONE)


class DirectoryRequiredError(
    errors.ConfigurationError,
    tf.errors.InvalidArgumentError,  # type: ignore[misc]  # TensorFlow is untyped
):
    """A checkpoint was passed without a directory."""

    def __init__(self, message: str) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, message)


def check_checkpoint(given: Any) -> None:
    """Refuses what is neither a checkpoint, a manager, nor None."""
    kinds = (tf.train.Checkpoint, tf.train.CheckpointManager)
    if given is not None and not isinstance(given, kinds):
        raise errors.ConfigurationError(
            f"checkpoint_or_checkpoint_manager is {given!r}; expected a "
            "tf.train.Checkpoint with checkpoint_dir, a tf.train.CheckpointManager, or "
            "None for named States alone"
        )


def attach_counters(given: Any) -> Any:
    """Attaches the variables that a save counts by to the user's checkpoint.

    Args:
        given: a tf.train.Checkpoint, a CheckpointManager, or None.

    Returns:
        The variable that counts runs, int64; None where there is no checkpoint.
    """
    checkpoint = getattr(given, "checkpoint", given)
    if checkpoint is None:
        return None
    out_of_scope(lambda: checkpoint.save_counter)
    if not hasattr(checkpoint, COUNTER):
        counter = out_of_scope(
            lambda: tf.Variable(0, dtype=tf.int64, trainable=False, name=COUNTER)
        )
        setattr(checkpoint, COUNTER, counter)
    return getattr(checkpoint, COUNTER)
