"""Waits for signals, without signal handlers.

A handler would run between any two lines of the program, and a wait that depends on a
handler can miss a signal that arrives just before the wait. A thread that waits for
blocked signals receives them only at that point.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

from tfpreempt.notice.signals import WATCHABLE

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

NOTICES = frozenset(WATCHABLE.values()) - {signal.SIGCONT}
"""Signals that a platform config may watch and that terminate a process by default.

A platform may send its notice to all processes of a job, the supervisor included.
SIGCONT is left out: SIGCONT ends no process, and a shell sends SIGCONT after Ctrl-Z.
"""

WaitForSignal = Callable[[float | None], signal.Signals | None]
"""Waits for a signal, with a timeout in seconds or None; returns the signal or None."""


@contextlib.contextmanager
def held_signals(*numbers: signal.Signals) -> Iterator[WaitForSignal]:
    """Context that blocks signals, and yields a function waiting for them.

    Use on the main thread. Threads and processes started in the context also block the
    signals. Signals that are pending at the end are dropped.

    A signal that the parent process ignores (SIGHUP under nohup, SIGINT in a background
    job) stays ignored. SIGTERM is an exception, because platforms stop a job by
    SIGTERM, but a shell with `trap "" TERM` makes all its programs ignore it.
    """
    ignored = {each for each in numbers if signal.getsignal(each) == signal.SIG_IGN}
    held = {*numbers} - ignored | {*numbers} & {signal.SIGTERM}

    def wait(seconds: float | None) -> signal.Signals | None:
        if seconds is None:
            return signal.Signals(signal.sigwait(held))
        received = signal.sigtimedwait(held, seconds)
        return None if received is None else signal.Signals(received.si_signo)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield wait
    finally:
        while signal.sigtimedwait(held, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
