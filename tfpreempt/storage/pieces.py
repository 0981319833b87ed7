"""A file's bytes in pieces of one size, however little each read gives."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Protocol


class Source(Protocol):
    """A file that is read; it may be gone back in."""

    def read(self, size: int, /) -> bytes: ...

    def seek(self, offset: int, whence: int = ..., /) -> int: ...

    def tell(self) -> int: ...


class Target(Protocol):
    """A file that is only written to, in order."""

    def write(self, data: bytes, /) -> int: ...


def size_of(source: Source) -> int:
    """Bytes from the position to the end; the position stays.

    Raises:
        OSError: the file is not seekable.
    """
    start = source.tell()
    end = source.seek(0, io.SEEK_END)
    source.seek(start)
    return end - start


def read(source: Source, size: int) -> bytes:
    """So many bytes; fewer only at the end of the file."""
    first = source.read(size)
    if len(first) == size or not first:
        return first
    pieces = [first]
    missing = size - len(first)
    while missing > 0 and (more := source.read(missing)):
        pieces.append(more)
        missing -= len(more)
    return b"".join(pieces)


def of(source: Source, size: int) -> Iterator[bytes]:
    """All that is left, so many bytes at a time; an empty file has no piece."""
    while piece := read(source, size):
        yield piece


def write(file: io.FileIO, data: bytes | memoryview) -> None:
    """All of it: a disk that is nearly full, or a signal, may take a part only."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
