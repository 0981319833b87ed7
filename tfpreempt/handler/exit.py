"""The exit of the process: after a commit, loss, error or deadline, or at the end.

The process ends with the right exit code even if one of its threads or children does
not end. Ctrl-C takes effect after the save in progress.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - its exit hook must run after ours
import contextlib
import dataclasses
import functools
import gc
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from tfpreempt.checkpoint.lease import lease
from tfpreempt.coordination import protocol_types as ev
from tfpreempt.coordination.coordinator import Coordinator
from tfpreempt.coordination.key_value_store import CoordinationService
from tfpreempt.coordination.store_executor import StoreExecutor, call_and_wait
from tfpreempt.core import frameworks
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.compat import add_note
from tfpreempt.core.deadline import MESSAGE_DELAY_MARGIN
from tfpreempt.core.error_causes import describe_loss
from tfpreempt.core.events import Fault, Outcome
from tfpreempt.core.log_output import is_open
from tfpreempt.core.threads import CallTimeoutError, ManagedThread, call_within
from tfpreempt.handler.run import HANDS_IN, Run, Runs
from tfpreempt.handler.single_client import notice_was_served
from tfpreempt.notice._signal_registry import REGISTRY

log = logging.getLogger(__name__)


@contextlib.contextmanager
def defer_sigint(is_saving: Callable[[], bool]) -> Iterator[None]:
    """Context manager: defers the first SIGINT to the end of the block.

    At the end of the block the program's own SIGINT handler is called; Python's default
    handler raises KeyboardInterrupt. If the block ends by SystemExit, the process is
    exiting, and ignores a SIGINT that would raise KeyboardInterrupt. SIGINT is not
    deferred if SIGINT is watched as a notice, or if the program has no Python handler
    for SIGINT. The block has an effect only on the main thread, where Python calls
    signal handlers.

    Args:
        is_saving: function that returns whether a save or upload must be finished
            first; called in the signal handler and on a thread.

    Raises:
        KeyboardInterrupt: raised in the block at the second SIGINT.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT) if is_main else None
    if not callable(before) or signal.SIGINT in REGISTRY.watches:
        yield
        return
    count, is_logged = 0, False

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal count
        count += is_saving()
        if count == 0:
            before(signum, frame)
        elif count > 1:
            raise KeyboardInterrupt(
                "a second Ctrl-C aborted the save or upload in progress: the last "
                "commit is still valid, the steps since that commit are lost"
            )

    def log_once() -> None:
        nonlocal is_logged
        if is_saving() and not is_logged:
            is_logged = True
            log.warning(
                "Ctrl-C takes effect when the save in progress is finished; press "
                "Ctrl-C again to abort the save"
            )

    signal.signal(signal.SIGINT, handle)
    REGISTRY.subscribe(signal.SIGINT, log_once)  # called even during a TensorFlow call
    try:
        yield
    finally:
        REGISTRY.unsubscribe(signal.SIGINT, log_once)
        if signal.getsignal(signal.SIGINT) is handle:
            REGISTRY.put_back(signal.SIGINT, before)
    if count:
        signal.raise_signal(signal.SIGINT)


FLUSH_LIMIT = 1.0
"""Seconds allowed for a stream to be flushed."""

RELEASE_LIMIT = 0.5
"""Seconds allowed for the release of leases, on storage that may hang."""

TAKES_APART = 1.0
"""Seconds for the finalization of Python. With TensorFlow the finalization takes 0.25 s
of processor time, and longer on a busy machine. No code of tfpreempt can run during the
finalization, or end the finalization."""


def on_interpreter_end(call: Callable[[], None]) -> None:
    """Registers a call for the end of the program, while threads can still be started.

    A last save needs threads, and in an `atexit` hook Python refuses to start threads.
    So the call is a hook of `threading`, which runs earlier. Hooks of `threading` run
    in reverse order. The hook of concurrent.futures must run after the call, so this
    module imports concurrent.futures first.
    """
    register: Any = getattr(threading, "_register_atexit", atexit.register)
    register(call)


