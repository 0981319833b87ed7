"""TensorFlow's errors and their meaning, for `step_errors`."""

from __future__ import annotations

import re

import tensorflow as tf

END_OF_DATA = (StopIteration, StopAsyncIteration, tf.errors.OutOfRangeError)
"""Errors of a step whose data end: no failure, and equal on all workers."""

PEER_LOST = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)
"""Errors of a collective whose other worker has died."""

_POISONED = re.compile(
    "poisoned|incarnation|context_id|cancelled|aborted|unavailable|connect",
    re.IGNORECASE,
)


def is_lost_worker(error: BaseException) -> bool:
    """Returns whether an error may come of the loss of a remote worker.

    An op that reads the result of the lost worker later raises an `InternalError`,
    "Remote address looked up from remote data found to be poisoned".
    """
    if isinstance(error, tf.errors.InternalError):
        return _POISONED.search(str(error)) is not None
    return isinstance(error, PEER_LOST)
