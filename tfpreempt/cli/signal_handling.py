"""Signals received by waiting instead of by a handler.

A waiting thread receives a signal at one point only, never between two arbitrary lines.
A wait that relied on a handler could miss a signal just before the wait begins.
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
    """Blocks signals, and yields the function that waits for the blocked signals.

    A signal ignored by the caller (SIGHUP under nohup, SIGINT in a background job)
    stays ignored, except SIGTERM: a shell with `trap "" TERM` makes every program that
    it starts ignore SIGTERM, and platforms stop a job by SIGTERM. Main thread only.
    Threads and processes started in the context block the signals too. Signals still
    pending at the end are dropped.
    """
    ignored = {each for each in numbers if signal.getsignal(each) == signal.SIG_IGN}
    held = {*numbers} - ignored | {*numbers} & {signal.SIGTERM}

    def wait(seconds: float | None) -> signal.Signals | None:
        if seconds is None:
            return signal.Signals(signal.sigwait(held))
        told = signal.sigtimedwait(held, seconds)
        return None if told is None else signal.Signals(told.si_signo)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield wait
    finally:
        while signal.sigtimedwait(held, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
