"""An error leaves a step: peers are told, or it was a preemption all along."""

from __future__ import annotations

import threading

from tfpreempt.events import Outcome
from tfpreempt.remote_cluster import Connection, is_expected_to_go
from tfpreempt.session import Session
from tfpreempt.tensorflow_side import END_OF_DATA, PEER_GONE, is_lost_worker
from tfpreempt.watching import NATIVE_DELAY


def was_preemption(
    error: BaseException,
    session: Session,
    connection: Connection | None,
    noticed: threading.Event,
) -> bool:
    """Deals with an error that is about to be raised. Main thread.

    Args:
        error: of a step.
        session: of this process; leaves, if it was the end of a preempted worker.
        connection: to remote workers, if there is one.
        noticed: set when the first notice comes.

    Returns:
        Whether it was no error but a preemption, and was served: the exit function came
        back. Otherwise peers were told, and the error is to be raised.
    """
    if connection is not None:
        return _lost_workers(error, session, noticed)
    if session.cluster.world == 1 or isinstance(error, END_OF_DATA):
        return False
    if not session.departure.detached:
        from tfpreempt.coordination import tf_service

        gone = isinstance(error, PEER_GONE)
        session.raised(error, gone, tf_service.report_error)
    return False


def _lost_workers(
    error: BaseException, session: Session, noticed: threading.Event
) -> bool:
    """The step is half done where a remote worker went, so nothing can be saved."""
    if not is_lost_worker(error):
        return False
    if not (is_expected_to_go() or noticed.wait(2 * NATIVE_DELAY)):
        return False  # nor was a notice on its way
    if session.gate.flag:
        session.raised(error, peer_is_gone=True)
        return not session.departure.detached
    # It was served with a commit, and training went on: within the grace, or because
    # the exit function came back.
    why = f"a remote worker went, as it had told ({type(error).__name__})"
    session.departure.leave(Outcome.LOST, why)
    return True
