"""Runs another program, and records what it does to its disk, for tests of power loss.

Usage: recorded.py CHECKPOINT_DIR PROGRAM ARGUMENT...

With RECORD empty it only waits less for leases, as it does in any case.
What changed is seen by looking at all files after each operation of Python, so what
TensorFlow writes by itself is recorded too, as of the next one. `recorded.json` has a
list of steps, in order; numbers are those of inodes, ROOT is the directory of all:

    ["entry", directory, name, number, is_directory]    a name was made, or replaced
    ["gone", directory, name]
    ["moved", directory, name, directory, name, number, is_directory]
    ["data", number, base64, time]                      what a file holds from now on
    ["sync", number]                                    of a file or a directory
    ["said", bytes]                                     so much has been printed
"""

from __future__ import annotations

import base64
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tfpreempt.checkpoint import fence, patience
from tfpreempt.checkpoint.remote import place

PLACE = Path(os.environ["HOLD_DIRECTORY"])
ROOT = 0
ROOTS = ("ckpt", "mirror", "memory")
CHANGES = ("rename", "replace", "remove", "unlink", "mkdir", "rmdir", "link")
COARSE = 50_000_000
"""Nanoseconds within which two writes of a file may have one time."""

SOON = patience.Renewal(renewal=0.2, expiry=1.0, poll=0.05)
fence.PACE = place.PACE = SOON  # a holder's record may be lost, and who it was

Entries = dict[tuple[int, str], tuple[int, bool]]


class Recorder:
    """Looks at the disk, and keeps the steps from one look to the next."""

    def __init__(self) -> None:
        self.steps: list[list[Any]] = []
        self._entries: Entries = {}
        self._seen: dict[int, tuple[int, int]] = {}
        self._data: dict[int, str] = {}
        self._said = 0
        self._lock = threading.RLock()
        self.look()
        # What was there before is safe; ROOT, which the program never syncs, is last.
        for number in (*(number for number, _ in self._entries.values()), ROOT):
            self.steps.append(["sync", number])

    def watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same function of `os`, with a look before and after."""

        @functools.wraps(call)
        def watching(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.look()
                try:
                    return call(*args, **kwargs)
                finally:
                    self.look()

        return watching

    def synced(self, call: Callable[[int], None]) -> Callable[[int], None]:
        """The same function of `os`, of one descriptor."""

        @functools.wraps(call)
        def syncing(descriptor: int) -> None:
            with self._lock:
                self.look()
                call(descriptor)
                number = os.fstat(descriptor).st_ino
                is_root = number == PLACE.stat().st_ino
                self.steps.append(["sync", ROOT if is_root else number])

        return syncing

    def look(self) -> None:
        """Keeps what changed since the last look."""
        with self._lock:
            found = self._settled()
            before = {number: key for key, (number, _) in self._entries.items()}
            gone = {k for k, v in self._entries.items() if found.get(k) != v}
            for key, (number, is_folder) in found.items():
                if self._entries.get(key) == (number, is_folder):
                    continue
                source = before.get(number)
                if source in gone and source not in found:
                    gone.remove(source)
                    self.steps.append(["moved", *source, *key, number, is_folder])
                else:
                    self.steps.append(["entry", *key, number, is_folder])
            self.steps += [["gone", *key] for key in gone - found.keys()]
            self._entries = found
            self._read(ROOT, PLACE)
            if (said := os.fstat(1).st_size) != self._said:
                self._said = said
                self.steps.append(["said", said])

    def _settled(self) -> Entries:
        """All names, as two looks in a row have found them."""
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
            return  # since the look
        is_old = time.time_ns() - status.st_mtime_ns > COARSE
        self._seen[number] = state if is_old else (0, 0)
        if self._data.get(number) != text:
            self._data[number] = text
            self.steps.append(["data", number, text, status.st_mtime_ns])


def entries(folder: int, path: Path) -> Iterator[tuple[tuple[int, str], Any]]:
    """What a directory holds, and those below."""
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


recorder = Recorder() if os.environ["RECORD"] else None
if recorder:
    for name in CHANGES:
        setattr(os, name, recorder.watched(getattr(os, name)))
    for name in ("fsync", "fdatasync"):
        setattr(os, name, recorder.synced(getattr(os, name)))
program = Path(sys.argv[0]).with_name(sys.argv.pop(2))
sys.argv[0] = __file__ = str(program)
exec(compile(program.read_text(), program, "exec"))
if recorder:
    recorder.look()
    (PLACE / "recorded.json").write_text(json.dumps(recorder.steps))
