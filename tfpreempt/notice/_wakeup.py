"""Reads signals from Python's wake-up fd, in a thread.

Python runs signal handlers only on the main thread, between two bytecodes. So a handler
cannot run while the main thread is inside a long C++ op. But when a signal arrives,
Python's C code immediately writes the number of the signal to the wake-up fd
(signal.set_wakeup_fd). Here the fd is a socket, and a thread at the other end reads the
number within a millisecond. (signalfd was rejected: the signal would have to be blocked
in every thread, but TensorFlow starts threads before tfpreempt.)
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable

from tfpreempt.core.threads import ManagedThread

_logger = logging.getLogger(__name__)

_OURS = 0x80  # added to a byte that our handler writes; signal numbers are smaller
_STOP = b"\0"  # no signal has the number 0
_JOIN_LIMIT_SECONDS = 2.0

_left_open: list[tuple[socket.socket, socket.socket]] = []


class WakeupFd:
    """A socket pair, one end installed as the wake-up fd, and a thread that reads it.

    If other code has installed a wake-up fd, the constructor replaces that fd, and the
    thread forwards the signal bytes to it. Call the methods on the main thread, as
    `signal.set_wakeup_fd` requires; only `put()` may be called on any thread.

    Args:
        on_signal: function called on the thread with the number of every signal.

    Attributes:
        fd: file descriptor of the end of the pair to which Python writes.
    """

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        self._on_signal = on_signal
        self._read_end, self._write_end = socket.socketpair()
        self._write_end.setblocking(False)
        self.fd = self._write_end.fileno()
        self._forward_to = -1
        # Whether other code may have stored the number of our fd.
        self._is_shared = False
        self._thread = ManagedThread("tfpreempt-signals", self._read)
        self._thread.start()
        self._forward_to = _set_wakeup_fd(self.fd)

    def probe(self) -> int:
        """Returns the installed wake-up fd.

        If no wake-up fd is installed, installs `fd` and returns -1.
        """
        current = _set_wakeup_fd(self.fd)
        if current not in (self.fd, -1):
            self._is_shared = True
            _set_wakeup_fd(current)
        return current

    def put(self, signum: int) -> None:
        """Reports a signal whose byte Python wrote to another wake-up fd. Never blocks.

        Args:
            signum: number of the signal.
        """
        # Ignore errors. A full socket has enough signals for the thread; a closed
        # socket has no reader any more.
        with contextlib.suppress(OSError):
            self._write_end.send(bytes([_OURS | signum]))

    def put_back(self) -> None:
        """Restores the earlier wake-up fd, if `fd` is still the wake-up fd."""
        current = signal.set_wakeup_fd(-1)
        if current == self.fd:
            _set_wakeup_fd(self._forward_to)
        elif current != -1:
            self._is_shared = True
            _set_wakeup_fd(current)

    def stop(self) -> None:
        """Ends the thread after it has read all bytes sent so far; closes the pair.

        The pair stays open if other code may have stored the number of our fd.
        """
        self._thread.stop_event.set()
        # Ignore a full socket: the thread also checks the stop event.
        with contextlib.suppress(OSError):
            self._write_end.send(_STOP)
        if not self._thread.join(_JOIN_LIMIT_SECONDS):
            _logger.warning(
                "a listener of signals has not returned within %.1f s of closing; its "
                "daemon thread continues",
                _JOIN_LIMIT_SECONDS,
            )
        elif self._is_shared:
            # Do not close the pair: other code may have stored the number of our fd,
            # and may write to the number later, when the number could belong to a
            # different file.
            _left_open.append((self._read_end, self._write_end))
        else:
            self.abandon()

    def abandon(self) -> None:
        """Closes the pair without `stop()`; a forked child has no thread to stop."""
        self._read_end.close()
        self._write_end.close()

    def _read(self) -> None:
        while True:
            data = self._read_end.recv(4096)
            foreign = bytes(byte for byte in data if 0 < byte < _OURS)
            if foreign and self._forward_to != -1:
                # Ignore errors: without tfpreempt, Python's write to that fd could
                # fail, too.
                with contextlib.suppress(OSError):
                    os.write(self._forward_to, foreign)
            for byte in data:
                if byte:
                    self._on_signal(byte & ~_OURS)
            if not data or 0 in data or self._thread.stop_event.is_set():
                return


def _set_wakeup_fd(fd: int) -> int:
    """Installs `fd` as the wake-up fd; if `fd` is closed, installs none.

    Returns:
        The wake-up fd that was installed before; -1 for none.
    """
    try:
        return signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
    except (OSError, ValueError):
        return signal.set_wakeup_fd(-1)
