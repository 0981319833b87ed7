"""The end of training: after the last step, or by an error in a step.

After the last step follow the last boundary, the commit of the final state and the
close. All workers end with exit code 0, or all are restarted: a worker that ended with
0 is restarted by no platform, so a restarted peer would wait for that worker for ever.
`FinalVote` exchanges the keys; this module decides which state is saved, and how this
process ends by the outcome. Main thread.

After an error, peers are told, or a preemption was the cause. The errors of a framework
are in an adapter ("errors" in `core/frameworks.py`), which has two tuples of classes,
`END_OF_DATA` and `PEER_LOST`, and `is_lost_worker(error)`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Iterator

from tfpreempt.checkpoint.state.state import REGISTRY
from tfpreempt.coordination import events as ev
from tfpreempt.core import frameworks
from tfpreempt.core.events import Fault, Outcome
from tfpreempt.core.python import add_note
from tfpreempt.errors import SaveError, UsageError
from tfpreempt.handler.error_causes import describe_loss, is_before_all
from tfpreempt.handler.exit import describe, exit_hard, flush_streams, keep_streams
from tfpreempt.handler.final_vote import TrainingOutcome
from tfpreempt.handler.run import Run
from tfpreempt.handler.session import Session
from tfpreempt.handler.single_client import NATIVE_DELAY, connection

log = logging.getLogger(__name__)

SILENT = 10.0
"""Seconds without a heartbeat after which TensorFlow takes a worker for lost."""

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
    if not session.runs or not any(each.is_lost_worker(error) for each in known):
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


def close(session: Session, run: Run, limit: float | None = None) -> None:
    """Passes the last boundary of a run, commits its final state, and closes it.

    Args:
        session: of this process.
        run: is closed afterwards.
        limit: seconds to wait for workers that still train, and again for the mirror;
            None: while the workers live, and while the upload progresses.

    Raises:
        UsageError: inside a step.
        SaveError: the final state could not be committed.
    """
    if run.is_closed:
        return
    session.check_process("close()")
    if session.gate.busy:
        raise UsageError("close() was called inside run(); call it after the loop")
    if run.amid and not run.is_at_end:
        log.info("tfpreempt: %s did not come to its end", run.amid)
        close_unfinished(session, run)
        return
    with session.activity.hang_detection_paused():
        _close(session, run, limit)


def _close(session: Session, run: Run, limit: float | None) -> None:
    session.arm(run)
    if session.exit.detached:
        close_failed(session, run, "")
        return
    failure = None
    # With others open no boundary: workers may differ in those never used.
    is_last = list(session.runs) == [run]
    is_end = is_last and pass_last_boundary(session, limit)
    if is_end:
        failure = _end_together(session, run)
    elif not is_last:
        failure = _commit_final(session, run)
        session.vote.failures.pop(run.start.token, None)
        if failure is not None:
            session.vote.failures[run.start.token] = failure
    elif session.cluster.is_chief:
        failure = SaveError(
            "Training is not over on all workers, so its end is not committed, "
            "and cannot be without this one, the chief: start all again. Give "
            "close() more time, or call it at the end of the program."
        )
    if failure is not None:
        run.record_exit(Outcome.FAILED, describe(failure))
    elif is_last:
        session.exit.is_over = session.cluster.world > 1
        run.record_exit(Outcome.FINISHED, code=0)
        snapshots = run.snapshots
        is_saved = is_end and run.steps_made > 0 and not run.has_moved
        if snapshots is not None and is_saved:
            snapshots.clear()
    session.exit.finish_copy(run, limit)
    session.part(run)
    if failure is not None:
        raise failure


def close_unfinished(session: Session, run: Run) -> None:
    """Closes a run whose fit did not come to its end, without a last boundary.

    The peers are notified.

    Args:
        session: of this process.
        run: is closed afterwards.
    """
    if run.is_closed:
        return
    why = f"{run.amid} did not come to its end"
    if not session.exit.left and connection() is None and not session.exit.detached:
        session.failed(UsageError(why))
    close_failed(session, run, why)


def close_failed(session: Session, run: Run, why: str) -> None:
    """Closes a run without a last boundary.

    Args:
        session: of this process.
        run: is closed afterwards.
        why: the failure of the program, for people; "": the program ends like this on
            purpose, and the journal records no failure.
    """
    exit = session.exit
    try:
        if not exit.left:
            if exit.detached and (session.cluster.world > 1 or not why):
                # The loss of another worker, say.
                why = session.coordinator.notes.lost_because or why
            if why and not session.is_forked:
                run.record_exit(Outcome.FAILED, why)
            session.wait_for_save()
            exit.finish_mirrors([run])
    finally:
        session.part(run)


# --- the last boundary, and the final save -------------------------------------------


def pass_last_boundary(session: Session, limit: float | None) -> bool:
    """Waits until all workers have ended their training, or serves a notice.

    Args:
        session: of this process.
        limit: seconds after which the wait for the others ends; None: no limit while
            the others live.

    Returns:
        Whether all workers have ended. False: the limit passed, and the others were
        notified.
    """
    keep_streams()
    session.come_back()
    if session.cluster.world == 1:
        limit = None  # there are no other workers
    session.saves.finishing()
    with watching_store(session), session.deferring_sigint():
        while True:
            session.saves.end_async()  # of a round that came in between
            verdict = session.settle(last=True, limit=limit)
            # Served for others that train on, where the exit function came back.
            is_served = verdict == ev.Leave(Outcome.COMMITTED)
            if not (is_served or isinstance(verdict, ev.Resume)):
                break
    session.vote.start()
    if verdict is None:
        session.detach("left early")
        session.vote.leave()
    return verdict is not None


@contextlib.contextmanager
def watching_store(session: Session) -> Iterator[None]:
    """Takes the store for unreachable in the body if the chief falls silent.

    For a wait for the chief that no step, and perhaps no deadline, ends.

    Args:
        session: of this process.
    """
    is_over = threading.Event()
    if not session.cluster.is_chief:
        key = f"tfpreempt/{session.incarnation}/finishes/{session.cluster.worker}"
        session.runtime.watch_store(key, is_over, SILENT)
    try:
        yield
    finally:
        is_over.set()


def _commit_final(session: Session, run: Run) -> Exception | None:
    """Commits the state at the normal end, so that a restart has nothing left to do.

    Args:
        session: of this process.
        run: whose state.

    Returns:
        The error of a failed save, to be raised when the run is closed; None.
    """
    session.saves.wait()
    deadlines = session.coordinator.deadlines
    came_to_nothing = run.is_unconfirmed and not session.saves.stands(
        run, deadlines.save_timeout
    )
    if run.steps_made == 0 and run.unrestored_variables:
        # Made in a first step, like an optimizer's: a save would be without them.
        if run.start.tier == "memory":
            return SaveError(
                "Training is over, and its end is not committed: no step was made "
                "since the restart from a snapshot in memory, which has variables "
                "that this program did not make "
                f"({run.unrestored_variables[0]}, ...). "
                "Make them before the handler (optimizer.build, say) and start "
                "the program again."
            )
        log.warning(
            "tfpreempt: no step was made since the restart, and the commit has "
            "variables that this program did not make: it stands as it is. What "
            "named States have taken up since is not saved"
        )
    elif run.has_moved or run.is_resumed or came_to_nothing:
        try:
            session.saves.save(run, "finished")
        except Exception as error:  # noqa: BLE001 - of a State, say; raised later
            session.runs.fault("the final save", error)
            lost = _lost_in_save(session, error)
            votes = session.cluster.world > 1 and list(session.runs) == [run]
            if lost and deadlines.may_go and not votes:
                session.exit.leave(Outcome.LOST, lost)  # expected: it had a notice
            because = f"{lost}. " if lost else ""
            add_note(
                error,
                f"{because}Training is over, and its end is not committed. Mend "
                "what the error names and start the program again: it repeats the "
                "steps after the last commit.",
            )
            return error
    return None


def _end_together(session: Session, run: Run) -> Exception | None:
    """Saves the final state; then all workers end well, or all are restarted.

    Args:
        session: of this process.
        run: the last one that is open.

    Returns:
        The error to raise: of this worker's save, or of another worker's.
    """
    if session.cluster.world == 1:
        return _commit_final(session, run)
    try:
        failure = _commit_final(session, run)
        failures = [failure, *session.vote.failures.values()]
        outcome = _vote(session, next(filter(None, failures), None))
    except BaseException:
        if not session.exit.left:  # or the others know why
            me = f"worker {session.cluster.worker} broke off in the final save"
            session.vote.abort(me)
            session.detach("was interrupted")
        raise
    return _follow(session, outcome, failure)


def _vote(session: Session, failed: Exception | None) -> TrainingOutcome | None:
    """The outcome for all workers, see `FinalVote.run`.

    Args:
        session: of this process.
        failed: the error of one of this worker's final saves.
    """
    why = ""
    if failed is not None:
        lost = _lost_in_save(session, failed)
        if lost and session.coordinator.deadlines.may_go:  # expected: it had a notice
            session.vote.abort(lost)
            return TrainingOutcome(lost=lost)
        why = lost or f"{type(failed).__name__}: {failed}".rstrip(".")
    with watching_store(session):
        return session.vote.run(why)


def _lost_in_save(session: Session, error: Exception) -> str:
    return describe_loss(error, session.cluster, "the final save")


def _follow(
    session: Session, outcome: TrainingOutcome | None, mine: Exception | None
) -> Exception | None:
    """Ends as all workers do.

    Args:
        session: of this process.
        outcome: for all workers; None: the chief was lost before the outcome was known.
        mine: the error of this worker's final save.

    Returns:
        The error to raise.
    """
    if outcome is None:
        because = session.coordinator.notes.lost_because or "it does not answer"
        lost = f"worker 0 was lost in the final save: {because}"
        outcome = TrainingOutcome(lost=lost)
    if outcome.lost and not outcome.failed:
        session.runs.record(Fault(where="the end", error=outcome.lost))
        log.error(
            "tfpreempt: %s. So all workers leave to be started again; where the "
            "end is committed they find nothing left to do",
            outcome.lost,
        )
        session.coordinator.notes.lost_because = outcome.lost  # no leave is taken of it
        session.exit.leave(
            Outcome.COMMITTED if outcome.is_committed else Outcome.LOST, outcome.lost
        )
        return mine or SaveError(
            f"Training is over, but not all workers came to its end: {outcome.lost}. "
            "Start all workers again."
        )
    if mine is not None or not outcome.failed:
        return mine
    session.runs.record(Fault(where="the end", error=outcome.failed))
    if outcome.is_committed:
        return SaveError(
            "Training is over, and its end is committed without the part of a "
            f"worker: {outcome.failed}. Model and optimizer are whole; that worker's "
            "random generators, place in the data and own States are missing."
        )
    return SaveError(
        f"Training is over, and its end is not committed: {outcome.failed}. Mend that "
        "and start all workers again: they repeat what comes after the last commit."
    )


# --- the end of the interpreter ------------------------------------------------------


def at_interpreter_end(session: Session) -> None:
    """The last boundary of runs that are open when the interpreter ends.

    Args:
        session: of this process.
    """
    runs = list(session.runs)
    if session.is_forked:
        return
    flush_streams()
    if session.exit.left or not runs:
        return
    error = getattr(sys, "last_value", None)
    if error is not None and not session.exit.detached:
        is_whole = session.is_whole and not any(each.amid for each in runs)
        if isinstance(error, Exception):
            exit_hard(functools.partial(session.serve, error, is_whole))
        session.exit.fail(error)
    if error is not None or session.exit.detached:
        for run in runs:  # while threads can still be started
            close_failed(session, run, describe(error) if error else "")
    else:
        exit_hard(lambda: _close_all(session, runs))


def _close_all(session: Session, runs: list[Run]) -> None:
    if gone := ", ".join(map(repr, REGISTRY.gone())):
        log.warning(
            "tfpreempt: the program has ended, its handler is open, and the State "
            "%s is gone with the function that made it: the last commit is without "
            "it. Call handler.close(), or use `with`, where the State still lives",
            gone,
        )
    is_saved = True
    for run in runs:
        try:
            close(session, run, session.coordinator.deadlines.save_timeout)
        except Exception as error:
            log.error(
                "tfpreempt: the end of training is not committed, so the exit code "
                "is 1; the next start trains again what came after the last commit",
                exc_info=error,
            )
            is_saved = False
    if not is_saved:
        sys.exit(1)
