"""tf.train.Checkpoint and tf.train.CheckpointManager as a user gives them."""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from tfpreempt import errors
from tfpreempt.checkpoint.variables import out_of_scope
from tfpreempt.core import seams

COUNTER = "checkpointed_runs"
"""The name under which TensorFlow's own handler saves the number of runs."""


class DirectoryRequiredError(
    errors.ConfigurationError,
    tf.errors.InvalidArgumentError,  # type: ignore[misc]  # TensorFlow is untyped
):
    """A checkpoint was passed without a directory."""

    def __init__(self, message: str) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, message)


def name_if_untested() -> None:
    """Logs once that tfpreempt was not tested with this version of TensorFlow."""
    seams.name_if_unseen("tensorflow")


def is_checkpoint(given: Any) -> bool:
    """Returns whether an object is a Checkpoint or CheckpointManager of TensorFlow."""
    return isinstance(given, tf.train.Checkpoint | tf.train.CheckpointManager)


def check_directory(given: Any, checkpoint_dir: str | os.PathLike[str] | None) -> None:
    """Checks that a Checkpoint has a directory; a CheckpointManager has its own.

    Raises:
        DirectoryRequiredError: a Checkpoint has none.
    """
    if isinstance(given, tf.train.Checkpoint) and not checkpoint_dir:
        raise DirectoryRequiredError(
            "checkpoint_or_checkpoint_manager is a tf.train.Checkpoint and "
            f"checkpoint_dir is {checkpoint_dir!r}; pass the directory too, or a "
            "tf.train.CheckpointManager, which has one"
        )


def attach_counter(given: Any) -> Any:
    """Attaches the variables that a save counts by to the user's checkpoint.

    Args:
        given: a tf.train.Checkpoint or a tf.train.CheckpointManager.

    Returns:
        The variable that counts runs, int64.
    """
    checkpoint = getattr(given, "checkpoint", given)

    def make() -> Any:
        _ = checkpoint.save_counter  # made as it is asked for
        if hasattr(checkpoint, COUNTER):
            return None
        return tf.Variable(0, dtype=tf.int64, trainable=False, name=COUNTER)

    if (counter := out_of_scope(make)) is not None:
        setattr(checkpoint, COUNTER, counter)
    return getattr(checkpoint, COUNTER)
