"""The exit of the process: by a commit, a loss, an error, a deadline, or the end.

The process ends with its code even if a thread or a child does not. Ctrl-C waits for
the save that is under way.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - its own exit hook must come after ours
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
from tfpreempt.coordination import events as ev
from tfpreempt.coordination.coordinator import Coordinator
from tfpreempt.coordination.runtime import Runtime, answer
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.events import Fault, Outcome
from tfpreempt.core.python import add_note
from tfpreempt.core.threads import OutOfTimeError, OwnedThread, call_within
from tfpreempt.handler.error_causes import describe_loss
from tfpreempt.handler.run import HANDS_IN, Run, Runs
from tfpreempt.handler.single_client import notice_was_served
from tfpreempt.notice._signal_registry import REGISTRY

log = logging.getLogger(__name__)


@contextlib.contextmanager
def held_back(is_saving: Callable[[], bool]) -> Iterator[None]:
    """SIGINT within this block is honoured after it; a second one at once.

    In the program's own way: its handler is called, Python's raises KeyboardInterrupt.
    Where the block ends by SystemExit, that is the way out, and another one that would
    raise KeyboardInterrupt there is ignored. A SIGINT that is watched as a notice, or
    that nobody handles, is left alone. So is that of other threads: it comes to the
    main thread.

    Args:
        is_saving: whether there is something to finish; called in the signal handler
            and on a thread.

    Raises:
        KeyboardInterrupt: at the second one.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT) if is_main else None
    if not callable(before) or signal.SIGINT in REGISTRY.watches:
        yield
        return
    count, told = 0, False

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal count
        count += is_saving()
        if count == 0:
            before(signum, frame)
        elif count > 1:
            raise KeyboardInterrupt(
                "a second Ctrl-C gave up the save that was under way, or its copy: the "
                "last commit stands, what was trained after it is lost"
            )

    def tell() -> None:
        nonlocal told
        if is_saving() and not told:
            told = True
            log.warning(
                "tfpreempt: Ctrl-C is honoured when the save that is under way is "
                "finished; press it again to give that up"
            )

    signal.signal(signal.SIGINT, handle)
    REGISTRY.subscribe(signal.SIGINT, tell)  # seen at once, even within TensorFlow
    try:
        yield
    finally:
        REGISTRY.unsubscribe(signal.SIGINT, tell)
        if signal.getsignal(signal.SIGINT) is handle:
            REGISTRY.put_back(signal.SIGINT, before)
    if count:
        signal.raise_signal(signal.SIGINT)


FLUSH_LIMIT = 1.0
"""Seconds that a stream may take for what was printed."""

RELEASE_LIMIT = 0.5
"""Seconds that leases may take to be released, on storage that may hang."""

TAKES_APART = 1.0
"""Seconds in which Python takes itself apart. With TensorFlow that is a quarter of a
second of processor time, more where others want the processor. Nothing of ours can run
by then, or end it."""


def on_interpreter_end(call: Callable[[], None]) -> None:
    """Calls at the end of the program, while threads can still be started.

    Python refuses new threads once its own exit hooks for threads have run, which is
    before `atexit`; a last save needs some. concurrent.futures registers in the same
    way; the hooks run in reverse order, so it is imported first.
    """
    register: Any = getattr(threading, "_register_atexit", atexit.register)
    register(call)


def keep_streams() -> None:
    """Whoever prints or logs from now on can, also where the streams were closed.

    Test runners and daemons close them. A log record then raises, in the middle of the
    way out; and files that are opened get the closed descriptors' numbers, which C++
    goes on writing its messages to.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # it has taken the number of one that was closed
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(getattr(sys, name, None), "closed", True):
            _silence(name)


def flush_streams() -> None:
    """The interpreter ends: what was printed goes out, if it can.

    Python would wait for a pipe that nobody reads, and exit with 120 on a full disk.
    """
    keep_streams()
    for name in ("stdout", "stderr"):
        try:
            call_within(FLUSH_LIMIT, getattr(sys, name).flush)
        except Exception:  # noqa: BLE001 - of whatever stands there as a stream
            _silence(name)


def _silence(name: str) -> None:
    setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until the end


def exit_hard(leave: Callable[[], Any]) -> None:
    """Runs what may raise SystemExit where that would not end the process.

    Nor would an error, of an exit function, say: the program ends by it here too.
    """
    try:
        leave()
    except SystemExit as exit:
        end_now(exit)
    except Exception:
        log.exception(
            "tfpreempt: an error came while the process was leaving, so it ends with "
            "exit code 1, as a failure; what was committed stands"
        )
        end_now(SystemExit(1))


def end_now(exit: SystemExit) -> None:
    """Ends the process with this exit's code; any thread."""
    with contextlib.suppress(OutOfTimeError):
        call_within(FLUSH_LIMIT, logging.shutdown)
    flush_streams()
    with contextlib.suppress(Exception):  # the next start waits then, and no more
        call_within(RELEASE_LIMIT, lease.release_all)
    os._exit(_code(exit))


