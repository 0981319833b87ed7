"""Are the files of a commit what its manifest says? Sizes first, then every byte.

Bytes are read in ranges by many threads, large files too: the checksums of the ranges
are combined. A thread holds one piece of a range at a time. A file that has another
size is never read, so a manifest that claims terabytes costs nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import IO, TypeVar, cast

from tfpreempt import errors
from tfpreempt.checkpoint.catalog import Entry
from tfpreempt.checkpoint.manifest import FileEntry
from tfpreempt.core.threads import map_in_threads
from tfpreempt.storage import checksum
from tfpreempt.storage.interface import ObjectMissingError

THREADS = 8
_RANGE = 64 << 20
_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


def faults(
    commit: Entry,
    *,
    every_byte: bool,
    threads: int = THREADS,
    watch: Callable[[int], None] = lambda done: None,
) -> dict[str, str]:
    """What is wrong with the files of a commit: a text for each, by its name.

    Args:
        commit: the commit; its manifest was read.
        every_byte: whether to read all bytes; otherwise the sizes, and the checksums
            that a cloud keeps.
        threads: how many read at the same time.
        watch: called about ten times a second on the thread that waits, with the bytes
            that were read so far; what it raises ends the work.

    Raises:
        CheckpointError: the store cannot be reached.
    """
    files = commit.manifest.files if commit.manifest else ()
    sums: list[checksum.Sum] = []  # of the ranges; each grows while it is read

    def in_threads(
        do: Callable[[_Job], _Result], jobs: Iterable[_Job]
    ) -> list[_Result]:
        def tell() -> None:
            watch(sum(each.size for each in sums))

        name = "tfpreempt-verify"
        found = map_in_threads(do, jobs, threads=threads, name=name, watch=tell)
        tell()
        return found

    def look(file: FileEntry) -> str | None:
        try:
            known = commit.store.stat(commit.object(file.name))
        except errors.CheckpointDamagedError as error:
            return str(error)
        if known is None:
            return _compare(commit, file, None, 0)
        crc = file.crc32c if known.crc32c is None else known.crc32c
        return _compare(commit, file, known.size, crc)

    def read(part: tuple[FileEntry, int]) -> checksum.Sum | str:
        file, offset = part
        sums.append(summed := checksum.Sum())
        length = min(_RANGE, file.size - offset)
        name, target = commit.object(file.name), cast(IO[bytes], summed)
        try:
            commit.store.get(name, target, offset=offset, length=length)
        except (ObjectMissingError, errors.CheckpointDamagedError) as error:
            return str(error)
        return summed

    found = dict(zip(files, in_threads(look, files), strict=True))
    if every_byte:
        ranges = [
            (file, offset)
            for file in files
            if found[file] is None
            for offset in range(0, file.size or 1, _RANGE)
        ]
        pairs = zip(ranges, in_threads(read, ranges), strict=True)
        for file, parts in itertools.groupby(pairs, key=lambda pair: pair[0][0]):
            found[file] = _join(commit, file, [part for _, part in parts])
    return {file.name: text for file, text in found.items() if text is not None}


def _join(
    commit: Entry, file: FileEntry, parts: list[checksum.Sum | str]
) -> str | None:
    """Compares a file, of which all ranges were read, in their order."""
    size = crc = 0
    for part in parts:
        if isinstance(part, str):
            return part
        crc = checksum.joined(crc, part.crc32c, part.size)
        size += part.size
    return _compare(commit, file, size, crc)


def _compare(commit: Entry, file: FileEntry, size: int | None, crc: int) -> str | None:
    if size is None:
        text = "is missing"
    elif size != file.size:
        text = f"has {size} bytes; the manifest says {file.size}"
    elif crc != file.crc32c:
        text = f"has crc32c {crc:08x}; the manifest says {file.crc32c:08x}"
    else:
        return None
    return f"{commit.object(file.name)!r} {text}."
