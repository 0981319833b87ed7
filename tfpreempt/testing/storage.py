"""Fakes for what checkpoints are written to: disks and stores that fail on demand.

`FaultyFiles` stands in front of the real file operations, records each, and can fail or
"crash" at any one of them. `FaultyStore` is an object store in memory; it passes the
contract test of the real ones while no fault is asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator
from typing import IO

from tfpreempt.storage import checksum, pieces
from tfpreempt.storage.files import Files, LocalFiles
from tfpreempt.storage.interface import (
    ObjectMissingError,
    ObjectStat,
    check_name,
)

_PIECE = 4 << 20


class SimulatedCrash(BaseException):
    """The process is dead from here on; not an Exception, so nothing handles it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One file operation: its name in `Files` and its path, a rename's new one."""

    name: str
    path: str


class FaultyFiles:
    """File operations that are recorded, and that fail where the test says.

    Args:
        inner: what really does the work.
        fail_at: index of the operation that fails; None for none.
        error: what is raised: a SimulatedCrash (after it, every operation raises), or
            an OSError such as `OSError(errno.ENOSPC, "No space left on device")`.
        when: "before" the operation, "after" it, or "torn": a write that leaves half.

    Attributes:
        operations: what was asked for, in order. Thread-safe.
    """

    def __init__(
        self,
        inner: Files | None = None,
        *,
        fail_at: int | None = None,
        error: BaseException | None = None,
        when: str = "before",
    ) -> None:
        self.operations: list[Operation] = []
        self._inner = inner or LocalFiles()
        self._fail_at = fail_at
        self._error = error or SimulatedCrash("simulated crash")
        self._when = when
        self._dead = False
        self._lock = threading.Lock()

    def make_dirs(self, path: str) -> None:
        self._do("make_dirs", path)

    def write(self, path: str, data: bytes) -> None:
        self._do("write", path, data)

    def sync_file(self, path: str) -> None:
        self._do("sync_file", path)

    def sync_dir(self, path: str) -> None:
        self._do("sync_dir", path)

    def rename(self, source: str, target: str) -> None:
        with self._lock:
            fails = self._count("rename", target)
        if fails and self._when != "after":
            raise self._error
        self._inner.rename(source, target)
        if fails:
            raise self._error

    def remove(self, path: str) -> None:
        self._do("remove", path)

    def remove_dir(self, path: str) -> None:
        self._do("remove_dir", path)

    def _do(self, name: str, path: str, data: bytes | None = None) -> None:
        with self._lock:
            fails = self._count(name, path)
        if fails and self._when == "torn" and data is not None:
            self._inner.write(path, data[: len(data) // 2])
        if fails and self._when != "after":
            raise self._error
        if data is not None:
            self._inner.write(path, data)
        else:
            getattr(self._inner, name)(path)
        if fails:
            raise self._error

    def _count(self, name: str, path: str) -> bool:
        if self._dead:
            raise self._error
        index = len(self.operations)
        self.operations.append(Operation(name, path))
        fails = index == self._fail_at
        self._dead = fails and isinstance(self._error, SimulatedCrash)
        return fails


class FaultyStore:
    """An object store in memory whose operations fail where the test says.

    Args:
        faults: what to raise, by index of the operation; counted from 0. After a
            SimulatedCrash every operation raises, until `revive()`.
        when: "before" the operation, or "after" it: it was done, the answer is lost.
        uri: what it says of itself.

    Attributes:
        operations: (name of the operation, name of the object), in order.
    """

    def __init__(
        self,
        faults: dict[int, BaseException] | None = None,
        *,
        when: str = "before",
        uri: str = "memory://",
    ) -> None:
        self.operations: list[tuple[str, str]] = []
        self._faults = dict(faults or {})
        self._when = when
        self._uri = uri
        self._crash: BaseException | None = None
        self._fails_from = 0
        self._error: BaseException | None = None
        self._objects: dict[str, tuple[bytes, int]] = {}
        self._generation = 0
        self._lock = threading.Lock()

    @property
    def uri(self) -> str:
        return self._uri

    def fail_from(self, index: int, error: BaseException) -> None:
        """From this operation on every one fails, until `revive()`."""
        with self._lock:
            self._fails_from, self._error = index, error

    def revive(self) -> None:
        """The next process: no fault is left, the objects are."""
        with self._lock:
            self._faults, self._crash, self._error = {}, None, None

    def put_if_absent(
        self, name: str, source: IO[bytes], *, timeout: float | None = None
    ) -> bool:
        del timeout
        check_name(name)
        data = b"".join(pieces.of(source, _PIECE))
        with self._step("put_if_absent", name):
            if name in self._objects:
                return False
            self._put(name, data)
            return True

    def replace(self, name: str, data: bytes, *, timeout: float | None = None) -> None:
        del timeout
        check_name(name)
        with self._step("replace", name):
            self._put(name, data)

    def get(
        self,
        name: str,
        target: IO[bytes],
        *,
        offset: int = 0,
        length: int | None = None,
        timeout: float | None = None,
    ) -> int:
        del timeout
        check_name(name)
        with self._step("get", name):
            if name not in self._objects:
                raise ObjectMissingError(f"There is no object {name!r}.")
            data = self._objects[name][0]
        end = len(data) if length is None else min(offset + length, len(data))
        for start in range(offset, end, _PIECE):
            target.write(data[start : min(start + _PIECE, end)])
        return max(end - offset, 0)

    def list(self, prefix: str = "") -> Iterator[str]:
        with self._step("list", prefix):
            names = sorted(name for name in self._objects if name.startswith(prefix))
        yield from names

    def folders(self, *, timeout: float | None = None) -> Iterator[str]:
        del timeout
        names = self.list()
        yield from sorted({name.split("/")[0] for name in names if "/" in name})

    def stat(self, name: str, *, timeout: float | None = None) -> ObjectStat | None:
        del timeout
        check_name(name)
        with self._step("stat", name):
            if name not in self._objects:
                return None
            data, generation = self._objects[name]
        return ObjectStat(
            name=name,
            size=len(data),
            crc32c=checksum.of_bytes(data),
            generation=str(generation),
        )

    def delete(self, name: str, *, timeout: float | None = None) -> bool:
        del timeout
        check_name(name)
        with self._step("delete", name):
            return self._objects.pop(name, None) is not None

    def damage(self, name: str) -> None:
        """Flips one bit of an object, as a broken transfer does."""
        with self._lock:
            data = bytearray(self._objects[name][0])
            data[-1] ^= 1
            self._put(name, bytes(data))

    def _put(self, name: str, data: bytes) -> None:
        self._generation += 1
        self._objects[name] = (data, self._generation)

    @contextlib.contextmanager
    def _step(self, operation: str, name: str) -> Iterator[None]:
        """One operation, under the lock."""
        with self._lock:
            if self._crash is not None:
                raise self._crash
            fault = self._faults.pop(len(self.operations), None)
            if self._error is not None and len(self.operations) >= self._fails_from:
                fault = self._error
            self.operations.append((operation, name))
            if isinstance(fault, SimulatedCrash):
                self._crash = fault
            if fault is not None and self._when == "before":
                raise fault
            yield
            if fault is not None:
                raise fault


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
