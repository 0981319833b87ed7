"""A disk with faults, for all code that uses the functions of Python.

The functions of `os` and `open` are replaced for files below the disk's root. So the
code under test needs no injected object, and the test sees every operation. Not
included are system calls of C code, as in TensorFlow, and files opened as `FileIO`.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import errno
import functools
import io
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

_OPENS = ("open", "listdir", "scandir")
_ALLOCATES = ("create", "write", "mkdir", "rename", "replace", "link", "fsync")
_CHANGES = (*_ALLOCATES, "remove", "unlink", "rmdir", "truncate", "ftruncate", "utime")
_LOOKS = ("open", "read", "pread", "listdir", "scandir", "stat", "lstat", "readlink")

_WRITTEN = ("create", "write", "truncate", "ftruncate")
_NAMED = ("create", "mkdir", "rename", "replace", "link")
_NOTED = {*_WRITTEN, *_NAMED, "fsync", "failed fsync"}
_stat = os.stat  # the real function, without faults

_MEETS: dict[int, tuple[str, ...]] = {
    errno.ENOSPC: _ALLOCATES,
    errno.EDQUOT: _ALLOCATES,
    errno.EROFS: _CHANGES,
    errno.EMFILE: (*_OPENS, "create"),
    errno.EIO: (*_CHANGES, *_LOOKS),
    errno.ESTALE: (*_CHANGES, *_LOOKS),
    errno.ETIMEDOUT: (*_CHANGES, *_LOOKS),
}
"""Kinds of operations that can have each error."""

ERRORS = tuple(_MEETS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault: the operations that fail, of the kinds that can have this error.

    Attributes:
        number: number of the error, one of `ERRORS`.
        first: first operation that fails, counted from the begin of the fault.
        count: number of failing operations from the first on; None: all.
        is_late: whether the operation is done, and only the result is an error.
            Otherwise a failing write writes half of the data.
        only: the only kind of operation that fails; "": all kinds.
    """

    number: int
    first: int
    count: int | None
    is_late: bool
    only: str = ""

    def may_meet(self, name: str) -> bool:
        """Returns whether an operation of this kind counts."""
        return name in _MEETS[self.number] and self.only in ("", name)


class FaultyDisk:
    """All files below a directory. Any thread may use the disk.

    Args:
        root: the directory.
    """

    def __init__(self, root: str) -> None:
        self.root = os.path.realpath(root)
        self._fault: Fault | None = None
        self._met = 0
        self._lock = threading.Lock()
        self._written: set[int] = set()  # files, by inode
        self._lost: set[int] = set()  # files whose last sync failed, by inode
        self._named: set[tuple[int, str]] = set()  # entries, by directory and name

    def begin(self, fault: Fault) -> None:
        """Starts a fault."""
        with self._lock:
            self._fault, self._met = fault, 0

    def mend(self) -> None:
        """Ends the fault."""
        with self._lock:
            self._fault = None

    @property
    def failed(self) -> int:
        """Number of failed operations since the fault began."""
        fault = self._fault
        if fault is None:
            return 0
        failed = max(self._met - fault.first, 0)
        return failed if fault.count is None else min(failed, fault.count)

    @contextlib.contextmanager
    def sound(self) -> Iterator[None]:
        """Context manager: no operation fails, and none is counted."""
        fault, self._fault = self._fault, None
        try:
            yield
        finally:
            self._fault = fault

    def unsynced(self, path: str, below: str) -> str:
        """Returns why a file may be missing or different after a loss of power.

        An empty text means that the file is safe. After a failed sync the unsynced data
        are lost, as on Linux: a later sync does not report the loss, and only a new
        write of the file repairs it.

        Args:
            path: path of the file.
            below: a directory above the file, whose own name is not checked.
        """
        number = _stat(path).st_ino
        if number in self._lost:
            return f"{path} could not be synced"
        if number in self._written:
            return f"{path} was not synced since it was written"
        while path != below:
            path, name = os.path.split(path)
            if (_stat(path).st_ino, name) in self._named:
                return f"{path} was not synced since it has {name}"
        return ""

    @contextlib.contextmanager
    def step(self, name: str, path: str, at: str | int | None = None) -> Iterator[bool]:
        """Context manager: runs an operation; yields whether to do only half of it.

        Args:
            name: kind of the operation.
            path: path in the error.
            at: path or descriptor that the operation changes; None: `path`.
        """
        at = path if at is None else at
        with self._lock:
            fault = self._fault
            if fault is not None and not fault.may_meet(name):
                fault = None
            if fault is not None:
                number, self._met = self._met - fault.first, self._met + 1
                fails = number >= 0 and (fault.count is None or number < fault.count)
                fault = fault if fails else None
        if fault is None:
            yield False
            self._note(name, at)
            return
        error = OSError(fault.number, os.strerror(fault.number), path)
        if name == "write" or fault.is_late:
            yield not fault.is_late
            self._note("failed fsync" if name == "fsync" else name, at)
        elif name == "fsync":
            self._note("failed fsync", at)
        raise error

    def _note(self, name: str, at: str | int) -> None:
        """Records the data that a loss of power would take after an operation."""
        if name not in _NOTED:
            return
        try:
            number = _stat(at, follow_symlinks=isinstance(at, int)).st_ino
        except OSError:
            return  # deleted, or never created
        with self._lock:
            if name in _NAMED and isinstance(at, str):
                folder, entry = os.path.split(at)
                self._named.add((_stat(folder).st_ino, entry))
            if name in _WRITTEN:
                self._written.add(number)
            if name == "create":
                self._lost.discard(number)
            if name == "failed fsync" and number in self._written:
                self._lost.add(number)
            if name == "fsync":
                self._written.discard(number)
                self._named = {each for each in self._named if each[0] != number}


