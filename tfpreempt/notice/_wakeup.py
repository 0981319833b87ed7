"""Signals become bytes in a socket, read by a thread: the process's wake-up fd.

Python runs signal handlers on the main thread only, between two bytecodes: while it is
inside a long C++ op they wait. But the C part of signal handling writes the signal's
number to the wake-up fd at once, from whatever thread the kernel picked, and a thread
that reads the other end knows of it within a millisecond. (signalfd was rejected: it
needs the signal blocked in every thread, and TensorFlow has threads before we come.)
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable

from tfpreempt.core.threads import OwnedThread

_logger = logging.getLogger(__name__)

_OURS = 0x80  # marks a byte that our handler wrote; signal numbers are below it
_STOP = b"\0"  # no signal has the number 0
_JOIN_LIMIT_SECONDS = 2.0

_left_open: list[tuple[socket.socket, socket.socket]] = []


class WakeupFd:
    """One socket pair in the place of the wake-up fd, and the thread that reads it.

    It takes that place, whoever has it, when it is made; bytes are forwarded to the fd
    that was there before. All methods but `put()` are
    called on the main thread, as `signal.set_wakeup_fd` demands.

    Args:
        on_signal: called in the reading thread with each signal number.

    Attributes:
        fd: our number for it.
    """

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        self._on_signal = on_signal
        self._read_end, self._write_end = socket.socketpair()
        self._write_end.setblocking(False)
        self.fd = self._write_end.fileno()
        self._forward_to = -1
        self._is_shared = False  # somebody may have kept our fd's number
        self._thread = OwnedThread("tfpreempt-signals", self._read)
        self._thread.start()
        self._forward_to = _set_wakeup_fd(self.fd)

    def probe(self) -> int:
        """The wake-up fd that is installed; where it is none, ours is put in again."""
        current = _set_wakeup_fd(self.fd)
        if current not in (self.fd, -1):
            self._is_shared = True
            _set_wakeup_fd(current)
        return current

    def put(self, signum: int) -> None:
        """Reports a signal whose byte went to somebody else's fd. Never blocks."""
        # Full: the thread has signals enough to read; closed: nobody cares.
        with contextlib.suppress(OSError):
            self._write_end.send(bytes([_OURS | signum]))

    def put_back(self) -> None:
        """Installs the wake-up fd that was there before, if ours is still installed."""
        current = signal.set_wakeup_fd(-1)
        if current == self.fd:
            _set_wakeup_fd(self._forward_to)
        elif current != -1:
            self._is_shared = True
            _set_wakeup_fd(current)

    def stop(self) -> None:
        """Ends the thread after the bytes that are there already; frees the pair."""
        self._thread.stop_event.set()
        with contextlib.suppress(OSError):  # full: the stop event is looked at too
            self._write_end.send(_STOP)
        if not self._thread.join(_JOIN_LIMIT_SECONDS):
            _logger.warning("a listener of signals has not returned; it is left behind")
        elif self._is_shared:
            # Whoever took our fd for the previous one may write to its number later,
            # so a shared pair stays open, unread, as long as the process lives.
            _left_open.append((self._read_end, self._write_end))
        else:
            self.abandon()

    def abandon(self) -> None:
        """Closes this process's ends; in a forked child, which has no such thread."""
        self._read_end.close()
        self._write_end.close()

    def _read(self) -> None:
        while True:
            data = self._read_end.recv(4096)
            foreign = bytes(byte for byte in data if 0 < byte < _OURS)
            if foreign and self._forward_to != -1:
                # Full or closed, as it could be without us: not ours to report.
                with contextlib.suppress(OSError):
                    os.write(self._forward_to, foreign)
            for byte in data:
                if byte:
                    self._on_signal(byte & ~_OURS)
            if not data or 0 in data or self._thread.stop_event.is_set():
                return


def _set_wakeup_fd(fd: int) -> int:
    """Installs a wake-up fd, or none where it was closed meanwhile; the one before."""
    try:
        return signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
    except (OSError, ValueError):
        return signal.set_wakeup_fd(-1)
