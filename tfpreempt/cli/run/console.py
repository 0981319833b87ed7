"""Console output by threads, so that a slow console delays no other thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import IO, TextIO

from tfpreempt.cli.terminal import plain
from tfpreempt.core.threads import ManagedThread

_MOST_BYTES = 4 << 20  # waiting for the console
_BATCH_BYTES = 1 << 16
_LONGEST_LINE = 1 << 20  # a longer line is split
_STALL_SECONDS = 0.5  # without a byte shown
_LAST_SECONDS = 5.0  # for a slow console, at the end
_ERASE = b"\r\x1b[2K"  # the line of the cursor
_LEFT_OUT = b"\n(tfpreempt: the console stands still; what is missing is in the log)\n"


class StatusLine:
    """A status line below the printed text of a terminal. Any thread.

    Args:
        stream: the terminal, unbuffered.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._text = b""
        self._is_shown = False
        self._is_at_start = True  # the printed text ended with a line break
        self._lock = threading.Lock()  # held while the terminal is written to

    def show(self, text: str) -> None:
        """Replaces the status line; an empty text removes the line."""
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):
            return  # the terminal was closed
        text = plain(text)
        cut = text if len(text) < columns else f"{text[: max(0, columns - 4)]}..."
        encoded = cut.encode()
        with self._lock:
            if encoded != self._text:
                self._text = encoded
                self._write(self._stream, b"")

    def print(self, stream: IO[bytes], data: bytes) -> None:
        """Prints text above the status line.

        Args:
            stream: stream to print to, on the same terminal.
            data: text, in pieces that need not end with a line break.
        """
        with self._lock:
            self._write(stream, data)

    def _write(self, stream: IO[bytes], data: bytes) -> None:
        before = _ERASE if self._is_shown else b""
        if data:
            self._is_at_start = data.endswith(b"\n")
        self._is_shown = bool(self._text) and self._is_at_start
        _write(stream, before + data + (self._text if self._is_shown else b""))


class OutputConsole:
    """Prints text in a thread of its own, in whole lines with a prefix.

    A slow console delays the callers of `feed`. A console that accepts no byte (such as
    a stopped terminal) delays no caller for long: text is then left out.

    Args:
        prefix: text before every line.
        stream: stream to print to, unbuffered: a thread blocked in the buffer of
            sys.stdout could delay the exit of the interpreter. After the stream is
            closed (a broken pipe) text is dropped silently.
        line: status line below the text; None without a terminal.
    """

    def __init__(
        self, prefix: str, stream: IO[bytes], line: StatusLine | None = None
    ) -> None:
        self._prefix = prefix.encode()
        self._stream = stream
        self._line = line
        self._torn = b""
        self._waiting = bytearray()
        self._shown = 0  # number of bytes printed
        self._is_stalled = False
        self._changed = threading.Condition()
        self._thread = ManagedThread("tfpreempt-console", self._run)
        self._thread.start()

    def feed(self, data: bytes) -> None:
        """Adds text to print. Any thread."""
        with self._changed:
            *lines, self._torn = (self._torn + data).split(b"\n")
            if len(self._torn) > _LONGEST_LINE:
                lines, self._torn = [*lines, self._torn], b""
            was_stalled = self._is_stalled
            if self._wait(lambda: len(self._waiting) < _MOST_BYTES):
                # A progress bar rewrites its line; only the last state is shown.
                shown = (line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines)
                self._waiting += b"".join(self._prefix + x + b"\n" for x in shown)
            elif not was_stalled:
                self._waiting += _LEFT_OUT
            self._changed.notify_all()

    def flush(self, seconds: float = _STALL_SECONDS) -> None:
        """Waits until the complete lines are printed, with a timeout in seconds."""
        with self._changed:
            end = self._shown + len(self._waiting)
            self._wait(lambda: self._shown >= end, seconds)

    def close(self) -> None:
        """Prints the rest, including an incomplete line, and ends the thread.

        A slow console gets up to `_LAST_SECONDS`; a stalled console gets no more time.
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
        """Waits for a condition; returns False on a timeout or a stalled console."""
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
        pass  # training continues without a console


def status_line(stream: IO[bytes]) -> StatusLine | None:
    """Returns a status line, or None if the stream is not a suitable terminal."""
    is_terminal = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return StatusLine(stream) if is_terminal else None


def unbuffered(stream: TextIO | None) -> IO[bytes]:
    """Returns an unbuffered copy of a stream, or /dev/null for a closed stream."""
    if stream is None:
        return open(os.devnull, "wb", buffering=0)
    return open(stream.fileno(), "wb", buffering=0, closefd=False)
