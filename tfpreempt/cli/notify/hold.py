"""A wait that ends by a signal too, so that what was put up is taken back.

The signals are blocked and waited for, not handled: none can come between two lines,
and a wait that a handler ends could miss it.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

Wait = Callable[[float | None], signal.Signals | None]
"""Waits so many seconds (None: without limit); returns the signal that has ended it."""

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def held_signals() -> Iterator[Wait]:
    """Holds SIGINT, SIGTERM and SIGHUP back, for the wait that it yields.

    A SIGHUP that is ignored (nohup) stays so. Main thread only; threads that are
    started within hold them back too.
    """
    ends = {
        number
        for number in _ENDS
        if number is not signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    }

    def wait(seconds: float | None) -> signal.Signals | None:
        if seconds is None:
            return signal.Signals(signal.sigwait(ends))
        told = signal.sigtimedwait(ends, seconds)
        return None if told is None else signal.Signals(told.si_signo)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        yield wait
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