_disks: dict[str, FaultyDisk] = {}


def _disk_of(path: Any, below: int | None = None) -> FaultyDisk | None:
    """Returns the disk of a path or a descriptor, or None."""
    if isinstance(path, int):
        path = os.readlink(f"/proc/self/fd/{path}")
    path = _whole(os.fsdecode(path), below)
    found = (disk for root, disk in _disks.items() if path.startswith(root))
    return next(found, None)


def _whole(path: Any, below: int | None) -> Any:
    """Returns the absolute path of a path below an open directory."""
    if below is None or isinstance(path, int) or os.path.isabs(path):
        return path
    return os.path.normpath(os.path.join(os.readlink(f"/proc/self/fd/{below}"), path))


class _File(io.FileIO):
    """A file on a faulty disk."""

    def __init__(self, path: str, mode: str, disk: FaultyDisk, opener: Any) -> None:
        self._disk = disk
        if opener is not None:  # the opener calls `os.open`
            super().__init__(path, mode, opener=opener)
            return
        with disk.step("open" if mode in ("r", "r+") else "create", path):
            super().__init__(path, mode)

    def write(self, data: Any) -> int:
        with self._disk.step("write", str(self.name), self.fileno()) as is_torn:
            return super().write(
                memoryview(data)[: len(data) // 2 if is_torn else None]
            )

    def read(self, size: int | None = -1) -> bytes:
        with self._disk.step("read", str(self.name)):
            return super().read(-1 if size is None else size)

    def readall(self) -> bytes:
        with self._disk.step("read", str(self.name)):
            return super().readall()

    def readinto(self, buffer: Any) -> int:
        with self._disk.step("read", str(self.name)):
            return super().readinto(buffer)


def _opened(
    real: Callable[..., Any], path: Any, mode: str = "r", *args: Any, **more: Any
) -> Any:
    disk = None if isinstance(path, int) else _disk_of(path)
    if disk is None:
        return real(path, mode, *args, **more)
    buffering = args[0] if args else more.get("buffering", -1)
    raw = _File(
        os.fspath(path),
        mode.replace("b", "").replace("t", ""),
        disk,
        more.get("opener"),
    )
    if "b" in mode and buffering == 0:
        return raw
    if "+" in mode:
        file: Any = io.BufferedRandom(raw)
    elif "r" in mode:
        file = io.BufferedReader(raw)
    else:
        file = io.BufferedWriter(raw)
    if "b" in mode:
        return file
    return io.TextIOWrapper(file, more.get("encoding"), more.get("errors"))


def _asked(
    name: str, real: Callable[..., Any], path: Any = ".", *args: Any, **more: Any
) -> Any:
    below = more.get("dir_fd", more.get("src_dir_fd"))
    disk = _disk_of(path, below)
    if disk is None:
        return real(path, *args, **more)
    if name == "open":
        flags = args[0] if args else more["flags"]
        name = "create" if flags & (os.O_CREAT | os.O_TRUNC) else "open"
    at = path
    if name in ("rename", "replace", "link"):
        at = _whole(args[0], more.get("dst_dir_fd"))
    elif below is not None:
        at = _whole(path, below)
    with disk.step(name, str(_whole(path, below)), at) as is_torn:
        if is_torn:
            args = (args[0][: len(args[0]) // 2], *args[1:])
        return real(path, *args, **more)


_NAMES = (
    *("open", "read", "pread", "write", "fsync", "truncate", "ftruncate"),
    *("listdir", "scandir", "stat", "lstat", "mkdir", "rename", "replace", "link"),
    *("remove", "unlink", "rmdir", "utime"),
)


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Context manager: replaces the functions of Python that use files."""
    with contextlib.ExitStack() as stack:
        for name in _NAMES:
            asked = functools.partial(_asked, name, getattr(os, name))
            stack.enter_context(mock.patch.object(os, name, asked))
        opened = functools.partial(_opened, builtins.open)
        stack.enter_context(mock.patch.object(builtins, "open", opened))
        stack.enter_context(mock.patch.object(io, "open", opened))
        yield


@contextlib.contextmanager
def disk(root: str) -> Iterator[FaultyDisk]:
    """Context manager: makes a directory a faulty disk, while `watching`."""
    made = FaultyDisk(root)
    _disks[made.root] = made
    try:
        yield made
    finally:
        del _disks[made.root]
