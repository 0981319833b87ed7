"""An error leaves a step or the loop: peers are told, or it was a preemption.

The errors of a framework are in an adapter ("errors" in `core/frameworks.py`), which
has two tuples of classes, `END_OF_DATA` and `PEER_LOST`, and `is_lost_worker(error)`.
"""

from __future__ import annotations

from tfpreempt.core import frameworks
from tfpreempt.core.events import Outcome
from tfpreempt.handler.data_errors import is_before_all
from tfpreempt.handler.remote_cluster import NATIVE_DELAY, connection
from tfpreempt.handler.session import Session

_SERVED = "_tfpreempt_served"
"""Attribute of an error whose notice was served, by run() inside a watch scope."""


def is_end_of_data(error: BaseException) -> bool:
    """Returns whether a step raises an error because the data end.

    The end of the data is no failure, and equal on all workers.
    """
    ends = (StopIteration, StopAsyncIteration)
    return isinstance(error, ends) or any(
        isinstance(error, each.END_OF_DATA) for each in frameworks.adapters("errors")
    )


def step_failed(error: BaseException, session: Session) -> None:
    """A step raises. An end of the data is equal on all workers, and counts.

    Args:
        error: is raised when this returns.
        session: of this process.
    """
    gate = session.gate
    gate.busy = False
    is_end = is_end_of_data(error)
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
    if connection() is not None:
        is_served = hasattr(error, _SERVED) or _lost_workers(error, session)
        if is_served:
            setattr(error, _SERVED, True)
        return is_served
    if not (is_end_of_data(error) or session.exit.detached):
        known = frameworks.adapters("errors")
        is_lost = any(isinstance(error, each.PEER_LOST) for each in known)
        session.failed(error, is_whole=is_whole, peer_is_gone=is_lost)
    return False


def _lost_workers(error: BaseException, session: Session) -> bool:
    """The step is half done where a remote worker went, so nothing can be saved."""
    known = frameworks.adapters("errors")
    if not session.members or not any(each.is_lost_worker(error) for each in known):
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