def _code(exit: SystemExit) -> int:
    return exit.code if isinstance(exit.code, int) else int(exit.code is not None)


class WatchedExit(SystemExit):
    """A SystemExit that records whether it ended the main thread.

    The interpreter reads the code of an exit, and no function of the program calls it,
    when the exit has passed the last frame of the program.
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


class LastExit(OwnedThread):
    """Sees to it that a process which is on its way out gets out.

    The program's `finally` blocks, context managers and exit hooks run on that way, and
    Python waits for threads and children that are no daemons. All that has so many
    seconds. If SystemExit was caught by then, nothing happens; a block that handles it
    counts as a way out until it is left, for it may raise it again. When the program's
    exit hooks have run the process ends at once, unless there is time for Python to
    take itself apart: hooks from before the import of this module, files that nobody
    closed, `__del__` of what modules hold.

    Args:
        exit: is about to be raised on the main thread.
        seconds: what it may take.
        can_reach_all: False where another worker does not answer. TensorFlow takes
            leave of it as it is taken apart, and waits for longer than any grace.
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
            "tfpreempt: the process was to leave %.1f s ago and waits for %s; it ends "
            "now",
            self._seconds,
            ", ".join(holders()),
        )
        end_now(self.exit)

    def is_under_way(self) -> bool:
        """Whether it passes through the main thread, or has ended that one."""
        main = threading.main_thread()
        found: Any = sys._current_exceptions().get(main.ident or 0)
        error = found[1] if isinstance(found, tuple) else found  # until Python 3.11
        while error is not None and error is not self.exit:
            error = error.__context__  # another one, in a `finally` of the way out
        ended_main = getattr(self.exit, "has_ended_main", True)
        return error is self.exit or (not main.is_alive() and ended_main)


_newest: LastExit | None = None


@atexit.register  # with the import: the hooks of the program come before it
def _skip_the_rest() -> None:
    """The program's exit hooks have run, and no thread can be started.

    If there is time for Python to take itself apart, that takes 0.1 s in place of 1 s
    of processor time: Python would collect garbage again and again, TensorFlow leaves
    much of it, and the system frees it anyway.
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


def holders() -> list[str]:
    """What the end of this process waits for, for people."""
    main = threading.main_thread()
    found = [
        f"the thread {thread.name!r}"
        for thread in threading.enumerate()
        if not thread.daemon and thread is not main
    ]
    for child in multiprocessing.active_children():
        found.append(f"the child {child.name!r} (pid {child.pid})")
    frame = sys._current_frames().get(main.ident or 0)
    # A main thread that has ended waits for the others, or runs exit hooks.
    if frame is not None and (main.is_alive() or not found):
        found.insert(0, f"line {frame.f_lineno} of {frame.f_code.co_filename}")
    return found


LINGER = 30.0
"""Seconds from SystemExit to the program's end where no deadline was told."""

SHORTEST = 0.5
"""Seconds for that in any case; and for the journal, on storage that may hang."""

_LONGEST = 300
"""Characters of an error in the journal; the program's log has all of it."""


