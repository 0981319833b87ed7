"""An error leaves a step or the loop: peers are told, or it was a preemption."""

from __future__ import annotations

import threading
import weakref

from tfpreempt.core.events import Outcome
from tfpreempt.handler.remote_cluster import Connection, is_expected_to_go
from tfpreempt.handler.session import Session
from tfpreempt.handler.tensorflow_side import END_OF_DATA, PEER_GONE, is_lost_worker
from tfpreempt.handler.watching import NATIVE_DELAY

_served: weakref.ref[BaseException] | None = None


def was_preemption(
    error: BaseException,
    session: Session,
    connection: Connection | None,
    noticed: threading.Event,
    *,
    is_whole: bool,
) -> bool:
    """Deals with an error that is about to be raised. Main thread.

    Args:
        error: of a step.
        session: of this process; leaves, if it was the end of a preempted worker.
        connection: to remote workers, if there is one.
        noticed: set when a notice comes.
        is_whole: whether the state is that of a boundary.

    Returns:
        Whether it was no error but a preemption, and was served: the exit function came
        back. Otherwise peers were told, and the error is to be raised.
    """
    global _served
    if connection is not None:
        if _served is not None and _served() is error:
            return True  # by run(), inside a watch scope
        if not _lost_workers(error, session, noticed):
            return False
        _served = weakref.ref(error)
        return True
    if isinstance(error, END_OF_DATA) or session.departure.detached:
        return False
    if isinstance(error, Exception) and session.serve(error, is_whole):
        return False  # the exit function came back
    if session.cluster.world > 1:
        from tfpreempt.coordination import tf_service

        gone = isinstance(error, PEER_GONE)
        session.raised(error, gone, tf_service.report_error)
    return False


def _lost_workers(
    error: BaseException, session: Session, noticed: threading.Event
) -> bool:
    """The step is half done where a remote worker went, so nothing can be saved."""
    if not is_lost_worker(error) or not session.members():
        return False
    if not is_expected_to_go():  # the notice may be on its way
        noticed.clear()
        noticed.wait(2 * NATIVE_DELAY)
    if not is_expected_to_go():
        return False
    if session.is_noticed():
        session.raised(error, peer_is_gone=True)
        return not session.departure.detached
    # It was served with a commit, and training went on: within the grace, or because
    # the exit function came back, perhaps with another connection.
    why = f"a remote worker went, as it had told ({type(error).__name__})"
    session.departure.leave(Outcome.LOST, why)
    return True
