"""An error leaves a step or the loop: peers are told, or it was a preemption."""

from __future__ import annotations

import re
import weakref

import tensorflow as tf

from tfpreempt.core.events import Outcome
from tfpreempt.handler.data_errors import is_before_all
from tfpreempt.handler.remote_cluster import NATIVE_DELAY, connection
from tfpreempt.handler.session import Session

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


_served: weakref.ref[BaseException] | None = None


def step_failed(error: BaseException, session: Session) -> None:
    """A step raises. An end of the data is equal on all workers, and counts.

    Args:
        error: is raised when this returns.
        session: of this process.
    """
    gate = session.gate
    gate.busy = False
    is_end = isinstance(error, END_OF_DATA)
    is_whole = not is_end and is_before_all(error)
    if is_whole:
        gate.started -= 1
    elif not is_end:
        gate.failed = gate.started
    was_preemption(error, session, is_whole=is_whole)


def was_preemption(error: BaseException, session: Session, *, is_whole: bool) -> bool:
    """Deals with an error that is about to be raised. Main thread.

    Args:
        error: of a step, or from outside of steps.
        session: of this process; leaves, if it was the end of a preempted worker.
        is_whole: whether the state is that of a boundary.

    Returns:
        Whether it was the loss of a remote worker that had told, and was served: the
        exit function came back. Otherwise peers were told, and the error is to be
        raised.
    """
    global _served
    if connection() is not None:
        if _served is not None and _served() is error:
            return True  # by run(), inside a watch scope
        if not _lost_workers(error, session):
            return False
        _served = weakref.ref(error)
        return True
    if not (isinstance(error, END_OF_DATA) or session.exit.detached):
        gone = isinstance(error, PEER_GONE)
        session.failed(error, is_whole=is_whole, peer_is_gone=gone)
    return False


def _lost_workers(error: BaseException, session: Session) -> bool:
    """The step is half done where a remote worker went, so nothing can be saved."""
    if not is_lost_worker(error) or not session.members:
        return False
    # A worker serves until it goes, also whoever connects anew; and where several go,
    # the notice names the first alone, because TensorFlow's key can be set once. So for
    # a time any worker's loss is taken for its end.
    deadlines = session.coordinator.deadlines
    if not deadlines.may_go:
        session.is_noticed(within=2 * NATIVE_DELAY)  # a notice may be on its way
    if not deadlines.may_go:
        return False
    if session.is_noticed():
        session.exit.fail(error, peer_is_gone=True)
        return not session.exit.detached
    # It was served with a commit, and training went on: within the grace, or because
    # the exit function came back, perhaps with another connection.
    why = f"a remote worker went, as it had told ({type(error).__name__})"
    session.exit.leave(Outcome.LOST, why)
    return True


def is_lost_worker(error: BaseException) -> bool:
    """Whether an error may come of the loss of a remote worker.

    What it was to give to an op that is read later is an `InternalError`, "Remote
    address looked up from remote data found to be poisoned".
    """
    if isinstance(error, tf.errors.InternalError):
        return _POISONED.search(str(error)) is not None
    return isinstance(error, PEER_GONE)
