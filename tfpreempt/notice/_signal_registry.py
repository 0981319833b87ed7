"""Registry of the process's watched signals: one handler for each signal.

Any number of listeners share a handler. A signal is reported by the byte that Python's
C code writes to the wake-up fd (see `_wakeup.py`). The handler calls the handler that
was installed before. The handler reports a signal itself only if the wake-up fd of
tfpreempt was not installed.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from tfpreempt.core.threads import ManagedThread
from tfpreempt.notice._wakeup import WakeupFd
from tfpreempt.notice.forked_children import release_children

_logger = logging.getLogger(__name__)

_JOIN_LIMIT_SECONDS = 2.0

Listener = Callable[[], None]
_Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None


@dataclasses.dataclass(eq=False)
class _WatchedSignal:
    """A watched signal: its listeners, and the handlers hidden by our handler.

    The handlers are a stack: a handler installed over ours may call ours, and `rearm()`
    then puts ours over that handler. Whenever our handler is entered from within
    itself, the next handler down the stack is called, so no handler is called twice.

    Args:
        signum: the signal.
        registry: the registry, which puts the hidden handler back.

    Attributes:
        listeners: functions called for each arrival of the signal, in the reading
            thread.
        hidden: the hidden handlers; the last entry is the handler replaced by ours.
        receiver: the thread that receives a signal blocked by the main thread; else
            None.
    """

    signum: int
    registry: SignalRegistry
    listeners: tuple[Listener, ...] = ()
    hidden: list[_Handler] = dataclasses.field(default_factory=list)
    receiver: ManagedThread | None = None
    _depth: int = 0

    def start_receiver(self) -> None:
        """Starts a thread that receives the signal, which the main thread blocks.

        The main thread's signal mask is inherited from the process that started this
        process, and is passed on to threads and children. So the mask is not changed:
        the kernel delivers a signal of the process to any thread that does not block
        the signal. Main thread only.
        """
        name = signal.Signals(self.signum).name

        def receive() -> None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {self.signum})
            receiver.stop_event.wait()

        receiver = self.receiver = ManagedThread(f"tfpreempt-{name}", receive)
        receiver.start()
        _logger.info(
            "%s is blocked in the signal mask of this process, possibly since before "
            "the process started. A thread of tfpreempt receives the signal; child "
            "processes inherit the mask as before",
            name,
        )

    def disarm(self) -> None:
        """Puts back the handler replaced by ours, if ours is still installed."""
        receiver, self.receiver = self.receiver, None
        if receiver is not None:  # first: the earlier handler may end the process
            receiver.stop_event.set()
            receiver.join(_JOIN_LIMIT_SECONDS)
        if signal.getsignal(self.signum) == self.handle:
            self.registry.put_back(self.signum, self.hidden[-1])

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """Handles the signal. Python calls the handler on the main thread."""
        depth = self._depth
        if depth == 0:
            is_ours = signal.getsignal(signum) == self.handle
            if is_ours and not self.listeners:  # left by a close() off the main thread
                self.disarm()
                signal.raise_signal(signum)
                return
            wakeup = self.registry.wakeup
            if wakeup is not None and wakeup.probe() != wakeup.fd:
                wakeup.put(signum)  # the byte went to another fd, or to no fd
        if depth >= len(self.hidden):
            return
        hidden = self.hidden[-1 - depth]
        if callable(hidden) and hidden is not signal.default_int_handler:
            self._depth = depth + 1
            try:
                hidden(signum, frame)
            finally:
                self._depth = depth


class SignalRegistry:
    """Registry of the watched signals. This module makes the only instance.

    Attributes:
        watches: the watched signals, by number.
        wakeup: the wake-up fd; None while no signal is watched.
    """

    def __init__(self) -> None:
        # Re-entrant: a chained handler may close a source while the lock is held. The
        # signal handler and the reading thread never take the lock.
        self._lock = threading.RLock()
        self.watches: dict[int, _WatchedSignal] = {}
        self.wakeup: WakeupFd | None = None
        self._mask = threading.local()
        self._is_leaving = False
        self._ignored: set[int] = set()
        os.register_at_fork(
            before=self._before_fork,
            after_in_parent=self._after_fork_in_parent,
            after_in_child=self._after_fork_in_child,
        )

    def subscribe(self, signum: int, listener: Listener) -> None:
        """Adds a listener, called in a thread for each arrival. Main thread only."""
        with self._lock:
            if self.wakeup is None:
                self.wakeup = WakeupFd(self._dispatch)
            watch = self.watches.get(signum)
            if watch is None:
                watch = self.watches[signum] = _WatchedSignal(signum, self)
            watch.listeners = (*watch.listeners, listener)
            self.rearm(signum)

    def rearm(self, signum: int) -> None:
        """Installs the handler and the wake-up fd again. Main thread only.

        Other code may have replaced the handler or the fd in the meantime.
        """
        with self._lock:
            watch = self.watches.get(signum)
            if self.wakeup is None or watch is None:
                return
            if self.wakeup.probe() not in (self.wakeup.fd, -1):
                # The fd of other code is installed, and that code may forward bytes to
                # ours. So a new socket pair replaces that fd, and the old pair is not
                # read any longer: no byte circulates for ever.
                retired, self.wakeup = self.wakeup, WakeupFd(self._dispatch)
                retired.stop()
            current = signal.getsignal(signum)
            if current != watch.handle:
                if current in watch.hidden:
                    watch.hidden.remove(current)
                watch.hidden.append(current)
            # Also if the handler seems installed: C++ code replaces a handler without
            # notifying Python.
            signal.signal(signum, watch.handle)
            # Last, because a pending signal becomes a notice at once.
            is_blocked = signum in signal.pthread_sigmask(signal.SIG_BLOCK, ())
            if is_blocked and watch.receiver is None:
                watch.start_receiver()

    def unsubscribe(self, signum: int, listener: Listener) -> None:
        """Removes a listener. The last one restores handler and fd. Main thread only.

        Off the main thread Python cannot restore a handler. Our handler then stays
        installed; at the next arrival of the signal it restores the earlier handler and
        raises the signal again.
        """
        done: WakeupFd | None = None
        with self._lock:
            watch = self.watches.get(signum)
            if watch is None or listener not in watch.listeners:
                return  # a forked child inherits the source, but not the watch
            remaining = [each for each in watch.listeners if each != listener]
            watch.listeners = tuple(remaining)
            if watch.listeners:
                return
            if threading.current_thread() is not threading.main_thread():
                _logger.warning(
                    "the source of %s was closed outside of the main thread, where "
                    "the earlier signal handler cannot be restored; close the source "
                    "on the main thread",
                    signal.Signals(signum).name,
                )
                return
            watch.disarm()
            del self.watches[signum]
            if not self.watches and self.wakeup is not None:
                self.wakeup.put_back()
                done, self.wakeup = self.wakeup, None
        if done is not None:
            # outside the lock: stop() waits for listeners, and a listener may want the
            # lock
            done.stop()

    def put_back(self, signum: int, handler: _Handler) -> None:
        """Installs the handler that was installed before ours. Main thread only.

        While the process exits, a handler that would end the process is replaced by
        SIG_IGN.
        """
        # None: a handler installed from C before Python started cannot be put back.
        handler = signal.SIG_DFL if handler is None else handler
        ends = handler is signal.SIG_DFL or handler is signal.default_int_handler
        if ends and self._is_leaving:
            self._ignored.add(signum)
            handler = signal.SIG_IGN
        signal.signal(signum, handler)

    def leave(self) -> None:
        """Marks the process as exiting. Any thread.

        From now on a signal without listeners is ignored, because another SIGTERM must
        not change the exit code.
        """
        self._is_leaving = True
        release_children(True)

    def stay(self) -> None:
        """Cancels `leave()`: ignored signals get the default handler again."""
        release_children(False)
        self._stay()

    def end(self) -> None:
        """Ignores the watched signals while the interpreter shuts down.

        Python would restore the default handlers. A signal during the shutdown, which
        takes a second with TensorFlow, would then change the exit code.
        `release_children()` makes guarded children end by a signal that they ignored
        before: Python may wait for the children after `end()`, and the kernel may have
        merged a pool's terminating signal with the ignored signal.
        """
        release_children(True)
        for signum, watch in self.watches.items():
            if signal.getsignal(signum) == watch.handle:
                signal.signal(signum, signal.SIG_IGN)

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
        """Calls the listeners of a signal, in the reading thread."""
        watch = self.watches.get(signum)
        for listener in () if watch is None else watch.listeners:
            listener()

    def _before_fork(self) -> None:
        """Blocks the watched signals in the forking thread.

        A child signalled before the child has closed our socket would write its signal
        into the socket, and the parent would treat the signal as its own.
        """
        watched = tuple(self.watches)
        self._mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)

    def _after_fork_in_parent(self) -> None:
        """Restores the signal mask that `_before_fork()` changed."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask.before)

    def _after_fork_in_child(self) -> None:
        """Removes every watch in the child, so that SIGTERM ends the child as usual."""
        self._lock = threading.RLock()
        self._stay()  # not stay(): the other children of the parent are not affected
        for watch in self.watches.values():
            watch.listeners = ()
            watch.receiver = None  # the child does not have the thread
            watch.disarm()
        if self.wakeup is not None:
            self.wakeup.put_back()
            self.wakeup.abandon()
        self.watches, self.wakeup = {}, None
        self._after_fork_in_parent()


REGISTRY = SignalRegistry()
# registered early: hooks registered later run before end()
atexit.register(REGISTRY.end)
