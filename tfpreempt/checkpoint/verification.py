"""Are the files of a commit what its manifest says? Sizes first, then every byte.

Bytes are read in ranges by many threads, large files too: the checksums of the ranges
are combined. A thread holds one piece of a range at a time. A file that has another
size is never read, so a manifest that claims terabytes costs nothing.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any, TypeVar, cast

from tfpreempt import errors
from tfpreempt.checkpoint.manifest import FileEntry
from tfpreempt.core.threads import map_in_threads
from tfpreempt.storage import checksum
from tfpreempt.storage.interface import ObjectMissingError, ObjectStore

THREADS = 8
_RANGE = 64 << 20
_TICK_SECONDS = 0.1
_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is wrong with one file.

    Attributes:
        name: of the object in its store.
        text: what it has and what it should have; begins with its name.
    """

    name: str
    text: str


class Effort:
    """How much is done at once, and who is told how far it is.

    Args:
        threads: that read at the same time.
        tick: called about ten times a second on the thread that waits, with the bytes
            that were read so far; what it raises ends the work.
    """

    def __init__(
        self, threads: int = THREADS, tick: Callable[[int], None] = lambda done: None
    ) -> None:
        self.threads = threads
        self._tick = tick
        self._done = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Counts bytes that were read. Any thread."""
        with self._lock:
            self._done += count

    def tick(self) -> None:
        """Tells how many there are."""
        self._tick(self._done)


def check_sizes(
    store: ObjectStore, base: str, files: Iterable[FileEntry], effort: Effort
) -> list[Fault]:
    """Which files are missing or have another size; a cloud's own checksum counts too.

    Args:
        store: where they are.
        base: what the manifest's names are relative to; "" for the store's root.
        files: what the manifest says.
        effort: how.

    Raises:
        CheckpointError: the store cannot be reached.
    """

    def look(entry: FileEntry) -> Fault | None:
        name = joined(base, entry.name)
        try:
            known = store.stat(name)
        except errors.CheckpointDamagedError as error:
            return Fault(name=name, text=str(error))
        if known is None:
            return _compare(name, entry, None, entry.crc32c)
        crc = entry.crc32c if known.crc32c is None else known.crc32c
        return _compare(name, entry, known.size, crc)

    faults = _in_threads(list(files), look, effort)
    return [fault for fault in faults if fault is not None]


def check_bytes(
    store: ObjectStore, base: str, files: Iterable[FileEntry], effort: Effort
) -> list[Fault]:
    """Which files are missing or have another size or checksum; reads every byte.

    Args:
        store: where they are.
        base: what the manifest's names are relative to; "" for the store's root.
        files: what the manifest says.
        effort: how.

    Raises:
        CheckpointError: the store cannot be reached.
    """
    files = list(files)
    faults = check_sizes(store, base, files, effort)
    wrong = {fault.name for fault in faults}
    ranges = [
        _Range(name=joined(base, entry.name), entry=entry, offset=offset)
        for entry in files
        if joined(base, entry.name) not in wrong
        for offset in range(0, entry.size or 1, _RANGE)
    ]
    sums = _in_threads(ranges, lambda part: _read(store, part, effort), effort)
    parts: dict[str, list[_Part]] = {}
    for part in sums:
        parts.setdefault(part.of.name, []).append(part)
    for name, found in parts.items():
        if (fault := _join(name, found)) is not None:
            faults.append(fault)
    return sorted(faults, key=lambda fault: fault.name)


def joined(base: str, name: str) -> str:
    """The name of a file in its store."""
    return f"{base}/{name}" if base else name


# --- ranges --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Range:
    name: str
    entry: FileEntry
    offset: int

    @property
    def length(self) -> int:
        return min(_RANGE, self.entry.size - self.offset)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    of: _Range
    size: int
    crc32c: int
    problem: str | None = None


def _read(store: ObjectStore, part: _Range, effort: Effort) -> _Part:
    sink = _Sum(effort)
    problem = None
    try:
        store.get(
            part.name,
            cast(IO[bytes], sink),
            offset=part.offset,
            length=part.length,
        )
    except (ObjectMissingError, errors.CheckpointDamagedError) as error:
        problem = str(error)
    return _Part(of=part, size=sink.size, crc32c=sink.crc32c, problem=problem)


def _join(name: str, parts: Sequence[_Part]) -> Fault | None:
    """Compares a file, of which all ranges were read, in their order."""
    size = crc = 0
    for part in parts:
        if part.problem is not None:
            return Fault(name=name, text=part.problem)
        crc = checksum.joined(crc, part.crc32c, part.size)
        size += part.size
    return _compare(name, parts[0].of.entry, size, crc)


def _compare(name: str, entry: FileEntry, size: int | None, crc: int) -> Fault | None:
    if size is None:
        text = "is missing"
    elif size != entry.size:
        text = f"has {size} bytes; the manifest says {entry.size}"
    elif crc != entry.crc32c:
        text = f"has crc32c {crc:08x}; the manifest says {entry.crc32c:08x}"
    else:
        return None
    return Fault(name=name, text=f"{name!r} {text}.")


class _Sum(checksum.Sum):
    """It also tells how many bytes there were."""

    def __init__(self, effort: Effort) -> None:
        super().__init__()
        self._effort = effort

    def write(self, data: Any) -> int:
        count = super().write(data)
        self._effort.add(count)
        return count


def _in_threads(
    jobs: Sequence[_Job], do: Callable[[_Job], _Result], effort: Effort
) -> list[_Result]:
    found = map_in_threads(
        do, jobs, threads=effort.threads, name="tfpreempt-verify", watch=effort.tick
    )
    effort.tick()
    return found
