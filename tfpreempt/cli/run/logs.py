"""The log files of the workers: one per worker, continued over all restarts.

The supervisor adds a line at every start and end of the worker. So a user finds the
cause of a failure by reading one file upwards, and `tail -F` continues through
restarts. A worker writes to a pipe, not to the file: on a full disk `print` would raise
an error, and end training. The supervisor drops text that it cannot write.
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
TRACEBACK = "Traceback (most recent call last)"


class WorkerLog:
    """The output of a worker: a pipe, and the file to which its text is written.

    Any thread may use the object. Both ends of the pipe stay open in this process. So a
    child process that outlives its worker can still write to the pipe, and this process
    need not wait for the child's end.

    Args:
        path: path of the file; text is appended.
        size: size in bytes at which the file is renamed to `<path>.1`, an existing
            `<path>.1` to `<path>.2`, and so on.
        files: maximum number of files.
        lost: function called with the path and the error, each time that text cannot be
            written.
        console: console that gets a copy of the worker's output; None: no copy.
        root: directory inside which no symbolic link is followed, see `contained`.

    Raises:
        ConfigurationError: the file cannot be written. Not raised if the disk is full.
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
        """Reads the contents of the pipe, and writes them to the file."""
        with self._lock, contextlib.suppress(BlockingIOError):
            self._add(os.read(self.reading, _READ_BYTES))

    def begin(self, text: str) -> None:
        """Adds a line of the supervisor at the start of the worker."""
        with self._lock:
            self._tail.clear()
            self._append(self._own_line(text))

    def note(self, text: str) -> None:
        """Adds a line of the supervisor while the worker is running."""
        with self._lock:
            self._append(self._own_line(text))

    def end(self, text: str) -> None:
        """Adds a line of the supervisor at the end of the worker, after its output."""
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
        """Returns the last traceback since the newest start of the worker.

        If there is no traceback, returns the last lines.

        Args:
            limit: maximum number of lines.
        """
        lines, start, end = self._newest_error()
        if start is None:
            return lines[-limit:]
        shown = lines[start:end][-limit:]
        return shown + lines[end:][: limit - len(shown)]

    def error_line(self) -> str:
        """Returns the last line of the last traceback, such as "ValueError: ...".

        Returns the last line of the output if there is no traceback.
        """
        lines, _, end = self._newest_error()
        return "".join(lines[end - 1 : end])

    def _newest_error(self) -> tuple[list[str], int | None, int]:
        """Returns the newest lines, and where the last traceback begins and ends.

        Returns:
            The lines; the index of the traceback's first line, None without a
            traceback; the index after its last line, or after the last line.
        """
        with self._lock:
            text = self._tail[-_TAIL_BYTES:].decode("utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        starts = [i for i, line in enumerate(lines) if TRACEBACK in line]
        if not starts:
            return lines, None, len(lines)
        # The first unindented line of a traceback is the error. Lines after the error
        # are output that libraries have written later.
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
        """Formats a line that the supervisor adds to the log of the worker.

        If the file ends in the middle of a line, the result begins with a line break.
        """
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
        """Writes data; if earlier data was lost, first writes a line about the loss."""
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
        """Appends data. Opens the file at each call, because a user may move or remove
        the file."""
        while data:
            with open(self._opened(_APPEND), "ab", buffering=0) as file:
                count = self._fitting(data, file.tell())
                piece, data = data[:count], data[count:]
                while piece:
                    piece = piece[file.write(piece) :]
            if data:
                self._rotate()

    def _fitting(self, data: bytes, at: int) -> int:
        """Returns the number of bytes of complete lines that still fit into the file.

        A line longer than the maximum size of a file is split.

        Args:
            data: bytes to write.
            at: current size of the file.
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
        """Creates the log directory, but not its parents: the disk may be unmounted."""
        with (
            contained.parent(self.path.parent, self._root) as (folder, name),
            contextlib.suppress(FileExistsError),
        ):
            os.mkdir(name, dir_fd=folder)

    def _opened(self, flags: int) -> int:
        return contained.open_file(self.path, flags, root=self._root, copies=True)


@contextlib.contextmanager
def pumped(logs: Sequence[WorkerLog]) -> Iterator[None]:
    """Context manager: a thread reads the workers' pipes, and writes the logs.

    At the end, the caller waits at most `_JOIN_SECONDS` for the thread, because a disk
    may hang.
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
