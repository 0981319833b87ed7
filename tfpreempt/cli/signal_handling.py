"""Waits for signals in one thread, without signal handlers.

A signal handler would run between any two lines of the program, and a wait that depends
on a handler can miss a signal that arrives just before the wait. So the signals are
blocked, and a thread receives them only when it waits for them.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

from tfpreempt.notice.signals import WATCHABLE

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

NOTICES = frozenset(WATCHABLE.values()) - {signal.SIGCONT}
"""Signals that a platform config may watch, and that terminate a process by default.

The supervisor handles all of them, because a platform may send its notice to all
processes of a job. SIGCONT is left out: it ends no process, and a shell sends it after
Ctrl-Z.
"""

WaitForSignal = Callable[[float | None], signal.Signals | None]
"""Function that waits for a signal. Takes a timeout in seconds, or None for no timeout;
returns the signal, or None after the timeout."""


@contextlib.contextmanager
def held_signals(*numbers: signal.Signals) -> Iterator[WaitForSignal]:
    """Context manager: blocks signals, and yields a function that waits for them.

    Use on the main thread. Threads and processes that are started in the `with` block
    also block the signals. Signals that are pending at its end are dropped.

    A signal that this process ignores from its start (SIGHUP under nohup, SIGINT in a
    background job) stays ignored. SIGTERM is an exception: platforms stop a job by
    SIGTERM, and a shell script with `trap "" TERM` makes all its programs ignore it.

    Args:
        *numbers: the signals.
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
