"""The workers' log files: one per worker over all restarts, with a line at each start.

Who looks for the reason at night opens one file and reads upwards; `tail -F` on it goes
on through restarts.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from tfpreempt.errors import ConfigurationError

_READ_BYTES = 1 << 16
_TAIL_BYTES = 1 << 16
_TRACEBACK = "Traceback (most recent call last)"
# Not within a word in small letters: a fit ends with `mean_squared_error: 0.12`.
_ERROR = re.compile(
    r"(?i:\b(errors?|exception|fatal)\b|can't|cannot)"
    r"|[A-Z]\w*(Error|Exception)\b|ERROR"
)


class WorkerLog:
    """One worker's log file.

    Args:
        path: the file; it is appended to.

    Raises:
        ConfigurationError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab"):
                pass
        except OSError as error:
            raise ConfigurationError(
                f"Cannot write the log file {path} ({error.strerror}). With --log-dir "
                "name a directory that can be written."
            ) from error

    @property
    def start(self) -> int:
        """Where the output of the current incarnation begins, in bytes."""
        return self._start

    def mark(self, text: str) -> None:
        """Appends a line of the supervisor's own; what follows is a new part.

        A line that cannot be written (a full disk) is left out.
        """
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        try:
            with self.path.open("ab+") as file:
                size = file.seek(0, os.SEEK_END)
                torn = b"\n" if size and not _ends_line(file, size) else b""
                file.write(torn + f"=== {now} {text} ===\n".encode())
                self._start = file.seek(0, os.SEEK_END)
        except OSError:
            return

    def error_lines(self, limit: int = 25) -> list[str]:
        """The last traceback of the current part, otherwise its last lines."""
        lines = self._last_lines()
        trace = _find_trace(lines)
        if trace is None:
            return lines[-limit:]
        shown = lines[trace.start : trace.stop]
        rest = lines[trace.stop : trace.stop + max(0, limit - len(shown))]
        return shown[-limit:] + rest

    def error_line(self) -> str:
        """What looks like the error of the current part; "" where nothing does.

        The end of a traceback, or a last line that says that it is an error.
        """
        lines = self._last_lines()
        trace = _find_trace(lines)
        if trace is not None:
            return lines[trace.stop - 1].strip()
        last = lines[-1].strip() if lines else ""
        return last if _ERROR.search(last) else ""

    def _last_lines(self) -> list[str]:
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._start, size - _TAIL_BYTES))
                text = file.read().decode("utf-8", errors="replace")
        except OSError:
            return []  # somebody removed it
        return [line for line in text.splitlines() if line.strip()]


class Echo:
    """Copies a growing log file to the console, whole lines with a prefix.

    Args:
        path: the file.
        start: where to begin, in bytes.
        prefix: put before each line.
        console: where to; when it is gone (a closed pipe) the echo ends in silence.
    """

    def __init__(self, path: Path, start: int, prefix: str, console: IO[str]) -> None:
        self._file = path.open("rb")
        self._file.seek(start)
        self._prefix = prefix
        self._console = console
        self._torn = b""

    def pump(self) -> None:
        """Copies what has come since the last call."""
        while data := self._file.read(_READ_BYTES):
            *lines, self._torn = (self._torn + data).split(b"\n")
            self._print(lines)

    def close(self) -> None:
        """Copies the rest, whole line or not."""
        self.pump()
        if self._torn:
            self._print([self._torn])
            self._torn = b""
        self._file.close()

    def _print(self, lines: list[bytes]) -> None:
        # A progress bar rewrites its line; its last state is the one to show.
        texts = [x.rstrip(b"\r").rpartition(b"\r")[2] for x in lines]
        try:
            for text in texts:
                line = text.decode("utf-8", errors="replace")
                self._console.write(f"{self._prefix}{line}\n")
            self._console.flush()
        except (OSError, ValueError):
            pass  # training goes on without anyone looking


def _find_trace(lines: Sequence[str]) -> range | None:
    """Where the last traceback stands, with its error."""
    starts = [i for i, line in enumerate(lines) if _TRACEBACK in line]
    if not starts:
        return None
    # Runtimes write on after a traceback; the error stands where its indent ends.
    after = range(starts[-1] + 1, len(lines))
    error = next((i for i in after if not lines[i].startswith(" ")), len(lines) - 1)
    return range(starts[-1], error + 1)


def _ends_line(file: IO[bytes], size: int) -> bool:
    file.seek(size - 1)
    return file.read(1) == b"\n"
