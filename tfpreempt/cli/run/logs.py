"""The workers' log files: one per worker over all restarts, with a line at each start.

Who looks for the reason at night opens one file and reads upwards; `tail -F` on it goes
on through restarts. A worker writes into a pipe and not into the file: a disk that is
full must end no training because `print` raises. What cannot be written is left out.
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

from tfpreempt.cli.run.console import Console
from tfpreempt.core import contained
from tfpreempt.core.threads import OwnedThread
from tfpreempt.errors import ConfigurationError
from tfpreempt.storage.files import LocalFiles

_READ_BYTES = 1 << 20  # no pipe holds more, so that one read empties it
_TAIL_BYTES = 1 << 16
_JOIN_SECONDS = 5.0
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_TRACEBACK = "Traceback (most recent call last)"


class WorkerLog:
    """One worker's output: a pipe, and the file that it is emptied into. Any thread.

    Both ends of the pipe stay open, so that it breaks for no child that outlives its
    worker, and nothing waits for such a child either.

    Args:
        path: the file; it is appended to.
        size: bytes at which it becomes `<path>.1`, that `<path>.2`, and so on.
        files: how many there are then at most.
        lost: told the path and the error whenever text cannot be written.
        console: gets a copy of what the worker writes.
        root: the directory below which no link is followed; see `contained`.

    Raises:
        ConfigurationError: the file cannot be written, other than for want of space.
    """

    def __init__(
        self,
        path: Path,
        *,
        size: int,
        files: int,
        lost: Callable[[Path, OSError], None],
        console: Console | None = None,
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
        self._tail = bytearray()  # of the current part; it needs no disk
        self._left_out = 0
        try:
            self._files.make_dirs(str(path.parent))
            os.close(self._opened(_APPEND))
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise ConfigurationError(
                    f"Cannot write the log file {path} ({error.strerror}). With "
                    "--log-dir name a directory that can be written."
                ) from error
            lost(path, error)
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.reading, False)

    def take(self) -> None:
        """Empties the pipe, as far as it is filled now."""
        with self._lock, contextlib.suppress(BlockingIOError):
            self._add(os.read(self.reading, _READ_BYTES))

    def begin(self, text: str) -> None:
        """A new part, with a line of the supervisor's own in front."""
        with self._lock:
            self._tail.clear()
            self._append(self._own_line(text))

    def note(self, text: str) -> None:
        """A line of the supervisor's own, in the midst of the worker's."""
        with self._lock:
            self._append(self._own_line(text))

    def end(self, text: str) -> None:
        """Takes what was written last, and adds a line of the supervisor's own."""
        self.take()
        with self._lock:
            if self._tail and not self._tail.endswith(b"\n"):
                self._add(b"\n")
            self._append(self._own_line(text))
        if self._console is not None:
            self._console.flush()

    def say(self, text: str) -> None:
        """In place of a worker that says nothing itself; shown like its output."""
        with self._lock:
            self._add(f"{text}\n".encode())

    def close(self) -> None:
        """Closes the pipe."""
        os.close(self.reading)
        os.close(self.writing)

    def error_lines(self, limit: int = 25) -> list[str]:
        """The last traceback of the current part, otherwise its last lines."""
        lines, start, end = self._newest_error()
        if start is None:
            return lines[-limit:]
        shown = lines[start:end][-limit:]
        return shown + lines[end:][: limit - len(shown)]

    def error_line(self) -> str:
        """The one that names the error; "" where nothing was written."""
        lines, _, end = self._newest_error()
        return "".join(lines[end - 1 : end])

    def _newest_error(self) -> tuple[list[str], int | None, int]:
        """The lines, and where the last traceback begins, if there is one, and ends."""
        with self._lock:
            text = self._tail[-_TAIL_BYTES:].decode("utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        starts = [i for i, line in enumerate(lines) if _TRACEBACK in line]
        if not starts:
            return lines, None, len(lines)
        # Runtimes write on after a traceback; the error stands where its indent ends.
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
        """On a line of its own, whatever a worker has left at the end."""
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        torn = b""
        with (
            contextlib.suppress(OSError),
            open(self._opened(os.O_RDONLY), "rb") as file,
        ):
            file.seek(-1, os.SEEK_END)
            torn = b"\n" * (file.read(1) != b"\n")
        return torn + f"=== {now} {text} ===\n".encode()

    def _append(self, data: bytes) -> None:
        """Writes what can be written, after a word about what could not."""
        try:
            if self._left_out:
                self._make_directory()
                said = f"up to {self._left_out} bytes were left out here: no room"
                self._write(self._own_line(said))
                self._left_out = 0
            self._write(data)
        except OSError as error:
            self._left_out += len(data)
            self._lost(self.path, error)

    def _write(self, data: bytes) -> None:
        """Opened each time: the file may be moved, or removed, by others meanwhile."""
        while data:
            with open(self._opened(_APPEND), "ab", buffering=0) as file:
                count = self._fitting(data, file.tell())
                piece, data = data[:count], data[count:]
                while piece:
                    piece = piece[file.write(piece) :]
            if data:
                self._rotate()

    def _fitting(self, data: bytes, at: int) -> int:
        """How much of it goes into a file that has `at` bytes: whole lines, if any."""
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
        """Not the directories above: the disk may have been unmounted."""
        with (
            contained.parent(self.path.parent, self._root) as (folder, name),
            contextlib.suppress(FileExistsError),
        ):
            os.mkdir(name, dir_fd=folder)

    def _opened(self, flags: int) -> int:
        return contained.open_file(self.path, flags, root=self._root, copies=True)


@contextlib.contextmanager
def pumped(logs: Sequence[WorkerLog]) -> Iterator[None]:
    """Empties the workers' pipes in a thread, however slow the disk is.

    At the end a disk that hangs is not waited for.
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

    thread = OwnedThread("tfpreempt-logs", pump)
    thread.start()
    try:
        yield
    finally:
        os.close(waker)
        thread.join(_JOIN_SECONDS)
