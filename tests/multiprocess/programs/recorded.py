"""Runs another program, and records all changes of its disk, for tests of power loss.

Usage: recorded.py CHECKPOINT_DIR PROGRAM ARGUMENT...

With an empty RECORD the program records nothing, and only waits less for leases. The
recorder compares all files after each file operation of Python. So changes by
TensorFlow are recorded too, at the next operation of Python. The workers of a run take
turns, and append the steps to `recorded.jsonl`, one step per line, in order. Numbers
are inode numbers; ROOT is the directory that contains all others:

    ["entry", directory, name, number, is_directory]    a name was created or replaced
    ["gone", directory, name]                           a name was deleted
    ["moved", directory, name, directory, name, number, is_directory]
    ["writes", worker, path]                            another worker than before opens
                                                        the file for writing
    ["data", number, base64, time, worker]              new contents of a file, and the
                                                        worker that wrote them
    ["sync", number, worker]                            a file or a directory was synced
    ["said", bytes]                                     size of the chief's output

The chief counts as the writer of a file until another worker opens the file in Python.
So files that TensorFlow opens belong to the chief.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from toy_model import INDEX

from tfpreempt.checkpoint.lease import (
    directory_lease,
    lease_timeouts,
    object_store_lease,
)

PLACE = Path(os.environ["HOLD_DIRECTORY"])
CHIEF = 0
ROOT = 0
ROOTS = ("ckpt", "mirror", "memory")
ROOTS_BEGIN = tuple(f"{PLACE}/{name}/" for name in ROOTS)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = ("rename", "replace", "remove", "unlink", "mkdir", "rmdir", "link")
COARSE = 50_000_000
"""Nanoseconds within which two writes of a file may have the same time."""

SOON = lease_timeouts.RenewalIntervals(renewal=0.2, expiry=1.0, poll=0.05)
directory_lease.PACE = object_store_lease.PACE = (
    SOON  # the record that identifies a holder may be lost
)

Entries = dict[tuple[int, str], tuple[int, bool]]


class Recorder:
    """Compares the disk with its last state, and records the changes.

    Args:
        record: the record, which all workers share.
    """

    def __init__(self, record: Path) -> None:
        self._entries: Entries = {}
        self._seen: dict[int, tuple[int, int]] = {}
        self._data: dict[int, str] = {}
        self._writers: dict[str, int] = {}
        self._said = 0
        self._lock = threading.RLock()
        self._depth = 0
        self._record = record.open("a+b", buffering=0)
        self._read_up_to = 0
        with self._turn():
            if self._record.seek(0, os.SEEK_END):
                return  # another worker was here before
            self.look()
            # Existing files are durable; ROOT, which the program never syncs, is last.
            for number in (*(number for number, _ in self._entries.values()), ROOT):
                self._keep("sync", number, CHIEF)

    def watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of `os` with a comparison before and after the call."""

        @functools.wraps(call)
        def watching(*args: Any, **kwargs: Any) -> Any:
            with self._turn():
                self.look()
                try:
                    return call(*args, **kwargs)
                finally:
                    self.look()

        return watching

    def synced(self, call: Callable[[int], None]) -> Callable[[int], None]:
        """Returns a function of `os` for one descriptor that records the sync."""

        @functools.wraps(call)
        def syncing(descriptor: int) -> None:
            with self._turn():
                self.look()
                call(descriptor)
                number = os.fstat(descriptor).st_ino
                is_root = number == PLACE.stat().st_ino
                self._keep("sync", ROOT if is_root else number, INDEX)

        return syncing

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Records the files that this worker writes; a hook of `sys.addaudithook`."""
        if event == "open" and isinstance(arguments[0], str | os.PathLike):
            self._see_opened(os.fspath(arguments[0]), arguments[2])

    def opened(self, call: Callable[..., int]) -> Callable[..., int]:
        """Returns an `os.open` that records files opened in an open directory."""

        @functools.wraps(call)
        def opening(
            path: Any, flags: int, *args: Any, dir_fd: int | None = None, **kwargs: Any
        ) -> int:
            if dir_fd is not None:
                folder = os.readlink(f"/proc/self/fd/{dir_fd}")
                self._see_opened(os.path.join(folder, path), flags)
            return call(path, flags, *args, dir_fd=dir_fd, **kwargs)

        return opening

    def _see_opened(self, path: str, flags: int) -> None:
        if flags & WRITING and path.startswith(ROOTS_BEGIN):
            with self._turn():
                if self._writers.get(path, CHIEF) != INDEX:
                    self.look()
                    self._keep("writes", INDEX, path)

    def look(self) -> None:
        """Records the changes since the last comparison, by any worker."""
        with self._turn():
            found = self._settled()
            before = {number: key for key, (number, _) in self._entries.items()}
            gone = {k for k, v in self._entries.items() if found.get(k) != v}
            for key, (number, is_folder) in found.items():
                if self._entries.get(key) == (number, is_folder):
                    continue
                source = before.get(number)
                if source in gone and source not in found:
                    gone.remove(source)
                    self._keep("moved", *source, *key, number, is_folder)
                else:
                    self._keep("entry", *key, number, is_folder)
            for key in gone - found.keys():
                self._keep("gone", *key)
            self._entries = found
            self._read(ROOT, PLACE)
            said = os.fstat(1).st_size if INDEX == CHIEF else 0
            if said != self._said:
                self._said = said
                self._keep("said", said)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Context manager: excludes other threads and workers; reads their steps."""
        with self._lock:
            self._depth += 1
            try:
                if self._depth == 1:
                    fcntl.flock(self._record, fcntl.LOCK_EX)
                    self._catch_up()
                yield
            finally:
                if self._depth == 1:
                    fcntl.flock(self._record, fcntl.LOCK_UN)
                self._depth -= 1

    def _catch_up(self) -> None:
        self._record.seek(self._read_up_to)
        for line in self._record.read().splitlines():
            self._know(*json.loads(line))
        self._read_up_to = self._record.tell()

    def _know(self, kind: str, *what: Any) -> None:
        """Applies a step of another worker."""
        if kind in ("gone", "moved"):
            self._entries.pop((what[0], what[1]), None)
        if kind in ("entry", "moved"):
            *_, folder, name, number, is_folder = what
            self._entries[folder, name] = (number, is_folder)
        elif kind == "writes":
            self._writers[what[1]] = what[0]
        elif kind == "data":
            self._data[what[0]] = what[1]

    def _keep(self, *step: Any) -> None:
        if step[0] == "writes":
            self._know(*step)
        self._record.write(json.dumps(step).encode() + b"\n")
        self._read_up_to = self._record.tell()

    def _settled(self) -> Entries:
        """Returns all names, as soon as two listings in sequence are equal."""
        found = dict(entries(ROOT, PLACE))
        while (again := dict(entries(ROOT, PLACE))) != found:
            found = again
        return found

    def _read(self, folder: int, path: Path) -> None:
        for (parent, name), (number, is_folder) in self._entries.items():
            if parent != folder:
                continue
            if is_folder:
                self._read(number, path / name)
            else:
                self._read_file(number, path / name)

    def _read_file(self, number: int, path: Path) -> None:
        try:
            status = path.stat()
            state = (status.st_mtime_ns, status.st_size)
            if self._seen.get(number) == state:
                return
            text = base64.b64encode(path.read_bytes()).decode()
        except FileNotFoundError:
            return  # deleted since the listing
        is_old = time.time_ns() - status.st_mtime_ns > COARSE
        self._seen[number] = state if is_old else (0, 0)
        if self._data.get(number) != text:
            self._data[number] = text
            writer = self._writers.get(str(path), CHIEF)
            self._keep("data", number, text, status.st_mtime_ns, writer)


def entries(folder: int, path: Path) -> Iterator[tuple[tuple[int, str], Any]]:
    """Yields the entries of a directory and of all directories below."""
    try:
        names = sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names if folder != ROOT else ROOTS:
        below = path / name
        try:
            status = below.lstat()
        except FileNotFoundError:
            continue
        is_folder = below.is_dir()
        yield (folder, name), (status.st_ino, is_folder)
        if is_folder:
            yield from entries(status.st_ino, below)


recorder = Recorder(PLACE / "recorded.jsonl") if os.environ["RECORD"] else None
if recorder:
    for name in CHANGES:
        setattr(os, name, recorder.watched(getattr(os, name)))
    os.open = recorder.opened(os.open)
    for name in ("fsync", "fdatasync"):
        setattr(os, name, recorder.synced(getattr(os, name)))
    sys.addaudithook(recorder.see)
program = Path(sys.argv[0]).with_name(sys.argv.pop(2))
sys.argv[0] = __file__ = str(program)
exec(compile(program.read_text(), program, "exec"))
if recorder:
    recorder.look()
