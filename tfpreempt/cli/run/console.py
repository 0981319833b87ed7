"""What goes to the console, by threads that hold up nobody else."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import IO, TextIO

from tfpreempt.core.threads import OwnedThread

_MOST_BYTES = 4 << 20  # that wait for the console
_BATCH_BYTES = 1 << 16
_LONGEST_LINE = 1 << 20  # what is longer is shown in parts
_STALL_SECONDS = 0.5  # without a byte shown
_LAST_SECONDS = 5.0  # for a slow one, at the end
_LEFT_OUT = b"\n(tfpreempt: the console stands still; what is missing is in the log)\n"


class Console:
    """Prints what it is fed, whole lines with a prefix, in a thread of its own.

    A console that is slow slows who feeds it; one that stands still (a stopped
    terminal) stops nobody: what it does not take is left out.

    Args:
        prefix: put before each line.
        stream: where to, unbuffered, as a thread that stands still in the buffer of
            sys.stdout could hold up the interpreter's end; when it is gone (a closed
            pipe) the printing ends in silence.
    """

    def __init__(self, prefix: str, stream: IO[bytes]) -> None:
        self._prefix = prefix.encode()
        self._stream = stream
        self._torn = b""
        self._waiting = bytearray()
        self._shown = 0  # bytes so far
        self._is_stalled = False
        self._changed = threading.Condition()
        self._thread = OwnedThread("tfpreempt-console", self._run)
        self._thread.start()

    def feed(self, data: bytes) -> None:
        """Adds text to print. Any thread."""
        with self._changed:
            *lines, self._torn = (self._torn + data).split(b"\n")
            if len(self._torn) > _LONGEST_LINE:
                lines, self._torn = [*lines, self._torn], b""
            was_stalled = self._is_stalled
            if self._wait(lambda: len(self._waiting) < _MOST_BYTES):
                # A progress bar rewrites its line; its last state is the one to show.
                shown = (line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines)
                self._waiting += b"".join(self._prefix + x + b"\n" for x in shown)
            elif not was_stalled:
                self._waiting += _LEFT_OUT
            self._changed.notify_all()

    def flush(self, seconds: float = _STALL_SECONDS) -> None:
        """Waits until all whole lines are printed, a moment at most."""
        with self._changed:
            end = self._shown + len(self._waiting)
            self._wait(lambda: self._shown >= end, seconds)

    def close(self) -> None:
        """Prints the rest, whole line or not, and ends the thread.

        A console that is slow gets some more time, one that stands still doesn't.
        """
        if self._torn:
            self.feed(b"\n")
        self.flush(_LAST_SECONDS)
        with self._changed:
            self._thread.stop_event.set()
            self._changed.notify_all()
        self._thread.join(0.0 if self._is_stalled else _STALL_SECONDS)

    def _wait(
        self, condition: Callable[[], bool], seconds: float = threading.TIMEOUT_MAX
    ) -> bool:
        """Waits for a condition, but for no console that stands still."""
        deadline = time.monotonic() + seconds
        while not condition():
            shown, left = self._shown, deadline - time.monotonic()
            if self._is_stalled or left <= 0:
                return False
            self._is_stalled = not self._changed.wait_for(
                lambda before=shown: self._shown != before,  # type: ignore[misc]
                min(left, _STALL_SECONDS),
            )
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._waiting or self._thread.stop_event.is_set()
                )
                data = bytes(self._waiting[:_BATCH_BYTES])
            if not data:
                return
            self._print(data)
            with self._changed:
                del self._waiting[: len(data)]
                self._shown += len(data)
                self._is_stalled = False
                self._changed.notify_all()

    def _print(self, data: bytes) -> None:
        try:
            while data and (count := self._stream.write(data)):
                data = data[count:]
        except (OSError, ValueError):
            pass  # training goes on without anyone looking


def unbuffered(stream: TextIO | None) -> IO[bytes]:
    """A program may be started with its streams closed; what it says goes nowhere."""
    if stream is None:
        return open(os.devnull, "wb", buffering=0)
    return open(stream.fileno(), "wb", buffering=0, closefd=False)
