"""What goes to the console, by threads that hold up nobody else."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import IO, TextIO

from tfpreempt.cli.terminal import plain
from tfpreempt.core.threads import OwnedThread

_MOST_BYTES = 4 << 20  # that wait for the console
_BATCH_BYTES = 1 << 16
_LONGEST_LINE = 1 << 20  # what is longer is shown in parts
_STALL_SECONDS = 0.5  # without a byte shown
_LAST_SECONDS = 5.0  # for a slow one, at the end
_ERASE = b"\r\x1b[2K"  # the line that the cursor is in
_LEFT_OUT = b"\n(tfpreempt: the console stands still; what is missing is in the log)\n"


class StatusLine:
    """One line below all that is printed on a terminal. Any thread.

    Args:
        stream: the terminal, unbuffered.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._text = b""
        self._is_shown = False
        self._is_at_start = True  # what was printed last ended its line
        self._lock = threading.Lock()  # held while the terminal is written to

    def show(self, text: str) -> None:
        """Takes the place of the one before; empty shows none."""
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):
            return  # it is gone
        text = plain(text)
        cut = text if len(text) < columns else f"{text[: max(0, columns - 4)]}..."
        encoded = cut.encode()
        with self._lock:
            if encoded != self._text:
                self._text = encoded
                self._write(self._stream, b"")

    def print(self, stream: IO[bytes], data: bytes) -> None:
        """Prints above it.

        Args:
            stream: where to; the same terminal.
            data: text, in pieces that need not be whole lines.
        """
        with self._lock:
            self._write(stream, data)

    def _write(self, stream: IO[bytes], data: bytes) -> None:
        before = _ERASE if self._is_shown else b""
        if data:
            self._is_at_start = data.endswith(b"\n")
        self._is_shown = bool(self._text) and self._is_at_start
        _write(stream, before + data + (self._text if self._is_shown else b""))


class Console:
    """Prints what it is fed, whole lines with a prefix, in a thread of its own.

    A console that is slow slows who feeds it; one that stands still (a stopped
    terminal) stops nobody: what it does not take is left out.

    Args:
        prefix: put before each line.
        stream: where to, unbuffered, as a thread that stands still in the buffer of
            sys.stdout could hold up the interpreter's end; when it is gone (a closed
            pipe) the printing ends in silence.
        line: stays below what is printed, where that is a terminal.
    """

    def __init__(
        self, prefix: str, stream: IO[bytes], line: StatusLine | None = None
    ) -> None:
        self._prefix = prefix.encode()
        self._stream = stream
        self._line = line
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
            if self._line is None:
                _write(self._stream, data)
            else:
                self._line.print(self._stream, data)
            with self._changed:
                del self._waiting[: len(data)]
                self._shown += len(data)
                self._is_stalled = False
                self._changed.notify_all()


def _write(stream: IO[bytes], data: bytes) -> None:
    try:
        while data and (count := stream.write(data)):
            data = data[count:]
    except (OSError, ValueError):
        pass  # training goes on without anyone looking


def status_line(stream: IO[bytes]) -> StatusLine | None:
    """Where there may be one; None on what is no terminal that can erase a line."""
    is_terminal = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return StatusLine(stream) if is_terminal else None


def unbuffered(stream: TextIO | None) -> IO[bytes]:
    """A program may be started with its streams closed; what it says goes nowhere."""
    if stream is None:
        return open(os.devnull, "wb", buffering=0)
    return open(stream.fileno(), "wb", buffering=0, closefd=False)
