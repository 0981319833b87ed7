"""The process's watched signals: one handler for each, however many listen to it.

The handler only records. What reports a signal is the byte that C writes to the
wake-up fd (see `_wakeup.py`); the handler itself calls the handler that was there
before and steps in only where somebody else has taken the wake-up fd.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from tfpreempt.notice._wakeup import WakeupFd
from tfpreempt.notice.readers import release_children

_logger = logging.getLogger(__name__)

Listener = Callable[[], None]
_Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None


class _Watch:
    """One signal: who listens, and which handlers ours hides.

    The handlers are a stack, because a handler that was installed over ours may call
    ours, and `arm()` then puts ours over it: each time ours is entered from within
    itself it calls the next one down, so nobody is called twice and nothing loops.
    """

    def __init__(self, signum: int, record: Callable[[int], None]) -> None:
        self.signum = signum
        self.listeners: tuple[Listener, ...] = ()
        self._record = record
        self._hidden: list[_Handler] = []  # the last one is the one that we replaced
        self._depth = 0
        self._handler = self._handle

    def arm(self) -> None:
        """Installs our handler, anew if it is there: C++ may have replaced it."""
        current = signal.getsignal(self.signum)
        if current is not self._handler:
            if current in self._hidden:
                self._hidden.remove(current)
            self._hidden.append(current)
        signal.signal(self.signum, self._handler)

    def restore(self, default: signal.Handlers = signal.SIG_DFL) -> bool:
        """Puts back the handler that ours replaced, if ours is still there.

        Args:
            default: in place of what ends the process.

        Returns:
            Whether that was it.
        """
        if signal.getsignal(self.signum) is not self._handler:
            return False
        hidden = self._hidden[-1]
        # None: it was installed from C before Python came; it can't be put back.
        is_default = hidden is None or hidden is signal.SIG_DFL
        if default is signal.SIG_IGN:
            is_default = is_default or hidden is signal.default_int_handler
        signal.signal(self.signum, default if is_default else hidden)
        return is_default

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        depth = self._depth
        if depth == 0:
            is_ours = signal.getsignal(signum) is self._handler
            if is_ours and not self.listeners:  # a close() off the main thread left it
                self.restore()
                signal.raise_signal(signum)
                return
            self._record(signum)
        if depth >= len(self._hidden):
            return
        hidden = self._hidden[-1 - depth]
        if callable(hidden) and hidden is not signal.default_int_handler:
            self._depth = depth + 1
            try:
                hidden(signum, frame)
            finally:
                self._depth = depth


class SignalRegistry:
    """All watched signals of the process. Made once, by this module."""

    def __init__(self) -> None:
        # Re-entrant: a chained handler may close a source while we hold it. Never
        # taken by the signal handler or the reading thread.
        self._lock = threading.RLock()
        self._watches: dict[int, _Watch] = {}
        self._wakeup: WakeupFd | None = None
        self._mask = threading.local()
        self._is_leaving = False
        self._ignored: set[int] = set()

    def subscribe(self, signum: int, listener: Listener) -> None:
        """Calls `listener` for each such signal, in a thread. Main thread."""
        _register_fork_hooks()
        with self._lock:
            if self._wakeup is None:
                self._wakeup = WakeupFd(self._dispatch)
                self._wakeup.install()
            watch = self._watches.get(signum)
            if watch is None:
                watch = self._watches[signum] = _Watch(signum, self._record)
            watch.listeners = (*watch.listeners, listener)
            self.rearm(signum)

    def rearm(self, signum: int) -> None:
        """Installs handler and wake-up fd anew, over what came since. Main thread."""
        with self._lock:
            if self._wakeup is None or signum not in self._watches:
                return
            if self._wakeup.probe() not in (self._wakeup.fd, -1):
                # Somebody else's fd is in. He may forward to ours, so we go over him
                # with another pair and stop reading the old one: no byte runs in
                # circles.
                retired, self._wakeup = self._wakeup, WakeupFd(self._dispatch)
                self._wakeup.install()
                retired.stop()
            self._watches[signum].arm()

    def unsubscribe(self, signum: int, listener: Listener) -> None:
        """Ends it. The last one puts handler and wake-up fd back. Main thread.

        Elsewhere signals cannot be put back: the handler stays, and with the next
        signal makes way for the one before, as if it had not been there.
        """
        done: WakeupFd | None = None
        with self._lock:
            watch = self._watches.get(signum)
            if watch is None or listener not in watch.listeners:
                return  # a forked child inherited the source, but not its watch
            watch.listeners = tuple(
                kept for kept in watch.listeners if kept != listener
            )
            if watch.listeners:
                return
            if threading.current_thread() is not threading.main_thread():
                _logger.warning(
                    "%s: closed off the main thread, where signals cannot be put back; "
                    "close it on the main thread",
                    signal.Signals(signum).name,
                )
                return
            if not self._is_leaving:
                watch.restore()
            elif watch.restore(signal.SIG_IGN):
                self._ignored.add(signum)
            del self._watches[signum]
            if not self._watches and self._wakeup is not None:
                self._wakeup.put_back()
                done, self._wakeup = self._wakeup, None
        if done is not None:
            done.stop()  # outside the lock: it waits for listeners that may want it

    def is_watched(self, signum: int) -> bool:
        """Whether somebody listens to it."""
        return signum in self._watches

    def put_back(self, signum: int, handler: _Handler) -> None:
        """Installs the handler that was there before. Main thread.

        On the way out it is ignored in place of raising KeyboardInterrupt.
        """
        if self._is_leaving and handler is signal.default_int_handler:
            self._ignored.add(signum)
            handler = signal.SIG_IGN
        signal.signal(signum, handler)

    def leave(self) -> None:
        """The process is on its way out, and from now on the last to listen leaves
        signals ignored: another SIGTERM must not change the exit code. Any thread.
        """
        self._is_leaving = True
        release_children(True)

    def stay(self) -> None:
        """It is not: those that were left ignored get their default again."""
        release_children(False)
        self._stay()

    def _stay(self) -> None:
        self._is_leaving = False
        if threading.current_thread() is not threading.main_thread():
            return
        while self._ignored:
            signum = self._ignored.pop()
            if signal.getsignal(signum) is signal.SIG_IGN:
                is_int = signum == signal.SIGINT
                default = signal.default_int_handler if is_int else signal.SIG_DFL
                signal.signal(signum, default)

    def _dispatch(self, signum: int) -> None:
        """In the reading thread."""
        watch = self._watches.get(signum)
        for listener in () if watch is None else watch.listeners:
            listener()

    def _record(self, signum: int) -> None:
        """In the signal handler: nothing to do unless the byte went elsewhere."""
        wakeup = self._wakeup
        if wakeup is not None and wakeup.probe() != wakeup.fd:
            wakeup.put(signum)

    def before_fork(self) -> None:
        """Holds watched signals back in the forking thread.

        A child that is signalled before it has let go of our socket would write its
        signal into it, and the parent would take it for its own.
        """
        self._mask.before = None
        if self._watches:
            watched = tuple(self._watches)
            self._mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)

    def after_fork_in_parent(self) -> None:
        """Lets them through again."""
        before = getattr(self._mask, "before", None)
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def after_fork_in_child(self) -> None:
        """Makes the child as if nobody had watched: it dies of SIGTERM as it would."""
        self._lock = threading.RLock()
        for watch in self._watches.values():
            watch.listeners = ()
            watch.restore()
        if self._wakeup is not None:
            self._wakeup.put_back()
            self._wakeup.abandon()
        self._watches, self._wakeup = {}, None
        self._stay()  # without a word to the parent's other children
        self.after_fork_in_parent()


REGISTRY = SignalRegistry()


@functools.cache
def _register_fork_hooks() -> None:
    os.register_at_fork(
        before=REGISTRY.before_fork,
        after_in_parent=REGISTRY.after_fork_in_parent,
        after_in_child=REGISTRY.after_fork_in_child,
    )
