"""The end of training: after the last step, or by an error in a step.

After the last step, `close` waits for the other workers at a last boundary, commits the
final state, and closes the run. Either every worker ends with exit code 0, or every
worker is restarted: no platform restarts a worker that has ended with 0, and a
restarted peer would wait for this worker for ever. `FinalVote` finds the common
outcome. This module decides which state is saved, and ends the process accordingly.
All functions run on the main thread.

After an error in a step, the peers are notified, or the error is treated as a
consequence of a preemption. The error classes of a framework are in an adapter
("errors" in `core/frameworks.py`) with a tuple of classes, `END_OF_DATA`, and two
functions, `is_peer_lost(error)` and `is_lost_worker(error)`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator

from tfpreempt.checkpoint.state.state import REGISTRY
from tfpreempt.coordination import protocol_types as ev
from tfpreempt.core import frameworks
from tfpreempt.core.compat import add_note
from tfpreempt.core.error_causes import describe_loss, is_before_all
from tfpreempt.core.events import Fault, Outcome
from tfpreempt.errors import BadStepsError, SaveError, UsageError
from tfpreempt.handler.exit import describe, exit_hard, flush_streams, keep_streams
from tfpreempt.handler.final_vote import TrainingOutcome
from tfpreempt.handler.run import RESTORED_COMMIT_IS_KEPT, Run, created_later
from tfpreempt.handler.session import Session
from tfpreempt.handler.single_client import NATIVE_DELAY, connection

log = logging.getLogger(__name__)

SILENT = 10.0
"""Seconds without a heartbeat after which TensorFlow treats a worker as lost."""

_SERVED = "_tfpreempt_served"
"""Attribute that marks an error which run() has handled inside a watch scope."""


def is_end_of_data(error: BaseException) -> bool:
    """Returns whether a step has raised an error because the data have ended.

    The end of the data is no failure. Every worker reaches the end at the same step.
    """
    ends = (StopIteration, StopAsyncIteration)
    return isinstance(error, ends) or any(
        isinstance(error, each.END_OF_DATA) for each in frameworks.adapters("errors")
    )


def step_failed(error: BaseException, session: Session) -> None:
    """Handles an error raised by a step.

    If the function returns, the caller raises the error.

    An error at the end of the data leaves the interval counted, because the data end at
    the same step on every worker.

    Args:
        error: error raised by the step.
        session: session of this process.
    """
    step_flag = session.step_flag
    step_flag.busy = False
    is_end = is_end_of_data(error)
    is_consistent = not is_end and is_before_all(error)
    if is_consistent:
        step_flag.started -= 1
    elif not is_end:
        step_flag.failed = step_flag.started
    was_preemption(error, session, is_consistent=is_consistent)


def was_preemption(
    error: BaseException, session: Session, *, is_consistent: bool
) -> bool:
    """Handles an error that the caller is about to raise.

    If a preempted worker has caused the error, the process exits.

    Args:
        error: error raised by a step, or outside of steps.
        session: session of this process.
        is_consistent: whether the state can be saved: no step is incomplete.

    Returns:
        True if a remote worker was lost after its notice, and the exit function has
        returned; the caller need not raise the error. False if the caller must raise
        the error; the peers were notified.
    """
    if connection() is not None:
        is_served = hasattr(error, _SERVED) or _lost_workers(error, session)
        if is_served:
            setattr(error, _SERVED, True)
        return is_served
    if not (is_end_of_data(error) or session.exit.detached):
        known = frameworks.adapters("errors")
        is_lost = any(each.is_peer_lost(error) for each in known)
        session.failed(error, is_consistent=is_consistent, peer_is_gone=is_lost)
    return False


def _lost_workers(error: BaseException, session: Session) -> bool:
    """Handles an error of a step if the loss of a remote worker has caused the error.

    The loss leaves the step incomplete, so no state can be saved. Returns whether the
    loss was handled.
    """
    known = frameworks.adapters("errors")
    if not session.runs or not any(each.is_lost_worker(error) for each in known):
        return False
    # After a notice, treat the loss of any worker as a preemption of the lost worker.
    # TensorFlow's notice key can be set only once, so the notice names only the first
    # of several preempted workers. (A preempted worker is lost only when its machine is
    # terminated; before the termination the worker serves old and new connections.)
    deadlines = session.coordinator.deadlines
    if not deadlines.shutdown_pending:
        session.is_noticed(within=2 * NATIVE_DELAY)  # a notice may be about to arrive
    if not deadlines.shutdown_pending:
        return False
    if session.is_noticed():
        session.exit.fail(error, peer_is_gone=True)
        return not session.exit.detached
    # The notice was handled before, with a commit, and training continued: the grace
    # period was long, or the exit function returned (perhaps with a new connection).
    why = f"a remote worker was terminated, as announced ({type(error).__name__})"
    session.exit.leave(Outcome.LOST, why)
    return True


def close(session: Session, run: Run, limit: float | None = None) -> None:
    """Ends a run: waits for the other workers, commits the final state, and closes.

    Args:
        session: session of this process.
        run: the run to close.
        limit: seconds to wait for workers that are still training, and the same again
            for the upload to the mirror. None: wait while the workers run, and while
            the upload makes progress.

    Raises:
        UsageError: the call is inside a step.
        SaveError: the final state could not be committed.
    """
    if run.is_closed:
        return
    session.check_process("close()")
    if session.step_flag.busy:
        raise UsageError("close() was called inside run(); call it after the loop")
    if run.amid and not run.is_at_end:
        close_unfinished(session, run)
        return
    with session.activity.hang_detection_paused():
        _close(session, run, limit)


def _close(session: Session, run: Run, limit: float | None) -> None:
    session.start_listening(run)
    if session.exit.detached:
        close_failed(session, run, "")
        return
    failure = None
    if session.cluster.num_workers > 1:
        run.before_save()  # a bad last step stops all workers before the final save
    # Wait for the other workers only with the last open run: a worker may have opened
    # further runs and not used them.
    is_last = list(session.runs) == [run]
    is_end = is_last and pass_last_boundary(session, limit)
    if is_end:
        failure = _end_together(session, run)
    elif not is_last:
        failure = _commit_final(session, run)
        session.vote.failures[run.start.token] = failure
    elif session.cluster.is_chief:
        failure = SaveError(
            "Training is not over on all workers, so the end of training is not "
            "committed; the commit needs this worker, the chief. Restart all "
            "workers. Give close() more time, or call close() at the end of the "
            "program."
        )
    if failure is not None:
        run.record_exit(Outcome.FAILED, describe(failure))
    elif is_last:
        session.exit.is_over = session.cluster.num_workers > 1
        run.record_exit(Outcome.FINISHED, code=0)
        snapshots = run.snapshots
        is_saved = is_end and run.steps_made > 0 and not run.has_moved
        if snapshots is not None and is_saved:
            snapshots.clear()
    session.exit.finish_copy(run, limit)
    session.unregister(run)
    if failure is not None:
        raise failure


def close_unfinished(session: Session, run: Run) -> None:
    """Closes the run of an interrupted fit, and notifies the peers.

    The run does not wait for the other workers, and commits nothing.

    Args:
        session: session of this process.
        run: the run to close.
    """
    if run.is_closed:
        return
    why = "model.fit did not come to its end"
    if not session.exit.left and connection() is None and not session.exit.detached:
        session.failed(UsageError(why))
    close_failed(session, run, why, sys.exc_info()[1])


def close_failed(
    session: Session, run: Run, why: str, error: BaseException | None = None
) -> None:
    """Closes a run without waiting for the other workers, and without a commit.

    Args:
        session: session of this process.
        run: the run to close.
        why: failure of the program, for people; "" if the program ends on purpose, so
            that the journal records no failure.
        error: the error of the program; None without an error.
    """
    exit = session.exit
    try:
        if not exit.left:
            if exit.detached and (session.cluster.num_workers > 1 or not why):
                # Prefer a more precise reason, such as the loss of a worker.
                why = session.coordinator.notes.lost_because or why
            if why and not session.is_forked:
                is_permanent = isinstance(error, BadStepsError)
                run.record_exit(Outcome.FAILED, why, is_permanent=is_permanent)
            session.wait_for_save()
            exit.finish_mirrors([run])
    finally:
        session.unregister(run)


# --- the last boundary, and the final save -------------------------------------------


def pass_last_boundary(session: Session, limit: float | None) -> bool:
    """Waits until every worker has ended training, or handles a notice.

    Args:
        session: session of this process.
        limit: seconds to wait for the other workers; None: wait while they run.

    Returns:
        Whether every worker has ended training. False: the limit was reached, and the
        other workers were notified.
    """
    keep_streams()
    session.resume_after_exit()
    if session.cluster.num_workers == 1:
        limit = None  # there is no peer to wait for
    session.saves.finishing()
    with watching_store(session), session.deferring_sigint():
        while True:
            session.saves.end_async()  # a round may have begun a save during this wait
            verdict = session.wait_for_directive(last=True, limit=limit)
            # A notice was handled, and the exit function returned: wait again.
            is_served = verdict == ev.ExitDirective(Outcome.COMMITTED)
            if not (is_served or isinstance(verdict, ev.Resume)):
                break
    session.vote.start()
    if verdict is None:
        session.detach("left early")
        session.vote.leave()
    return verdict is not None


@contextlib.contextmanager
def watching_store(session: Session) -> Iterator[None]:
    """Context manager: treats the key-value store as lost if the chief is unreachable.

    The body waits for the chief. Without the check, the wait could last for ever: no
    failing step ends the wait, and perhaps no deadline.

    Args:
        session: session of this process.
    """
    is_over = threading.Event()
    if not session.cluster.is_chief:
        key = f"tfpreempt/{session.incarnation}/finishes/{session.cluster.worker}"
        session.executor.watch_store(key, is_over, SILENT)
    try:
        yield
    finally:
        is_over.set()


def _commit_final(session: Session, run: Run) -> Exception | None:
    """Commits the final state, so that a restarted process has nothing left to do.

    Args:
        session: session of this process.
        run: the run to save.

    Returns:
        The error of a failed save, to be raised after the run is closed; or None.
    """
    session.saves.wait()
    deadlines = session.coordinator.deadlines
    came_to_nothing = run.is_unconfirmed and not session.saves.last_save_is_committed(
        run, deadlines.peer_timeout
    )
    if missing := created_later(run):
        if run.start.tier == "memory":
            return SaveError(
                "Training is over, and its end is not committed: no step was made "
                "since the restart from a snapshot in memory, which has variables "
                f"that this program did not create ({missing[0]}, "
                "...). Create the variables before the handler (for example by "
                "optimizer.build()) and start the program again."
            )
        log.warning(RESTORED_COMMIT_IS_KEPT)
    elif run.has_moved_or_changed or run.is_resumed or came_to_nothing:
        try:
            session.saves.save(run, "finished")
        except Exception as error:  # noqa: BLE001 - e.g. of a State; raised later
            session.runs.fault("the final save", error)
            lost = _lost_in_save(session, error)
            votes = session.cluster.num_workers > 1 and list(session.runs) == [run]
            if lost and deadlines.shutdown_pending and not votes:
                # After a notice, the loss of a worker is a preemption, not a failure.
                session.exit.leave(Outcome.LOST, lost)
            because = f"{lost}. " if lost else ""
            add_note(
                error,
                f"{because}Training is over, and its end is not committed. Fix the "
                "cause that the error names and start the program again; the program "
                "repeats the steps since the last commit.",
            )
            return error
    return None


def _end_together(session: Session, run: Run) -> Exception | None:
    """Saves the final state, and ends this process as all workers have voted.

    Args:
        session: session of this process.
        run: the last open run.

    Returns:
        The error to raise, from the save of this worker or of another worker; None if
        every worker ends well.
    """
    if session.cluster.num_workers == 1:
        return _commit_final(session, run)
    try:
        failure = _commit_final(session, run)
        failures = [failure, *session.vote.failures.values()]
        outcome = _vote(session, next(filter(None, failures), None))
    except BaseException:
        # An exit in progress has already sent the reason to the peers.
        if not session.exit.left:
            me = f"worker {session.cluster.worker} stopped in the final save"
            session.vote.abort(me)
            session.detach("was interrupted")
        raise
    return _follow(session, outcome, failure)


def _vote(session: Session, failed: Exception | None) -> TrainingOutcome | None:
    """Votes on the end of training, and returns the common outcome.

    Returns None if the chief was lost before the outcome was known.

    Args:
        session: session of this process.
        failed: error of a final save on this worker; None after successful saves.
    """
    why = ""
    if failed is not None:
        lost = _lost_in_save(session, failed)
        # After a notice, the loss of a worker is a preemption, not a failure.
        if lost and session.coordinator.deadlines.shutdown_pending:
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
    """Ends this process as the common outcome requires.

    Args:
        session: session of this process.
        outcome: the common outcome; None if the chief was lost before the outcome was
            known.
        mine: error of this worker's final save; None after a successful save.

    Returns:
        The error to raise; None if the final state is committed on every worker.
    """
    if outcome is None:
        because = session.coordinator.notes.lost_because or "the worker does not answer"
        lost = f"worker 0 was lost in the final save: {because}"
        outcome = TrainingOutcome(lost=lost)
    if outcome.lost and not outcome.failed:
        session.runs.record(Fault(where="the end", error=outcome.lost))
        log.error(
            "%s. All workers exit to be restarted; if the end of training was "
            "committed, the restarted workers find nothing left to train",
            outcome.lost,
        )
        # Record the loss, so that the exit skips TensorFlow's disconnect, which would
        # hang.
        session.coordinator.notes.lost_because = outcome.lost
        session.exit.leave(
            Outcome.COMMITTED if outcome.is_committed else Outcome.LOST, outcome.lost
        )
        return mine or SaveError(
            "Training is over, but not all workers completed the final save: "
            f"{outcome.lost}. Restart all workers."
        )
    if mine is not None or not outcome.failed:
        return mine
    session.runs.record(Fault(where="the end", error=outcome.failed))
    if outcome.is_committed:
        return SaveError(
            "Training is over, and its end is committed without the part of a "
            f"worker: {outcome.failed}. Model and optimizer are complete; the random "
            "generators, data position and per-worker States of that worker are "
            "missing."
        )
    return SaveError(
        f"Training is over, and its end is not committed: {outcome.failed}. Fix the "
        "cause and restart all workers; the workers repeat the steps since the last "
        "commit."
    )


# --- the end of the interpreter ------------------------------------------------------


def at_interpreter_end(session: Session) -> None:
    """Closes the runs that the program left open, at the end of the interpreter.

    Args:
        session: session of this process.
    """
    runs = list(session.runs)
    if session.is_forked:
        return
    flush_streams()
    if runs and not session.exit.left:
        exit_hard(lambda: _end_runs(session, runs))
    session.exit.disconnect()


def _end_runs(session: Session, runs: list[Run]) -> None:
    error = getattr(sys, "last_value", None)
    try:
        if error is not None and not session.exit.detached:
            is_consistent = session.is_consistent and not any(
                each.amid for each in runs
            )
            if isinstance(error, Exception):
                session.serve(error, is_consistent)
            session.exit.fail(error)
        if error is not None or session.exit.detached:
            # Close the runs here: a later exit hook could start no thread.
            for run in runs:
                close_failed(session, run, describe(error) if error else "", error)
        else:
            _close_all(session, runs)
    except SystemExit:
        session.exit.disconnect()
        raise


def _close_all(session: Session, runs: list[Run]) -> None:
    if gone := ", ".join(map(repr, REGISTRY.gone())):
        log.warning(
            "the program has ended with an open handler, and the State %s was "
            "deleted with the function that created it, so the last commit lacks "
            "this State. Call handler.close(), or use `with`, while the State exists",
            gone,
        )
    is_saved = True
    for run in runs:
        try:
            close(session, run, session.coordinator.deadlines.peer_timeout)
        except Exception as error:
            log.error(
                "the end of training is not committed, so the exit code is 1; the "
                "next start repeats the steps since the last commit",
                exc_info=error,
            )
            is_saved = False
    if not is_saved:
        sys.exit(1)