@dataclasses.dataclass(eq=False)
class ExitPath:
    """Ends this worker's part; one for each process.

    Args:
        cluster: who the workers are.
        runs: the open handlers, oldest first.
        coordinator: this worker's.
        finish_save: waits for the save that is under way beside the main thread, for
            so many seconds at most; it commits nothing after that.

    Attributes:
        left: whether SystemExit is on its way.
        detached: whether main has raised, and the peers were told.
        is_over: whether the others have ended well, and would not come back.
        process: its number; a child that was forked has no part in its end.
    """

    cluster: Cluster
    runs: Runs
    coordinator: Coordinator
    finish_save: Callable[[float], None]
    left: bool = False
    detached: bool = False
    is_over: bool = False
    process: int = dataclasses.field(default_factory=os.getpid)
    _last_exit: LastExit | None = None

    @held_back(lambda: True)  # a copy may be under way
    def leave(self, outcome: Outcome, reason: str) -> None:
        """Leaves by the oldest handler's exit function; returns if that does."""
        runs = list(self.runs)
        if outcome is Outcome.FINISHED or not runs:
            return
        keep_streams()
        committed = outcome is Outcome.COMMITTED
        if not committed:
            log.error(
                "tfpreempt: leaving, committed nothing at step %d; the last commit "
                "stands, and what was trained since is trained again. Reason: %s",
                runs[0].step,
                reason or "unknown",
            )
        else:
            log.warning(
                "tfpreempt: step %d is committed; leaving to be started again",
                runs[0].step,
            )
        self.left = True
        for run in runs:
            run.left_at = run.step
        notice_was_served()
        REGISTRY.leave()
        try:
            self.finish_save(self.coordinator.deadlines.left)
            mirrored = self.finish_mirrors(runs)
            self._put_away(runs, outcome, reason, mirrored)
            end = functools.partial(
                runs[0].config.leave, committed, self.cluster, mirrored=mirrored
            )
            if threading.current_thread() is threading.main_thread():
                end()
            else:  # SystemExit would end this thread alone, and the program with 0
                exit_hard(end)
        except SystemExit as exit:
            deadlines = self.coordinator.deadlines
            left = LINGER if deadlines.told is None else max(SHORTEST, deadlines.left)
            is_answered = (
                self.cluster.world == 1 or not self.coordinator.notes.lost_because
            )
            if type(exit) is SystemExit:
                exit = WatchedExit(exit.code)
            self._last_exit = LastExit(exit, left, can_reach_all=is_answered)
            raise exit
        except BaseException:  # of an exit function that restarts in this process
            REGISTRY.stay()
            raise
        self.come_back()  # the exit function returned: training goes on
        for run in runs:
            if run.directory.mirror is not None:
                run.directory.mirror.resume()

    def finish_mirrors(self, runs: list[Run], limit: float | None = None) -> bool:
        """Waits for the copies of the newest commits.

        Args:
            runs: whose.
            limit: seconds for each; None: what the notice leaves.

        Returns:
            Whether all are whole.
        """
        are_whole = True
        for run in runs:
            mirror = run.directory.mirror
            if mirror is None:
                continue
            left = self.coordinator.deadlines.left if limit is None else limit
            if mirror.finish(left):
                continue
            are_whole = False
            status = mirror.status
            why = f": {status.fault}" if status.fault else ""
            late = f"the copy of step {status.newest} in {status.uri} was not whole"
            run.record(Fault(where="mirror", error=f"{late} in time{why}"))
        return are_whole

    def finish_copy(self, run: Run, timeout: float | None) -> None:
        """Training is over: waits for the copy of its last commit.

        A notice that comes meanwhile shortens the wait. If the copy is not whole then,
        the process is to be started again, so that it gets whole.

        Args:
            run: the handler.
            timeout: seconds; None: while it gets on.
        """
        if run.directory.wait_for_mirror(timeout):
            return
        is_noticed = self.coordinator.deadlines.at is not None
        limit = None if is_noticed else 0.0
        if not self.finish_mirrors([run], limit) and is_noticed:
            self.leave(Outcome.COMMITTED, "training is over, its copy is not whole")

    def come_back(self) -> None:
        """The process is not on its way out any more."""
        self.left = False
        if self._last_exit is not None:
            self._last_exit.stop_event.set()
        REGISTRY.stay()

    def overrun(self, why: str) -> None:
        """No boundary comes in time: ends the process from this thread."""
        runs = list(self.runs)
        is_forked = os.getpid() != self.process
        is_out = self.left or self.detached or self.is_over
        if is_out or is_forked or not runs:
            return
        keep_streams()
        log.error(
            "tfpreempt: %s; the process ends now. The last commit stands, and what was "
            "trained since is trained again. If steps or evaluations take this long, "
            "call save_checkpoint_if_preempted() within them.",
            why,
        )
        self._put_away(runs, Outcome.LOST, why)
        self.left = True
        exit_hard(lambda: runs[0].config.leave(False, self.cluster))
        self.left = False

    def _put_away(
        self, runs: list[Run], outcome: Outcome, why: str, mirrored: bool = True
    ) -> None:
        """Records the exit, and lets go of leases: the next start need not wait.

        Storage that hangs is what may have kept a boundary, or a commit, from coming.
        """
        deadlines = self.coordinator.deadlines
        limit = max(SHORTEST, deadlines.left)
        if deadlines.told is not None:
            left = deadlines.told - self.coordinator.clock.monotonic()
            limit = min(limit, max(0.05, left / 2))

        # The process exits by the config of the oldest run.
        code = runs[0].config.code(outcome is Outcome.COMMITTED, mirrored)

        def put_away() -> None:
            for run in runs:
                run.record_exit(outcome, why, code)
                run.release()

        try:
            call_within(limit, put_away)
        except OutOfTimeError:
            log.error(
                "tfpreempt: the journal lacks this: its disk did not answer in %.2f s",
                limit,
            )
            return
        for run in runs:
            if run.directory.mirror is not None:
                limit = min(HANDS_IN, deadlines.left / 2)
                run.directory.mirror.hand_in_journal(limit)

    def fail(self, error: BaseException, peer_is_gone: bool = False) -> None:
        """Main raises; peers are told. Returns if the error is to be raised.

        Args:
            error: what the step raised.
            peer_is_gone: whether it looks like the loss of another worker, which after
                a notice is not an error but the expected end.
        """
        coordinator, lost = self.coordinator, ""
        if peer_is_gone:
            where = "".join(f" {run.step + 1}" for run in list(self.runs)[:1])
            lost = describe_loss(error, self.cluster, f"step{where}")
        mine = f"worker {self.cluster.worker}: {type(error).__name__}: {error}"
        coordinator.notes.lost_because = coordinator.notes.lost_because or lost or mine
        if not peer_is_gone:
            self.detached = True
            coordinator.feed(ev.Detached())
            return
        coordinator.feed(ev.StepFailed())
        match coordinator.wait():
            case ev.Leave(outcome):
                self.leave(outcome, coordinator.notes.lost_because)
                coordinator.feed(ev.NextRound())
            case _:
                self.detached = True
                if coordinator.deadlines.may_go:  # trained on after a commit
                    self.leave(Outcome.LOST, coordinator.notes.lost_because)
                if (why := coordinator.notes.lost_because) != mine:
                    add_note(error, f"tfpreempt: the last commit stands: {why}")


