"""The process's wake-up fd: signals become bytes in a socket, read by a thread.

Python runs signal handlers only on the main thread, between two bytecodes, so a handler
waits while the main thread is inside a long C++ op. The C part of signal handling,
however, writes the signal's number to the wake-up fd at once, from the thread that the
kernel chose. A thread at the other end of the socket reads the number within a
millisecond. (Rejected: signalfd needs the signal blocked in every thread, and
TensorFlow starts threads before tfpreempt.)
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

_OURS = 0x80  # marks bytes written by our handler; signal numbers are smaller
_STOP = b"\0"  # no signal has the number 0
_JOIN_LIMIT_SECONDS = 2.0

_left_open: list[tuple[socket.socket, socket.socket]] = []


class WakeupFd:
    """A socket pair installed as the wake-up fd, and the thread that reads the pair.

    The constructor installs the pair even if another wake-up fd is installed, and
    forwards bytes to the earlier fd. Except for `put()`, the methods are called on the
    main thread, as `signal.set_wakeup_fd` demands.

    Args:
        on_signal: function called in the reading thread with each signal number.

    Attributes:
        fd: file descriptor of our end of the pair.
    """

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        self._on_signal = on_signal
        self._read_end, self._write_end = socket.socketpair()
        self._write_end.setblocking(False)
        self.fd = self._write_end.fileno()
        self._forward_to = -1
        self._is_shared = False  # other code may have kept the number of our fd
        self._thread = ManagedThread("tfpreempt-signals", self._read)
        self._thread.start()
        self._forward_to = _set_wakeup_fd(self.fd)

    def probe(self) -> int:
        """Returns the installed wake-up fd. Installs ours if no wake-up fd is
        installed.
        """
        current = _set_wakeup_fd(self.fd)
        if current not in (self.fd, -1):
            self._is_shared = True
            _set_wakeup_fd(current)
        return current

    def put(self, signum: int) -> None:
        """Reports a signal whose byte went to the fd of other code. Never blocks."""
        # Full: the thread already has enough signals to read. Closed: no thread reads
        # any more.
        with contextlib.suppress(OSError):
            self._write_end.send(bytes([_OURS | signum]))

    def put_back(self) -> None:
        """Installs the earlier wake-up fd, if ours is still installed."""
        current = signal.set_wakeup_fd(-1)
        if current == self.fd:
            _set_wakeup_fd(self._forward_to)
        elif current != -1:
            self._is_shared = True
            _set_wakeup_fd(current)

    def stop(self) -> None:
        """Ends the thread after the bytes already received, and closes the pair."""
        self._thread.stop_event.set()
        # full: the thread also checks the stop event
        with contextlib.suppress(OSError):
            self._write_end.send(_STOP)
        if not self._thread.join(_JOIN_LIMIT_SECONDS):
            _logger.warning(
                "a listener of signals has not returned within %.1f s of closing; its "
                "daemon thread continues",
                _JOIN_LIMIT_SECONDS,
            )
        elif self._is_shared:
            # Code that saved our fd as the previous wake-up fd may write to the number
            # later. So a shared pair stays open, unread, until the process ends.
            _left_open.append((self._read_end, self._write_end))
        else:
            self.abandon()

    def abandon(self) -> None:
        """Closes both ends in this process; for a forked child, which has no such
        thread.
        """
        self._read_end.close()
        self._write_end.close()

    def _read(self) -> None:
        while True:
            data = self._read_end.recv(4096)
            foreign = bytes(byte for byte in data if 0 < byte < _OURS)
            if foreign and self._forward_to != -1:
                # Full or closed, as could happen without tfpreempt: not reported here.
                with contextlib.suppress(OSError):
                    os.write(self._forward_to, foreign)
            for byte in data:
                if byte:
                    self._on_signal(byte & ~_OURS)
            if not data or 0 in data or self._thread.stop_event.is_set():
                return


def _set_wakeup_fd(fd: int) -> int:
    """Installs `fd`, or no fd if `fd` is closed. Returns the fd installed before."""
    try:
        return signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
    except (OSError, ValueError):
        return signal.set_wakeup_fd(-1)
