"""Notices from signals, received at once even if the main thread runs a long op."""

from __future__ import annotations

import functools
import logging
import signal
import threading

from tfpreempt import errors
from tfpreempt.notice._signal_registry import REGISTRY
from tfpreempt.notice.forked_children import guard_children
from tfpreempt.notice.source import NoticeSourceBase

_logger = logging.getLogger(__name__)

# Other signals are not allowed: SIGSEGV and similar signals mean a bug, SIGCHLD and
# SIGPIPE occur in every run, and SIGKILL and SIGSTOP cannot be caught.
_NAMES = "TERM", "INT", "USR1", "USR2", "HUP", "QUIT", "ALRM", "CONT", "XCPU", "PWR"
WATCHABLE = {name: signal.Signals[f"SIG{name}"] for name in _NAMES}

_ELSEWHERE = (
    "make the handler on the main thread; or pass signals=() and a "
    "termination_watcher_fn or a notice_file, which need no signal"
)


class SignalSource(NoticeSourceBase):
    """Reports a notice each time that a signal arrives.

    Several sources in a process may watch the same signal. The handler of tfpreempt
    calls the Python handler that was installed before, but not the default handler. So
    a watched signal neither interrupts nor ends the process. When the last source of
    the signal is closed, the earlier handler and the earlier wake-up fd are restored.
    But if the process is exiting after a notice, the signal is ignored until the end of
    the process, so that another signal cannot change the exit code.

    Forked children do not watch the signal. Children of multiprocessing ignore the
    signal unless their parent has sent the signal (`forked_children.py`). If the main
    thread blocks the signal, for instance by an inherited signal mask, a thread of
    tfpreempt receives the signal.

    Args:
        signum: the signal: a `signal.Signals`, a number, or a name with or without
            "SIG".

    Raises:
        ConfigurationError: there is no such signal, or the signal cannot be a notice.
        NotMainThreadError: `start()` was called on another thread than the main thread.
    """

    def __init__(self, signum: signal.Signals | int | str) -> None:
        self._signal = parse_signal(signum)
        super().__init__(f"signal:{self._signal.name}")
        self._listener = functools.partial(self.send, self._signal.name)
        self._has_warned = False

    def _begin(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise errors.NotMainThreadError(
                f"{self.name} was started on the thread "
                f"{threading.current_thread().name!r}; Python allows signal "
                f"handlers only on the main thread: {_ELSEWHERE}"
            )
        guard_children(self._signal)
        REGISTRY.subscribe(self._signal, self._listener)

    def rearm(self) -> None:
        """Installs the handler and the wake-up fd again.

        When a program creates a MultiWorkerMirroredStrategy, C++ code of TensorFlow
        installs a SIGTERM handler, which replaces the handler of tfpreempt. Python can
        install a handler only on the main thread. On another thread the method does
        nothing, and logs a warning once.
        """
        if threading.current_thread() is threading.main_thread():
            REGISTRY.rearm(self._signal)
        elif not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "TensorFlow may have replaced the handler of %s, which cannot be "
                "installed again outside of the main thread: %s",
                self.name,
                _ELSEWHERE,
            )

    def _end(self) -> None:
        REGISTRY.unsubscribe(self._signal, self._listener)


def parse_signal(value: signal.Signals | int | str) -> signal.Signals:
    """Returns the signal with the given number or name.

    Raises:
        ConfigurationError: there is no such signal, or the signal cannot be a notice.
    """
    if isinstance(value, str):
        found = WATCHABLE.get(value.strip().upper().removeprefix("SIG"))
    else:
        same = (each for each in WATCHABLE.values() if each == value)
        found = None if value is True else next(same, None)
    if found is None:
        raise errors.ConfigurationError(
            f"signal {value!r}: expected one of {', '.join(WATCHABLE)} (with or "
            "without 'SIG', or a signal.Signals value); other signals do not "
            "exist, cannot be caught (KILL, STOP), or do not announce a termination"
        )
    return found
