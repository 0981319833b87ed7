"""The log files of the workers: one per worker, continued over all restarts.

The supervisor adds a line at every start and end of the worker. So the cause of a
failure is found by reading one file upwards, and `tail -F` continues through restarts.
A worker does not write to the file but to a pipe, because `print` would raise an error
on a full disk, and end training. Text that cannot be written is omitted.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import itertools
import os
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tfpreempt.cli.run.console import OutputConsole
from tfpreempt.core import contained
from tfpreempt.core.threads import ManagedThread
from tfpreempt.errors import ConfigurationError
from tfpreempt.storage.files import LocalFiles

_READ_BYTES = 1 << 20  # at least the size of a pipe: one read empties it
_TAIL_BYTES = 1 << 16
_JOIN_SECONDS = 5.0
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_TRACEBACK = "Traceback (most recent call last)"


class WorkerLog:
    """The output of a worker: a pipe, and the file to which its text is written.

    For any thread. Both ends of the pipe stay open in this process. So a child process
    that outlives its worker can still write, and no reader waits for its end.

    Args:
        path: path of the file; text is appended.
        size: bytes at which the file is renamed to `<path>.1`, that file to `<path>.2`,
            and so on.
        files: largest number of files.
        lost: function called with the path and the error, each time that text cannot be
            written.
        console: console that gets a copy of the worker's output.
        root: directory below which symbolic links are not followed; see `contained`.

    Raises:
        ConfigurationError: the file cannot be written; not raised for a full disk.
    """

    def __init__(
        self,
        path: Path,
        *,
        size: int,
        files: int,
        lost: Callable[[Path, OSError], None],
        console: OutputConsole | None = None,
        root: str = "",
    ) -> None:
        self.path = path
        self._root = root
        self._files = LocalFiles(root)
        self._names = [path] + [Path(f"{path}.{n}") for n in range(1, files)]
        self._size = size
        self._lost = lost
        self._console = console
        self._lock = threading.Lock()
        self._tail = bytearray()  # end of the output since the newest start
        self._left_out = 0
        try:
            self._files.make_dirs(str(path.parent))
            os.close(self._opened(_APPEND))
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise ConfigurationError(
                    f"Cannot write the log file {path} ({error.strerror}). Name a "
                    "writable directory with --log-dir."
                ) from error
            lost(path, error)
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.reading, False)

    def take(self) -> None:
        """Reads the current contents of the pipe."""
        with self._lock, contextlib.suppress(BlockingIOError):
            self._add(os.read(self.reading, _READ_BYTES))

    def begin(self, text: str) -> None:
        """Adds a line of the supervisor when the worker is started."""
        with self._lock:
            self._tail.clear()
            self._append(self._own_line(text))

    def note(self, text: str) -> None:
        """Adds a line of the supervisor between the worker's output."""
        with self._lock:
            self._append(self._own_line(text))

    def end(self, text: str) -> None:
        """Reads the remaining output, and adds a line of the supervisor."""
        self.take()
        with self._lock:
            if self._tail and not self._tail.endswith(b"\n"):
                self._add(b"\n")
            self._append(self._own_line(text))
        if self._console is not None:
            self._console.flush()

    def add_line(self, text: str) -> None:
        """Adds a line in place of the output of a worker that cannot be started."""
        with self._lock:
            self._add(f"{text}\n".encode())

    def close(self) -> None:
        """Closes the pipe."""
        os.close(self.reading)
        os.close(self.writing)

    def error_lines(self, limit: int = 25) -> list[str]:
        """Returns the last traceback since the newest start, or else the last lines."""
        lines, start, end = self._newest_error()
        if start is None:
            return lines[-limit:]
        shown = lines[start:end][-limit:]
        return shown + lines[end:][: limit - len(shown)]

    def error_line(self) -> str:
        """Returns the line that names the error, such as "ValueError: ...", or ""."""
        lines, _, end = self._newest_error()
        return "".join(lines[end - 1 : end])

    def _newest_error(self) -> tuple[list[str], int | None, int]:
        """Returns the lines, and the begin (or None) and end of the last traceback."""
        with self._lock:
            text = self._tail[-_TAIL_BYTES:].decode("utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        starts = [i for i, line in enumerate(lines) if _TRACEBACK in line]
        if not starts:
            return lines, None, len(lines)
        # The first unindented line is the error. Libraries may have written more lines.
        after = range(starts[-1] + 1, len(lines))
        end = next((i + 1 for i in after if lines[i][:1] != " "), len(lines))
        return lines, starts[-1], end

    def _add(self, data: bytes) -> None:
        self._tail += data
        if len(self._tail) > 2 * _TAIL_BYTES:
            del self._tail[:-_TAIL_BYTES]
        self._append(data)
        if self._console is not None:
            self._console.feed(data)

    def _own_line(self, text: str) -> bytes:
        """Formats a line of the supervisor; begins with a line break if needed."""
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        line_end = b""
        with (
            contextlib.suppress(OSError),
            open(self._opened(os.O_RDONLY), "rb") as file,
        ):
            file.seek(-1, os.SEEK_END)
            line_end = b"\n" * (file.read(1) != b"\n")
        return line_end + f"=== {now} {text} ===\n".encode()

    def _append(self, data: bytes) -> None:
        """Writes data; if data was lost before, first writes a line about it."""
        try:
            if self._left_out:
                self._make_directory()
                text = f"up to {self._left_out} bytes of output lost: disk full"
                self._write(self._own_line(text))
                self._left_out = 0
            self._write(data)
        except OSError as error:
            self._left_out += len(data)
            self._lost(self.path, error)

    def _write(self, data: bytes) -> None:
        """Appends data; reopens the file, since a user may have moved or removed it."""
        while data:
            with open(self._opened(_APPEND), "ab", buffering=0) as file:
                count = self._fitting(data, file.tell())
                piece, data = data[:count], data[count:]
                while piece:
                    piece = piece[file.write(piece) :]
            if data:
                self._rotate()

    def _fitting(self, data: bytes, at: int) -> int:
        """Returns how many bytes of whole lines still fit into a file of `at` bytes.

        A line longer than the largest size of a file is split.
        """
        if at + len(data) <= self._size:
            return len(data)
        lines = data.rfind(b"\n", 0, max(0, self._size - at)) + 1
        return self._size if at == 0 and lines == 0 else lines

    def _rotate(self) -> None:
        if len(self._names) == 1:
            self._files.remove(str(self.path))
        for newer, older in reversed(list(itertools.pairwise(self._names))):
            with contextlib.suppress(FileNotFoundError):
                self._files.rename(str(newer), str(older))

    def _make_directory(self) -> None:
        """Makes the log directory, but not its parents: the disk may be unmounted."""
        with (
            contained.parent(self.path.parent, self._root) as (folder, name),
            contextlib.suppress(FileExistsError),
        ):
            os.mkdir(name, dir_fd=folder)

    def _opened(self, flags: int) -> int:
        return contained.open_file(self.path, flags, root=self._root, copies=True)


@contextlib.contextmanager
def pumped(logs: Sequence[WorkerLog]) -> Iterator[None]:
    """Context where a thread reads the workers' pipes and writes the logs.

    At the end, waits at most `_JOIN_SECONDS` for the thread, because a disk may hang.
    """
    readers = {log.reading: log for log in logs}
    woken, waker = os.pipe()
    poll = select.poll()
    for descriptor in (*readers, woken):
        poll.register(descriptor, select.POLLIN)

    def pump() -> None:
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == woken:
                    os.close(woken)
                    return
                readers[descriptor].take()

    thread = ManagedThread("tfpreempt-logs", pump)
    thread.start()
    try:
        yield
    finally:
        os.close(waker)
        thread.join(_JOIN_SECONDS)
