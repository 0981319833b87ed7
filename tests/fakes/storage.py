"""Disks and an object store that fail at chosen operations.

`FaultyFiles` wraps the real file operations, records each operation, and can fail or
"crash" at any of them. `FaultyObjectStore` is an object store in memory. Without a
fault it passes the contract test of the real stores.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tfpreempt.storage import checksum, chunks
from tfpreempt.storage.files import Files, LocalFiles, write_durably
from tfpreempt.storage.object_store import (
    ObjectNotFoundError,
    ObjectStat,
    check_name,
)

_PIECE = 4 << 20


class SimulatedCrash(BaseException):
    """The process has ended; not an Exception, so that no code handles it."""


class Operation(NamedTuple):
    """A recorded operation.

    Attributes:
        name: name of the method.
        path: the file or the object; for a rename the new name.
    """

    name: str
    path: str


class _Faulty:
    """Records operations, and fails at chosen operations. Thread-safe.

    Attributes:
        operations: the operations in order.
    """

    def __init__(self, faults: Mapping[int, BaseException], when: str) -> None:
        self.operations: list[Operation] = []
        self._fault_at: Callable[[int], BaseException | None] = dict(faults).get
        self._when = when
        self._crash: BaseException | None = None
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def _step(self, name: str, path: str) -> Iterator[bool]:
        """Makes one operation; returns whether to do only half of the operation."""
        with self._lock:
            if self._crash is not None:
                raise self._crash
            fault = self._fault_at(len(self.operations))
            self.operations.append(Operation(name, path))
            if isinstance(fault, SimulatedCrash):
                self._crash = fault
        is_torn = fault is not None and self._when == "torn" and name == "write"
        if fault is not None and self._when != "after" and not is_torn:
            raise fault
        yield is_torn
        if fault is not None:
            raise fault


class FaultyFiles(_Faulty):
    """File operations that are recorded, and that fail where a test requests it.

    Args:
        inner: implementation of the operations.
        fail_at: index of the failing operation; None: no fault.
        error: raised error: a SimulatedCrash (every later operation raises too), or an
            OSError such as `OSError(errno.ENOSPC, "No space left on device")`.
        when: "before" the operation, "after" it, or "torn" (writes only half of the
            data).
    """

    def __init__(
        self,
        inner: Files | None = None,
        *,
        fail_at: int | None = None,
        error: BaseException | None = None,
        when: str = "before",
    ) -> None:
        error = error or SimulatedCrash("simulated crash")
        super().__init__({} if fail_at is None else {fail_at: error}, when)
        self._inner = inner or LocalFiles()

    def make_dirs(self, path: str) -> None:
        with self._step("make_dirs", path):
            self._inner.make_dirs(path)

    def write(self, path: str, data: Iterable[bytes | memoryview]) -> None:
        with self._step("write", path) as is_torn:
            if is_torn:
                whole = b"".join(bytes(piece) for piece in data)
                data = [whole[: len(whole) // 2]]
            self._inner.write(path, data)

    def sync_file(self, path: str) -> None:
        with self._step("sync_file", path):
            self._inner.sync_file(path)

    def sync_dir(self, path: str) -> None:
        with self._step("sync_dir", path):
            self._inner.sync_dir(path)

    def rename(self, source: str, target: str) -> None:
        with self._step("rename", target):
            self._inner.rename(source, target)

    def remove(self, path: str) -> None:
        with self._step("remove", path):
            self._inner.remove(path)

    def publish(self, path: str, data: bytes) -> None:
        write_durably(self, path, data)

    def remove_dir(self, path: str) -> None:
        with self._step("remove_dir", path):
            self._inner.remove_dir(path)


class FaultyObjectStore(_Faulty):
    """An object store in memory whose operations fail where a test requests it.

    Args:
        faults: errors by index of the operation, counted from 0. After a SimulatedCrash
            every operation raises, until `revive()`.
        when: "before" the operation, or "after" it (only the reply is lost).
        uri: URI of the store.
    """

    def __init__(
        self,
        faults: Mapping[int, BaseException] | None = None,
        *,
        when: str = "before",
        uri: str = "memory://",
    ) -> None:
        super().__init__(faults or {}, when)
        self._uri = uri
        self._objects: dict[str, bytes] = {}
        self._held = threading.Lock()  # for the objects

    @property
    def uri(self) -> str:
        return self._uri

    def fail_from(self, index: int, error: BaseException) -> None:
        """Makes this and all later operations fail, until `revive()`."""
        with self._lock:
            before = self._fault_at
            self._fault_at = lambda at: error if at >= index else before(at)

    def revive(self) -> None:
        """Simulates the next process: clears all faults, and keeps the objects."""
        with self._lock:
            self._fault_at, self._crash = lambda at: None, None

    def put_if_absent(
        self, name: str, source: chunks.SeekableReader, *, timeout: float | None = None
    ) -> bool:
        del timeout
        check_name(name)
        data = b"".join(chunks.of(source, _PIECE))
        with self._step("put_if_absent", name), self._held:
            if name in self._objects:
                return False
            self._objects[name] = data
            return True

    def compose(
        self, name: str, parts: Sequence[str], *, timeout: float | None = None
    ) -> bool:
        del timeout
        check_name(name)
        with self._step("compose", name), self._held:
            if missing := [
                check_name(each) for each in parts if each not in self._objects
            ]:
                raise ObjectNotFoundError(f"The object {missing[0]!r} does not exist.")
            if name in self._objects:
                return False
            self._objects[name] = b"".join(self._objects[each] for each in parts)
            return True

    def replace(self, name: str, data: bytes, *, timeout: float | None = None) -> None:
        del timeout
        check_name(name)
        with self._step("replace", name), self._held:
            self._objects[name] = data

    def get(
        self,
        name: str,
        target: chunks.SequentialWriter,
        *,
        offset: int = 0,
        length: int | None = None,
        timeout: float | None = None,
    ) -> int:
        del timeout
        check_name(name)
        with self._step("get", name), self._held:
            if name not in self._objects:
                raise ObjectNotFoundError(f"The object {name!r} does not exist.")
            data = self._objects[name]
        end = len(data) if length is None else min(offset + length, len(data))
        for start in range(offset, end, _PIECE):
            target.write(data[start : min(start + _PIECE, end)])
        return max(end - offset, 0)

    def list(self, prefix: str = "") -> Iterator[str]:
        with self._step("list", prefix), self._held:
            names = sorted(name for name in self._objects if name.startswith(prefix))
        yield from names

    def folders(self, *, timeout: float | None = None) -> Iterator[str]:
        del timeout
        names = self.list()
        yield from sorted({name.split("/")[0] for name in names if "/" in name})

    def stat(self, name: str, *, timeout: float | None = None) -> ObjectStat | None:
        del timeout
        check_name(name)
        with self._step("stat", name), self._held:
            if name not in self._objects:
                return None
            data = self._objects[name]
        return ObjectStat(size=len(data), crc32c=checksum.of_bytes(data))

    def delete(self, name: str, *, timeout: float | None = None) -> None:
        del timeout
        check_name(name)
        with self._step("delete", name), self._held:
            self._objects.pop(name, None)

    def damage(self, name: str) -> None:
        """Flips one bit of an object, as a broken transfer does."""
        with self._held:
            data = bytearray(self._objects[name])
            data[-1] ^= 1
            self._objects[name] = bytes(data)


def damage(path: str, *, offset: int = -1) -> None:
    """Flips one bit of a file, as a bad disk does; its size and mtime stay.

    Args:
        path: the file.
        offset: the byte to damage; negative counts from the end.
    """
    status = os.stat(path)
    with open(path, "r+b") as file:
        position = offset if offset >= 0 else status.st_size + offset
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