def keep_streams() -> None:
    """Makes stdout and stderr usable for the rest of the process, even if closed.

    Test runners and daemons close the streams. A log record could then raise an error
    in the middle of an exit. A newly opened file could also get descriptor 1 or 2, and
    C++ libraries would write their messages into the file.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # the descriptor was closed, and now leads to /dev/null
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if not is_open(getattr(sys, name, None)):
            _silence(name)


def flush_streams() -> None:
    """Flushes stdout and stderr at the end of the interpreter, with a time limit.

    Python's flush at the end, without a limit, would wait for ever for a pipe without a
    reader, or make the exit code 120 if the disk is full.
    """
    keep_streams()
    for name in ("stdout", "stderr"):
        try:
            call_within(FLUSH_LIMIT, getattr(sys, name).flush)
        except Exception:  # noqa: BLE001 - the program may have set any object
            _silence(name)


def _silence(name: str) -> None:
    setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - open until the end


def exit_hard(leave: Callable[[], Any]) -> None:
    """Calls a function, and ends the process at once if the function raises an error.

    Used on threads and in exit hooks, where SystemExit would not end the process. The
    exit code is the code of SystemExit, and 1 after any other error, such as an error
    in the program's exit function.

    Args:
        leave: function that may raise SystemExit.
    """
    try:
        leave()
    except SystemExit as exit:
        end_now(exit)
    except Exception:
        log.exception(
            "an error was raised while the process was exiting, so the exit code is "
            "1 (a failure); finished commits are still valid"
        )
        end_now(SystemExit(1))


def end_now(exit: SystemExit) -> None:
    """Ends the process at once with the code of `exit`; may run on any thread.

    Exit hooks do not run, but logs and streams are flushed, and the leases are
    released.
    """
    with contextlib.suppress(CallTimeoutError):
        call_within(FLUSH_LIMIT, logging.shutdown)
    flush_streams()
    # Ignore errors: without a release, the next start waits until the lease expires.
    with contextlib.suppress(Exception):
        call_within(RELEASE_LIMIT, lease.release_all)
    os._exit(_code(exit))


def _code(exit: SystemExit) -> int:
    return exit.code if isinstance(exit.code, int) else int(exit.code is not None)


class WatchedExit(SystemExit):
    """A SystemExit that records whether it has ended the main thread.

    If the program does not catch the exit, the interpreter reads `code`. A read by the
    interpreter has no calling Python frame; a read by the program has a calling frame.
    """

    has_ended_main = False

    @property
    def code(self) -> Any:
        """The exit code of the process."""
        if sys._getframe().f_back is None:
            self.has_ended_main = True
        return self.args[0] if self.args else None

    @code.setter
    def code(self, code: Any) -> None:
        self.args = (code,)


class ExitWatchdog(ManagedThread):
    """Ends an exiting process if the exit takes longer than its time limit.

    During an exit the program's `finally` blocks, context managers and exit hooks run,
    and Python waits for non-daemon threads and children. `seconds` limits the total.

    If the program has caught SystemExit before the time limit, the watchdog does
    nothing. But while an `except` or `finally` block handles the exit, the process is
    still exiting: the block may raise the exit again.

    After the program's exit hooks Python finalizes: hooks registered before the import
    of this module, open files, `__del__` of objects held by modules. If too little time
    is left, the process skips the finalization, and ends at once.

    Args:
        exit: exit about to be raised on the main thread.
        seconds: time limit of the exit.
        can_reach_all: whether all workers are reachable. If False, the process skips
            the finalization, in which TensorFlow would wait for the unreachable worker,
            longer than any grace period.
    """

    def __init__(
        self, exit: SystemExit, seconds: float, *, can_reach_all: bool = True
    ) -> None:
        global _newest
        super().__init__("tfpreempt-last-exit", self._end)
        self.exit = exit
        self.can_reach_all = can_reach_all
        self.ends = time.monotonic() + seconds
        self._seconds = seconds
        _newest = self
        self.start()

    def _end(self) -> None:
        if self.stop_event.wait(self._seconds) or not self.is_under_way():
            return
        log.error(
            "the process should have exited %.1f s ago, and waits for %s; the "
            "process exits now",
            self._seconds,
            ", ".join(blocking_threads_and_children()),
        )
        end_now(self.exit)

    def is_under_way(self) -> bool:
        """Returns whether `exit` is ending the process.

        True while the main thread raises `exit`, or handles `exit` in an `except` or
        `finally` block. Also True after `exit` has ended the main thread.
        """
        main = threading.main_thread()
        found: Any = sys._current_exceptions().get(main.ident or 0)
        error = found[1] if isinstance(found, tuple) else found  # tuple: Python < 3.12
        while error is not None and error is not self.exit:
            # A `finally` block may have raised another error during the exit.
            error = error.__context__
        return error is self.exit or (not main.is_alive() and self.has_ended_main)

    @property
    def has_ended_main(self) -> bool:
        """Whether the exit has ended the main thread, as far as known."""
        return getattr(self.exit, "has_ended_main", True)


_newest: ExitWatchdog | None = None


@atexit.register  # at import: hooks that are registered later run before this hook
def _skip_the_rest() -> None:
    """Ends the process after the exit hooks, if finalizing would take too long.

    If there is time, Python finalizes, but without garbage collection: 0.1 s of
    processor time instead of 1 s. TensorFlow leaves much garbage, which Python would
    collect repeatedly, and the system frees the memory anyway. The function starts no
    thread, because Python refuses new threads at this time.
    """
    last = _newest
    if last is None or last.stop_event.is_set():
        return
    gc.disable()
    gc.freeze()
    has_time = time.monotonic() + TAKES_APART <= last.ends
    if not (has_time and last.can_reach_all) and last.is_under_way():
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(_code(last.exit))


def blocking_threads_and_children() -> list[str]:
    """Returns descriptions of the causes that delay the exit, for a log message.

    The causes are the line of code that the main thread executes, other threads for
    which Python waits, and child processes.
    """
    main = threading.main_thread()
    found = [
        f"the thread {thread.name!r}"
        for thread in threading.enumerate()
        if not thread.daemon and thread is not main
    ]
    for child in multiprocessing.active_children():
        found.append(f"the child {child.name!r} (pid {child.pid})")
    frame = sys._current_frames().get(main.ident or 0)
    # After the end of the program's code, the main thread only waits for other threads,
    # or runs exit hooks. So name its line only if there is no other cause.
    if frame is not None and (main.is_alive() or not found):
        found.insert(0, f"line {frame.f_lineno} of {frame.f_code.co_filename}")
    return found


LINGER = 30.0
"""Seconds from the beginning of an exit to the end of the process, if no deadline is
known."""

SHORTEST = 0.5
"""Seconds allowed for an exit even after the deadline. Without a known deadline, also
the minimum for the last entries of the journal, on storage that may hang."""

_LONGEST = 300
"""Maximum number of characters of an error in the journal; the log has the rest."""


@dataclasses.dataclass(eq=False)
class ExitController:
    """Ends this worker's participation, and exits the process.

    A process has one ExitController.

    Args:
        cluster: the workers of the run.
        runs: the open runs, oldest first.
        coordinator: coordinator of this worker.
        finish_save: function that waits for the asynchronous save for the given number
            of seconds, and then gives up the save.

    Attributes:
        left: whether the process is exiting: SystemExit is about to be raised, or was
            raised.
        detached: whether the main thread has raised an error, and the peers were
            notified.
        is_over: whether the peers have ended with code 0, and will not be restarted.
        process: id of the process that created this object. In a forked child, the
            object does not end the process.
    """

    cluster: Cluster
    runs: Runs
    coordinator: Coordinator
    finish_save: Callable[[float], None]
    left: bool = False
    detached: bool = False
    is_over: bool = False
    process: int = dataclasses.field(default_factory=os.getpid)
    _last_exit: ExitWatchdog | None = None
    _ending: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @defer_sigint(lambda: True)  # Ctrl-C would interrupt an upload in progress
    def leave(self, outcome: Outcome, reason: str) -> None:
        """Exits by calling the exit function of the oldest run.

        Returns if the exit function returns; training then continues.

        Args:
            outcome: COMMITTED for the exit code after a commit, LOST for the exit code
                without a commit; FINISHED does nothing.
            reason: cause of the exit, for the log and the journal.
        """
        runs = list(self.runs)
        if outcome is Outcome.FINISHED or not runs:
            return
        keep_streams()
        committed = outcome is Outcome.COMMITTED
        if not committed:
            log.error(
                "exiting at step %d without a checkpoint: %s. The run will resume from "
                "the last commit, and repeat the steps since that commit",
                runs[0].step,
                reason.rstrip(".") or "unknown reason",
            )
        else:
            log.info(
                "checkpoint for step %d committed; exiting to be restarted",
                runs[0].step,
            )
        self.left = True
        linger = self._linger  # before the wait for uploads
        for run in runs:
            run.left_at = run.step
        notice_was_served()
        REGISTRY.leave()
        try:
            self.finish_save(self.coordinator.deadlines.left)
            for run in runs if not committed else ():
                self.runs.log_last(run)
            mirrored = self.finish_mirrors(runs)
            self._put_away(runs, outcome, reason, mirrored)
            end = functools.partial(
                runs[0].config._exit, committed, self.cluster, mirrored=mirrored
            )
            if threading.current_thread() is threading.main_thread():
                end()
            else:  # on another thread, SystemExit would end only the thread
                exit_hard(end)
        except SystemExit as exit:
            deadlines = self.coordinator.deadlines
            left = (
                linger
                if deadlines.terminates_at is None
                else max(SHORTEST, deadlines.left) + self._host_waits
            )
            is_answered = (
                self.cluster.num_workers == 1 or not self.coordinator.notes.lost_because
            )
            if type(exit) is SystemExit:
                exit = WatchedExit(exit.code)
            self._last_exit = ExitWatchdog(exit, left, can_reach_all=is_answered)
            raise exit
        except BaseException:  # raised by an exit function to resume in this process
            REGISTRY.stay()
            raise
        self.cancel()  # the exit function returned: training continues
        for run in runs:
            if run.directory.mirror is not None:
                run.directory.mirror.resume()

    def finish_mirrors(self, runs: list[Run], limit: float | None = None) -> bool:
        """Waits for the uploads of the newest commits.

        Args:
            runs: runs whose mirrors are waited for.
            limit: seconds for each mirror; None: the time left until the deadline.

        Returns:
            Whether every upload is complete.
        """
        are_complete = True
        for run in runs:
            mirror = run.directory.mirror
            if mirror is None:
                continue
            left = self.coordinator.deadlines.left if limit is None else limit
            if mirror.finish(left):
                continue
            are_complete = False
            status = mirror.status
            why = f": {status.last_error}" if status.last_error else ""
            late = (
                f"the upload of step {status.latest_step} to {status.uri} was "
                "not complete"
            )
            run.record(Fault(where="mirror", error=f"{late} in time{why}"))
        return are_complete

    def finish_copy(self, run: Run, timeout: float | None) -> None:
        """Waits for the upload of the last commit, after training.

        A notice shortens the wait to the deadline. If the upload is then incomplete,
        the process exits with the restart code, and the restarted process completes the
        upload.

        Args:
            run: the run whose mirror is waited for.
            timeout: seconds; None: no limit while the upload progresses.
        """
        if run.directory.wait_for_mirror(timeout):
            return
        is_noticed = self.coordinator.deadlines.at is not None
        limit = None if is_noticed else 0.0
        if not self.finish_mirrors([run], limit) and is_noticed:
            self.leave(
                Outcome.COMMITTED, "training is finished, but the upload is incomplete"
            )

    def disconnect(self) -> None:
        """Disconnects this process from the coordination service of its cluster.

        Called at the end of the interpreter, because the program's own cleanup may use
        the service, or catch the exit. After a commit or a normal end, the workers
        disconnect together. After a loss or an error, the process ends at once, the
        chief as the last, because the chief hosts the service.
        """
        if not self.cluster.jobs:
            return
        seconds, exit, last = None, None, self._last_exit
        if (
            last is not None
            and not last.stop_event.is_set()
            and (last.is_under_way() or last.has_ended_main)
        ):
            left = max(0.0, last.ends - time.monotonic())
            seconds, exit = left if last.can_reach_all else 0.0, last.exit
        elif isinstance(getattr(sys, "last_value", None), Exception):
            seconds, exit = 0.0, SystemExit(1)
        if not self._disconnect(seconds) and exit is not None:
            end_now(exit)
        with self._ending:  # the thread of a notice may be about to end the process
            pass

    def end_within(self, seconds: float, end: Callable[[], Any]) -> None:
        """Disconnects this process, and ends it after the last handler.

        Waits for the other workers, which may be about to end, too: without the wait,
        the end of the chief could end their processes. Called on the thread of a
        notice. If the program ends meanwhile, `disconnect` waits for this thread, so
        the exit code is the code of `end`.

        Args:
            seconds: longest wait.
            end: function that raises SystemExit.
        """
        with self._ending:
            if self.cluster.jobs:
                self._disconnect(seconds)
            exit_hard(end)

    def _disconnect(self, seconds: float | None) -> bool:
        """Disconnects this process; see `CoordinationService.disconnect`."""
        service: CoordinationService
        service = frameworks.adapter(self.cluster.framework, "coordination")
        self.coordinator.executor.stop()  # ends the blocking reads with an error
        return service.disconnect(seconds, is_chief=self.cluster.is_chief)

    @property
    def _host_waits(self) -> float:
        """Seconds that this process should stay alive after its deadline: its end would
        abort the other processes.

        0 on workers other than the chief, and after a notice for the chief's own
        machine. After a notice of another worker, the chief's deadline is earlier than
        the deadline of the other worker, by a margin for the delay of the message.
        """
        is_told = self.coordinator.state.held is not None
        has_peers = self.cluster.num_workers > 1
        waits = has_peers and self.cluster.is_chief and not is_told
        outlives = self.cluster.host_outlives
        return MESSAGE_DELAY_MARGIN + outlives if waits and outlives else 0.0

    @property
    def _linger(self) -> float:
        """Seconds from SystemExit to the end of the process, if no deadline is known.

        The chief has waited for the `bye` keys, and meanwhile the other workers have
        been exiting: on each worker `LINGER` counts from the beginning of the exit.
        """
        since = self.coordinator.notes.leaves_since
        now = self.coordinator.clock.monotonic()
        return LINGER if since is None else max(SHORTEST, since + LINGER - now)

    def cancel(self) -> None:
        """Cancels the exit: the process continues to train."""
        self.left = False
        if self._last_exit is not None:
            self._last_exit.stop_event.set()
        REGISTRY.stay()

    def force_exit(self, why: str) -> None:
        """Ends the process from any thread, without a commit.

        Called if the main thread reaches no boundary before the deadline.

        Args:
            why: cause of the exit, for the log and the journal.
        """
        if (seconds := self._host_waits) > 0:
            threading.Event().wait(seconds)  # the main thread may exit meanwhile
        runs = list(self.runs)
        is_forked = os.getpid() != self.process
        is_out = self.left or self.detached or self.is_over
        if is_out or is_forked or not runs:
            return
        keep_streams()
        for run in runs:
            self.runs.log_last(run)
        log.error(
            "%s. The process exits now. The run will resume from the last commit, "
            "and repeat the steps since that commit. If a step takes this long, make "
            "the steps shorter or the grace period longer. If an evaluation takes this "
            "long, call handler.check_preemption() in the evaluation.",
            why,
        )
        self._put_away(runs, Outcome.LOST, why)
        self.left = True
        exit_hard(lambda: runs[0].config._exit(False, self.cluster))
        self.left = False

    def _put_away(
        self, runs: list[Run], outcome: Outcome, why: str, mirrored: bool = True
    ) -> None:
        """Records the exit, and releases the leases, so that the next start can begin.

        The time is limited, because storage that hangs may be the cause of the exit.

        Args:
            runs: runs whose journals and leases are handled.
            outcome: outcome of the process.
            why: cause of the exit, for people.
            mirrored: whether every upload is complete, which may change the exit code.
        """
        deadlines = self.coordinator.deadlines
        limit = max(SHORTEST, deadlines.left)
        if deadlines.terminates_at is not None:
            left = deadlines.terminates_at - self.coordinator.clock.monotonic()
            limit = min(limit, max(0.05, left / 2))

        # The config of the oldest run determines the exit code.
        code = runs[0].config._exit_code_for(outcome is Outcome.COMMITTED, mirrored)

        def put_away() -> None:
            for run in runs:
                run.record_exit(outcome, why, code)
                run.release()

        try:
            call_within(limit, put_away)
        except CallTimeoutError:
            log.error(
                "this event is missing in the journal: the disk did not answer "
                "within %.2f s",
                limit,
            )
            return
        for run in runs:
            if run.directory.mirror is not None:
                limit = min(HANDS_IN, deadlines.left / 2)
                run.directory.mirror.hand_in_journal(limit)

    def fail(self, error: BaseException, peer_is_gone: bool = False) -> None:
        """Notifies the peers of an error, or exits if a notice explains the error.

        If the method returns, the caller raises the error.

        Args:
            error: error raised by a step or a save.
            peer_is_gone: whether the error looks like the loss of another worker. After
                a notice a loss is expected, so the process exits.
        """
        coordinator, lost = self.coordinator, ""
        if peer_is_gone:
            where = "".join(f" {run.step + 1}" for run in list(self.runs)[:1])
            lost = describe_loss(error, self.cluster, f"step{where}")
        mine = f"worker {self.cluster.worker}: {type(error).__name__}: {error}"
        coordinator.notes.lost_because = coordinator.notes.lost_because or lost or mine
        if not peer_is_gone:
            self.detached = True
            coordinator.dispatch(ev.Detached())
            return
        coordinator.dispatch(ev.StepFailed())
        match coordinator.wait():
            case ev.ExitDirective(outcome):
                self.leave(outcome, coordinator.notes.lost_because)
                coordinator.dispatch(ev.NextRound())
            case _:
                self.detached = True
                # If an earlier notice was handled with a commit and training continued,
                # the error is a consequence of the announced shutdown.
                if coordinator.deadlines.shutdown_pending:
                    self.leave(Outcome.LOST, coordinator.notes.lost_because)
                if (why := coordinator.notes.lost_because) != mine:
                    add_note(error, f"no later commit was made: {why}")


def describe(error: BaseException) -> str:
    """Returns an error as a single line, for the journal."""
    kind, text = type(error).__name__, " ".join(str(error).split())
    line = f"{kind}: {text}" if text else kind
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 4]} ..."


def notify_peers(
    worker: int,
    executor: StoreExecutor,
    key: str,
    error: BaseException,
    send: Callable[[str, int | None], None],
) -> None:
    """Makes the collectives of the peers fail with an error of this worker.

    The worker that failed first inserts a key, so later errors can name the first
    failure.

    Args:
        worker: index of this worker.
        executor: access to the key-value store.
        key: insert-once key of the first failure since the start of the workers.
        error: the error about to be raised here; gets a note if a peer failed first.
        send: function that sends a message, and TensorFlow's error code or None, to the
            peers.
    """
    mine = f"{type(error).__name__}: {error}"
    # The notes of the error may name a lost worker.
    notes = getattr(error, "__notes__", ())
    record = {"worker": worker, "error": "\n".join([mine[:2000], *notes])}
    insert = functools.partial(executor.insert, key, json.dumps(record))
    first = call_and_wait(insert, 2.0)
    if first is None:
        return  # the store does not answer, and `send` would wait while holding the GIL
    if (earliest := json.loads(first)) != record:
        add_note(
            error, f"worker {earliest['worker']} failed first: {earliest['error']}"
        )
    code = getattr(error, "error_code", None)
    message = getattr(error, "message", None) if code is not None else None
    message = message or f"worker {worker} raised {mine}"
    try:
        call_within(5.0, lambda: send(message, code))
    except Exception as failure:  # noqa: BLE001 - the error itself is raised anyway
        log.debug("the error could not be reported to the other workers: %s", failure)
