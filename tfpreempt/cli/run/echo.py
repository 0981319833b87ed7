"""What goes to the console, by threads that hold up nobody else."""

from __future__ import annotations

import threading
from typing import IO

from tfpreempt.core.threads import OwnedThread

_MOST_BYTES = 4 << 20  # that wait for the console
_BATCH_BYTES = 1 << 16
_LONGEST_LINE = 1 << 20  # what is longer is shown in parts
_STALL_SECONDS = 1.0
_SLOW_STALLS = 5
_LEFT_OUT = b"\n(tfpreempt: the console stands still; what is missing is in the log)\n"


class Echo:
    """Prints what it is fed, whole lines with a prefix, in a thread of its own.

    A console that is slow slows who feeds it; one that stands still (a stopped
    terminal) stops nobody: what it does not take is left out.

    Args:
        prefix: put before each line.
        console: where to, unbuffered, as a thread that stands still in the buffer of
            sys.stdout could hold up the interpreter's end; when it is gone (a closed
            pipe) the echo ends in silence.
    """

    def __init__(self, prefix: str, console: IO[bytes]) -> None:
        self._prefix = prefix.encode()
        self._console = console
        self._waiting = bytearray()
        self._shown = 0  # bytes so far
        self._is_stalled = False
        self._changed = threading.Condition()
        self._thread = OwnedThread("tfpreempt-echo", self._run)
        self._thread.start()

    def feed(self, data: bytes) -> None:
        """Adds text to print. Any thread."""
        with self._changed:
            patience = 0.0 if self._is_stalled else _STALL_SECONDS
            if self._changed.wait_for(self._has_room, patience):
                self._is_stalled = False
                self._waiting += data
            elif not self._is_stalled:
                self._is_stalled = True
                self._waiting += _LEFT_OUT
            self._changed.notify_all()

    def flush(self) -> None:
        """Waits until all that was fed is printed, a moment at most."""
        with self._changed:
            end = self._shown + len(self._waiting)
            self._changed.wait_for(lambda: self._shown >= end, _STALL_SECONDS)

    def close(self) -> None:
        """Prints the rest, whole line or not, and ends the thread.

        A console that is slow gets some more time, one that stands still doesn't.
        """
        for _ in range(_SLOW_STALLS):
            before = self._shown
            self.flush()
            if self._shown == before or not self._waiting:
                break
        with self._changed:
            self._thread.stop()
            self._changed.notify_all()
        self._thread.join(_STALL_SECONDS)

    def _has_room(self) -> bool:
        return len(self._waiting) < _MOST_BYTES

    def _is_due(self) -> bool:
        return bool(self._waiting) or self._thread.stop_event.is_set()

    def _run(self) -> None:
        torn = b""
        while True:
            with self._changed:
                self._changed.wait_for(self._is_due)
                data = bytes(self._waiting[:_BATCH_BYTES])
            *lines, torn = (torn + data).split(b"\n")
            if len(torn) > _LONGEST_LINE or (torn and not data):
                lines, torn = [*lines, torn], b""
            self._print(lines)
            with self._changed:
                del self._waiting[: len(data)]
                self._shown += len(data)
                self._changed.notify_all()
            if not data:
                return

    def _print(self, lines: list[bytes]) -> None:
        # A progress bar rewrites its line; its last state is the one to show.
        shown = [x.rstrip(b"\r").rpartition(b"\r")[2] for x in lines]
        left = b"".join(self._prefix + x + b"\n" for x in shown)
        try:
            while left and (count := self._console.write(left)):
                left = left[count:]
        except (OSError, ValueError):
            pass  # training goes on without anyone looking
