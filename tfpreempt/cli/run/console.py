"""Console output in threads, so that a slow console does not delay the supervisor."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import IO, TextIO

from tfpreempt.core.log_output import plain
from tfpreempt.core.threads import ManagedThread

_MOST_BYTES = 4 << 20  # largest amount of text that waits for the console
_BATCH_BYTES = 1 << 16
_LONGEST_LINE = 1 << 20  # a longer line is split
# After this time without output the console is regarded as stalled.
_STALL_SECONDS = 0.5
_LAST_SECONDS = 5.0  # maximum wait for a slow console at the end
_ERASE = b"\r\x1b[2K"  # erases the line of the cursor
_LEFT_OUT = b"\n(tfpreempt: the console stands still; what is missing is in the log)\n"


class StatusLine:
    """A status line below the text on a terminal. Any thread may use the object.

    Args:
        stream: unbuffered stream to the terminal.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._text = b""
        self._is_shown = False
        self._is_at_start = True  # whether the text so far ends with a line break
        self._lock = threading.Lock()  # held while text is written to the terminal

    def show(self, text: str) -> None:
        """Replaces the text of the status line; "" removes the line."""
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
            stream: stream to which the text is written; it leads to the terminal with
                the status line.
            data: text; it need not end with a line break.
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
    """Prints complete lines, with a prefix, in a separate thread.

    If the console is slow, `feed` waits until there is space in the buffer. If the
    console accepts no text at all (a stopped terminal), `feed` waits at most
    `_STALL_SECONDS`, and then drops the text.

    Args:
        prefix: text before every line.
        stream: unbuffered stream. (A thread that is blocked in the buffer of sys.stdout
            could make the exit of Python hang.) If the stream is closed (a broken
            pipe), text is dropped.
        line: status line on the same terminal; None if there is none.
    """

    def __init__(
        self, prefix: str, stream: IO[bytes], line: StatusLine | None = None
    ) -> None:
        self._prefix = prefix.encode()
        self._stream = stream
        self._line = line
        self._incomplete = b""
        self._waiting = bytearray()
        self._shown = 0  # number of bytes printed
        self._is_stalled = False
        self._changed = threading.Condition()
        self._thread = ManagedThread("tfpreempt-console", self._run)
        self._thread.start()

    def feed(self, data: bytes) -> None:
        """Adds text to be printed. Any thread may call the method."""
        with self._changed:
            *lines, self._incomplete = (self._incomplete + data).split(b"\n")
            if len(self._incomplete) > _LONGEST_LINE:
                lines, self._incomplete = [*lines, self._incomplete], b""
            was_stalled = self._is_stalled
            if self._wait(lambda: len(self._waiting) < _MOST_BYTES):
                # A progress bar rewrites its line; print only the last version.
                shown = (line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines)
                self._waiting += b"".join(self._prefix + x + b"\n" for x in shown)
            elif not was_stalled:
                self._waiting += _LEFT_OUT
            self._changed.notify_all()

    def flush(self, seconds: float = _STALL_SECONDS) -> None:
        """Waits until all complete lines are printed, or the timeout has passed."""
        with self._changed:
            end = self._shown + len(self._waiting)
            self._wait(lambda: self._shown >= end, seconds)

    def close(self) -> None:
        """Prints the remaining text, also an incomplete line, and ends the thread.

        The method waits up to `_LAST_SECONDS` for a slow console; it does not wait for
        a stalled console.
        """
        if self._incomplete:
            self.feed(b"\n")
        self.flush(_LAST_SECONDS)
        with self._changed:
            self._thread.stop_event.set()
            self._changed.notify_all()
        self._thread.join(0.0 if self._is_stalled else _STALL_SECONDS)

    def _wait(
        self, condition: Callable[[], bool], seconds: float = threading.TIMEOUT_MAX
    ) -> bool:
        """Waits until a condition is met; returns whether it is met.

        The wait ends after `seconds`, or if the console prints nothing for
        `_STALL_SECONDS`.
        """
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
        pass  # ignore the error: training must continue without a console


def status_line(stream: IO[bytes]) -> StatusLine | None:
    """Returns a status line for a stream; None if the stream is no usable terminal."""
    is_terminal = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return StatusLine(stream) if is_terminal else None


def unbuffered(stream: TextIO | None) -> IO[bytes]:
    """Returns an unbuffered stream to the same file; for None, to /dev/null."""
    if stream is None:
        return open(os.devnull, "wb", buffering=0)
    return open(stream.fileno(), "wb", buffering=0, closefd=False)
