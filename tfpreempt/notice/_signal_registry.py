"""Registry of the signals that this process watches, with one handler per signal.

Several listeners may watch the same signal. For every signal, Python's C code writes a
byte to the wake-up fd (see `_wakeup.py`). A thread reads the byte and calls the
listeners. So the Python handler of tfpreempt only has to call the handler that was
installed before. The Python handler reports the signal to the thread only if other code
has replaced the wake-up fd.
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
    """A watched signal, with its listeners and the replaced handlers.

    "Our handler" is the method `handle`. Other code may replace our handler. `rearm()`
    then installs our handler again, and appends the other handler to `hidden`. At a
    signal, our handler calls the newest handler in `hidden`. That handler may call the
    handler that was installed before it, which is our handler again. In this nested
    call, our handler calls the next older handler in `hidden`, so no handler runs
    twice.

    Args:
        signum: the signal.
        registry: the registry that contains this signal.

    Attributes:
        listeners: functions called each time that the signal arrives, on the thread
            that reads the wake-up fd.
        hidden: handlers that our handler has replaced, oldest first.
        receiver: thread that receives the signal if the main thread blocks the signal;
            None if the main thread does not block it.
    """

    signum: int
    registry: SignalRegistry
    listeners: tuple[Listener, ...] = ()
    hidden: list[_Handler] = dataclasses.field(default_factory=list)
    receiver: ManagedThread | None = None
    _depth: int = 0

    def start_receiver(self) -> None:
        """Starts a thread that receives a signal that the main thread blocks.

        The kernel delivers a signal to any thread that does not block the signal. The
        main thread has inherited its signal mask from the parent process. The mask is
        not changed, because child processes inherit the mask, too. Main thread only.
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
        """Restores the earlier handler, if `handle` is still the signal's handler."""
        receiver, self.receiver = self.receiver, None
        # Stop the thread first: the earlier handler may end the process at a signal.
        if receiver is not None:
            receiver.stop_event.set()
            receiver.join(_JOIN_LIMIT_SECONDS)
        if signal.getsignal(self.signum) == self.handle:
            self.registry.put_back(self.signum, self.hidden[-1])

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """Handles the signal on the main thread: calls the handler installed before.

        Also reports the signal to the thread that calls the listeners, if other code
        has replaced the wake-up fd.
        """
        depth = self._depth
        if depth == 0:
            is_ours = signal.getsignal(signum) == self.handle
            # Another thread has removed all listeners, but could not restore the
            # earlier handler. Restore the earlier handler now, and raise the signal
            # again for that handler.
            if is_ours and not self.listeners:
                self.disarm()
                signal.raise_signal(signum)
                return
            wakeup = self.registry.wakeup
            if wakeup is not None and wakeup.probe() != wakeup.fd:
                wakeup.put(signum)  # our thread did not get the byte of this signal
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
    """Registry of the watched signals. `REGISTRY` is the only instance.

    Attributes:
        watches: the watched signals, by number.
        wakeup: the wake-up fd; None while no signal is watched.
    """

    def __init__(self) -> None:
        # Re-entrant, because an earlier handler may close a source while the lock is
        # held. Our handler and the thread that reads the wake-up fd never take the
        # lock.
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
        """Adds a listener for a signal. Main thread only.

        Args:
            signum: the signal.
            listener: function called at each signal, on the thread that reads the
                wake-up fd.
        """
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

        Needed because other code may have replaced the handler or the wake-up fd.
        """
        with self._lock:
            watch = self.watches.get(signum)
            if self.wakeup is None or watch is None:
                return
            if self.wakeup.probe() not in (self.wakeup.fd, -1):
                # Other code has installed an fd, and may forward bytes to our fd;
                # forwarding the bytes back would never end. So install a new socket
                # pair, and stop reading the old pair.
                retired, self.wakeup = self.wakeup, WakeupFd(self._dispatch)
                retired.stop()
            current = signal.getsignal(signum)
            if current != watch.handle:
                if current in watch.hidden:
                    watch.hidden.remove(current)
                watch.hidden.append(current)
            # Install the handler even if Python reports our handler: C++ code may have
            # replaced the handler without Python's knowledge.
            signal.signal(signum, watch.handle)
            # Start the receiver last, because it receives a pending signal at once.
            is_blocked = signum in signal.pthread_sigmask(signal.SIG_BLOCK, ())
            if is_blocked and watch.receiver is None:
                watch.start_receiver()

    def unsubscribe(self, signum: int, listener: Listener) -> None:
        """Removes a listener of a signal.

        After the removal of the signal's last listener, the earlier handler is
        restored. After the removal of the last listener of all signals, the earlier
        wake-up fd is restored, too. Python can restore a handler or an fd only on the
        main thread. If the last listener is removed on another thread, our
        handler stays installed until one of two events. At the next signal, our handler
        restores the earlier handler, and raises the signal again. A later call on the
        main thread that removes the last listener of any signal also restores the
        earlier handler.
        """
        done: WakeupFd | None = None
        with self._lock:
            watch = self.watches.get(signum)
            if watch is None or listener not in watch.listeners:
                # A forked child has the source, but watches no signals.
                return
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
            # Disarm also the signals whose last listener was removed on another thread.
            # Use a loop: during `disarm()` an earlier handler may run, and close a
            # further source.
            while closed := [w for w in self.watches.values() if not w.listeners]:
                del self.watches[closed[0].signum]
                closed[0].disarm()
            if not self.watches and self.wakeup is not None:
                self.wakeup.put_back()
                done, self.wakeup = self.wakeup, None
        if done is not None:
            # Not under the lock: stop() waits for listeners, which may need the lock.
            done.stop()

    def put_back(self, signum: int, handler: _Handler) -> None:
        """Installs a handler that our handler had replaced. Main thread only.

        If the process is already exiting and the handler would end the process, SIG_IGN
        is installed instead of the handler, so that a further signal cannot change the
        exit code.

        Args:
            signum: the signal.
            handler: the replaced handler; None if C code had installed the handler.
        """
        # Python cannot install a handler of C code (None) again.
        handler = signal.SIG_DFL if handler is None else handler
        ends = handler is signal.SIG_DFL or handler is signal.default_int_handler
        if ends and self._is_leaving:
            self._ignored.add(signum)
            handler = signal.SIG_IGN
        signal.signal(signum, handler)

    def leave(self) -> None:
        """Marks the process as exiting. Any thread may call the method.

        From now on, a watched signal is ignored when its last listener is removed,
        because another SIGTERM must not change the exit code.
        """
        self._is_leaving = True
        release_children(True)

    def stay(self) -> None:
        """Cancels `leave()`.

        Signals that are ignored since `leave()` get the default handler again.
        """
        release_children(False)
        self._stay()

    def end(self) -> None:
        """Ignores the watched signals while the interpreter shuts down.

        At the shutdown Python restores the default handlers. With TensorFlow the
        shutdown takes a second, and a signal in this time would change the exit code.

        A guarded child process that has ignored a signal is told to end, by
        `release_children()`. Otherwise Python could wait for the child forever: when a
        pool terminates the child, the pool sends the same signal again. If the first
        signal is still pending, the kernel delivers only one signal, which the child
        ignores.
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
        """Calls the listeners of a signal, on the thread of the wake-up fd."""
        watch = self.watches.get(signum)
        for listener in () if watch is None else watch.listeners:
            listener()

    def _before_fork(self) -> None:
        """Blocks the watched signals in the thread that forks.

        The child inherits the socket of the wake-up fd. If the child received a signal
        before it has closed the socket, Python would write the signal to the socket,
        and the parent would read the signal as a signal to the parent.
        """
        watched = tuple(self.watches)
        self._mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)

    def _after_fork_in_parent(self) -> None:
        """Restores the signal mask that `_before_fork()` changed."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask.before)

    def _after_fork_in_child(self) -> None:
        """Stops watching signals in the child, so SIGTERM ends the child as usual."""
        self._lock = threading.RLock()
        self._stay()  # not stay(), which would affect the parent's other children
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
# Register early: atexit calls the hooks in reverse order, so end() runs after the hooks
# that the program registers.
atexit.register(REGISTRY.end)
