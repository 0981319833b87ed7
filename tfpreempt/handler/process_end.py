"""The end of a process: with its code, whatever holds it up."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - its own exit hook must come after ours
import contextlib
import gc
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from tfpreempt.checkpoint import lease
from tfpreempt.core.threads import OutOfTimeError, OwnedThread, call_within

log = logging.getLogger(__name__)

FLUSH_LIMIT = 1.0
"""Seconds that a stream may take for what was printed."""

RELEASE_LIMIT = 0.5
"""Seconds that leases may take to be released, on storage that may hang."""

TAKES_APART = 1.0
"""Seconds in which Python takes itself apart. With TensorFlow that is a quarter of a
second of processor time, more where others want the processor. Nothing of ours can run
by then, or end it."""


def skip_last_collections() -> None:
    """Makes the interpreter's end quick: 0.1 s in place of 1 s of processor time.

    At its end Python collects garbage again and again while it takes modules apart;
    what TensorFlow leaves behind is much, and the system frees it anyway. All else of
    an ordinary exit happens: `finally`, exit hooks, threads, ends by last references.
    """
    gc.disable()
    gc.freeze()


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
        self._exit = exit
        self._seconds = seconds
        self._can_reach_all = can_reach_all
        self._ends = time.monotonic() + seconds
        _newest = self
        self.start()

    def skip_the_rest(self) -> None:
        """The program's exit hooks have run, and no thread can be started."""
        has_time = time.monotonic() + TAKES_APART <= self._ends
        is_last = not (has_time and self._can_reach_all)
        if is_last and not self.stop_event.is_set() and self._is_under_way():
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):
                    stream.flush()
            os._exit(_code(self._exit))

    def _end(self) -> None:
        if self.stop_event.wait(self._seconds) or not self._is_under_way():
            return
        log.error(
            "tfpreempt: the process was to leave %.1f s ago and waits for %s; it ends "
            "now",
            self._seconds,
            ", ".join(holders()),
        )
        end_now(self._exit)

    def _is_under_way(self) -> bool:
        """Whether it passes through the main thread, or has ended that one."""
        main = threading.main_thread()
        found: Any = sys._current_exceptions().get(main.ident or 0)
        error = found[1] if isinstance(found, tuple) else found  # until Python 3.11
        while error is not None and error is not self._exit:
            error = error.__context__  # another one, in a `finally` of the way out
        ended_main = getattr(self._exit, "has_ended_main", True)
        return error is self._exit or (not main.is_alive() and ended_main)


_newest: LastExit | None = None


@atexit.register  # with the import: the hooks of the program come before it
def _skip_the_rest() -> None:
    if _newest is not None:
        _newest.skip_the_rest()


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