def describe(error: BaseException) -> str:
    """An error in one line, for the journal."""
    kind, text = type(error).__name__, " ".join(str(error).split())
    line = f"{kind}: {text}" if text else kind
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 4]} ..."


def tell_peers(
    worker: int,
    runtime: Runtime,
    key: str,
    error: BaseException,
    send: Callable[[str, int | None], None],
) -> None:
    """Makes the peers' collectives fail with this error, and names the first one.

    Args:
        worker: who this is.
        runtime: access to the store.
        key: insert-once: the first failure of this incarnation.
        error: what is about to be raised here; gets a note if a peer failed first.
        send: tells the cluster a message and TensorFlow's error code, if any.
    """
    mine = f"{type(error).__name__}: {error}"
    notes = getattr(error, "__notes__", ())  # may name another worker, which is gone
    record = {"worker": worker, "error": "\n".join([mine[:2000], *notes])}
    tell = functools.partial(runtime.insert, key, json.dumps(record))
    first = answer(tell, 2.0)
    if first is None:
        return  # the store does not answer, and reporting would hold the GIL
    if (told := json.loads(first)) != record:
        add_note(error, f"worker {told['worker']} failed first: {told['error']}")
    code = getattr(error, "error_code", None)
    message = getattr(error, "message", None) if code is not None else None
    message = message or f"worker {worker} raised {mine}"
    try:
        call_within(5.0, lambda: send(message, code))
    except Exception as failure:  # noqa: BLE001 - the error itself is raised anyway
        log.info("tfpreempt: peers could not be told of the error: %s", failure)
