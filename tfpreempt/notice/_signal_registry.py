"""The process's watched signals: one handler for each, however many listen to it.

The handler only records. What reports a signal is the byte that C writes to the
wake-up fd (see `_wakeup.py`); the handler itself calls the handler that was there
before and steps in only where somebody else has taken the wake-up fd.
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

from tfpreempt.core.threads import OwnedThread
from tfpreempt.notice._wakeup import WakeupFd
from tfpreempt.notice.readers import release_children

_logger = logging.getLogger(__name__)

_JOIN_LIMIT_SECONDS = 2.0

Listener = Callable[[], None]
_Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None


@dataclasses.dataclass(eq=False)
class _Watch:
    """One watched signal: its listeners, and the handlers that our handler hides.

    The handlers are a stack, because a handler that was installed over ours may call
    ours, and `rearm()` then puts ours over it: each time our handler is entered from
    within itself it calls the next handler down, so no handler is called twice.

    Args:
        signum: the signal.
        registry: puts the hidden handler back.

    Attributes:
        listeners: called for each such signal, in the reading thread.
        hidden: the handlers; the last one is the handler that ours replaced.
        receiver: the thread that receives a signal which the main thread blocks.
    """

    signum: int
    registry: SignalRegistry
    listeners: tuple[Listener, ...] = ()
    hidden: list[_Handler] = dataclasses.field(default_factory=list)
    receiver: OwnedThread | None = None
    _depth: int = 0

    def start_receiver(self) -> None:
        """Receives the signal although the main thread blocks it. Main thread.

        A mask is inherited from the process that starts this one, and by threads and
        children. So the main thread's mask is left alone: the kernel delivers a signal
        of the process to any thread that does not block it.
        """
        name = signal.Signals(self.signum).name

        def receive() -> None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {self.signum})
            receiver.stop_event.wait()

        receiver = self.receiver = OwnedThread(f"tfpreempt-{name}", receive)
        receiver.start()
        _logger.info(
            "tfpreempt: %s is blocked in this process's signal mask, which the process "
            "that started it may have set. A thread of tfpreempt receives the signal; "
            "programs that are started from here have it blocked, as before",
            name,
        )

    def disarm(self) -> None:
        """Puts back the handler that ours replaced, if ours is still there."""
        receiver, self.receiver = self.receiver, None
        if receiver is not None:  # first: the handler before may end the process
            receiver.stop_event.set()
            receiver.join(_JOIN_LIMIT_SECONDS)
        if signal.getsignal(self.signum) == self.handle:
            self.registry.put_back(self.signum, self.hidden[-1])

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """The handler of the signal. Python calls it on the main thread."""
        depth = self._depth
        if depth == 0:
            is_ours = signal.getsignal(signum) == self.handle
            if is_ours and not self.listeners:  # a close() off the main thread left it
                self.disarm()
                signal.raise_signal(signum)
                return
            wakeup = self.registry.wakeup
            if wakeup is not None and wakeup.probe() != wakeup.fd:
                wakeup.put(signum)  # its byte went elsewhere
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
    """All watched signals of the process. Made once, by this module.

    Attributes:
        watches: the watched signals, by number.
        wakeup: the wake-up fd; None while no signal is watched.
    """

    def __init__(self) -> None:
        # Re-entrant: a chained handler may close a source while we hold it. Never
        # taken by the signal handler or the reading thread.
        self._lock = threading.RLock()
        self.watches: dict[int, _Watch] = {}
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
        """Calls `listener` for each such signal, in a thread. Main thread."""
        with self._lock:
            if self.wakeup is None:
                self.wakeup = WakeupFd(self._dispatch)
            watch = self.watches.get(signum)
            if watch is None:
                watch = self.watches[signum] = _Watch(signum, self)
            watch.listeners = (*watch.listeners, listener)
            self.rearm(signum)

    def rearm(self, signum: int) -> None:
        """Installs handler and wake-up fd anew, over what came since. Main thread."""
        with self._lock:
            watch = self.watches.get(signum)
            if self.wakeup is None or watch is None:
                return
            if self.wakeup.probe() not in (self.wakeup.fd, -1):
                # Somebody else's fd is in. He may forward to ours, so we go over him
                # with another pair and stop reading the old one: no byte runs in
                # circles.
                retired, self.wakeup = self.wakeup, WakeupFd(self._dispatch)
                retired.stop()
            current = signal.getsignal(signum)
            if current != watch.handle:
                if current in watch.hidden:
                    watch.hidden.remove(current)
                watch.hidden.append(current)
            # Also where it seems to be there: C++ replaces it without a word.
            signal.signal(signum, watch.handle)
            # Last: a signal that is pending is a notice at once.
            is_blocked = signum in signal.pthread_sigmask(signal.SIG_BLOCK, ())
            if is_blocked and watch.receiver is None:
                watch.start_receiver()

    def unsubscribe(self, signum: int, listener: Listener) -> None:
        """Ends it. The last one puts handler and wake-up fd back. Main thread.

        Elsewhere signals cannot be put back: the handler stays, and with the next
        signal makes way for the one before, as if it had not been there.
        """
        done: WakeupFd | None = None
        with self._lock:
            watch = self.watches.get(signum)
            if watch is None or listener not in watch.listeners:
                return  # a forked child inherited the source, but not its watch
            remaining = [each for each in watch.listeners if each != listener]
            watch.listeners = tuple(remaining)
            if watch.listeners:
                return
            if threading.current_thread() is not threading.main_thread():
                _logger.warning(
                    "%s: closed off the main thread, where signals cannot be put back; "
                    "close it on the main thread",
                    signal.Signals(signum).name,
                )
                return
            watch.disarm()
            del self.watches[signum]
            if not self.watches and self.wakeup is not None:
                self.wakeup.put_back()
                done, self.wakeup = self.wakeup, None
        if done is not None:
            done.stop()  # outside the lock: it waits for listeners that may want it

    def put_back(self, signum: int, handler: _Handler) -> None:
        """Installs the handler that was there before. Main thread.

        On the way out the signal is ignored in place of what would end the process.
        """
        # None: it was installed from C before Python came; it can't be put back.
        handler = signal.SIG_DFL if handler is None else handler
        ends = handler is signal.SIG_DFL or handler is signal.default_int_handler
        if ends and self._is_leaving:
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

    def end(self) -> None:
        """The interpreter ends: what is still watched is ignored from now on.

        Python would put the defaults back, and a signal that comes while it takes
        itself apart, a second with TensorFlow, would change the exit code. Children
        that are waited for after this end by a signal that they have passed over: the
        one that a pool ends them by may have come as one with that.
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
        """In the reading thread."""
        watch = self.watches.get(signum)
        for listener in () if watch is None else watch.listeners:
            listener()

    def _before_fork(self) -> None:
        """Holds watched signals back in the forking thread.

        A child that is signalled before it has let go of our socket would write its
        signal into it, and the parent would take it for its own.
        """
        watched = tuple(self.watches)
        self._mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)

    def _after_fork_in_parent(self) -> None:
        """Lets them through again."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask.before)

    def _after_fork_in_child(self) -> None:
        """Makes the child as if nobody had watched: it dies of SIGTERM as it would."""
        self._lock = threading.RLock()
        self._stay()  # without a word to the parent's other children
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
atexit.register(REGISTRY.end)  # early: other hooks come before it
