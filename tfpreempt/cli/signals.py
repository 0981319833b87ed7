"""Signals that are waited for instead of handled.

None can come between two lines, and a wait that a handler ends could miss it.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

from tfpreempt.notice.signals import WATCHABLE

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

NOTICES = frozenset(WATCHABLE.values()) - {signal.SIGCONT}
"""Signals that a platform config may watch, and that would end this process.

A platform may send its notice to all processes of a job. SIGCONT ends no process, and a
shell sends it after Ctrl-Z.
"""

Wait = Callable[[float | None], signal.Signals | None]
"""Waits so many seconds (None: without limit); returns the signal that has ended it."""


@contextlib.contextmanager
def held_signals(*numbers: signal.Signals) -> Iterator[Wait]:
    """Blocks signals, for the wait that it yields.

    A signal that the caller ignores (SIGHUP under nohup, SIGINT in a background job)
    stays ignored, except SIGTERM: a shell with `trap "" TERM` passes that on to every
    program that it starts, and platforms stop a job by SIGTERM. Main thread only;
    threads and processes that are started within block the signals too. Signals that
    were not waited for at the end are dropped.
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
