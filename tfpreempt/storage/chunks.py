"""Reads a file in pieces of equal size, even if a read returns less."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Protocol


class SeekableReader(Protocol):
    """A seekable file to read from."""

    def read(self, size: int, /) -> bytes: ...

    def seek(self, offset: int, whence: int = ..., /) -> int: ...

    def tell(self) -> int: ...


class SequentialWriter(Protocol):
    """A file to write to, in order."""

    def write(self, data: bytes, /) -> int: ...


def size_of(source: SeekableReader) -> int:
    """Returns the bytes from the position to the end; keeps the position.

    Raises:
        OSError: the file is not seekable.
    """
    start = source.tell()
    end = source.seek(0, io.SEEK_END)
    source.seek(start)
    return end - start


def read(source: SeekableReader, size: int) -> bytes:
    """Reads `size` bytes; fewer only at the end of the file."""
    first = source.read(size)
    if len(first) == size or not first:
        return first
    pieces = [first]
    missing = size - len(first)
    while missing > 0 and (more := source.read(missing)):
        pieces.append(more)
        missing -= len(more)
    return b"".join(pieces)


def of(source: SeekableReader, size: int) -> Iterator[bytes]:
    """Yields the rest of the file in pieces of `size` bytes; no piece if empty."""
    while piece := read(source, size):
        yield piece


def write(file: io.FileIO, data: bytes | memoryview) -> None:
    """Writes every byte: a nearly full disk or a signal can cut a write short."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
