"""Reads and writes complete pieces, even if one `read` or `write` call covers less."""

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
    """A file that is written from the beginning to the end."""

    def write(self, data: bytes, /) -> int: ...


def size_of(source: SeekableReader) -> int:
    """Returns the number of bytes from the file's current position to its end.

    The position is the same after the call.

    Raises:
        OSError: the file is not seekable.
    """
    start = source.tell()
    end = source.seek(0, io.SEEK_END)
    source.seek(start)
    return end - start


def read(source: SeekableReader, size: int) -> bytes:
    """Reads `size` bytes, or all bytes up to the end of the file if they are fewer."""
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
    """Yields the file from its position to its end, in pieces of `size` bytes.

    The last piece may be smaller. At the end of the file, yields no piece.
    """
    while piece := read(source, size):
        yield piece


def write(file: io.FileIO, data: bytes | memoryview) -> None:
    """Writes every byte of `data`.

    A single write can be incomplete, if a signal arrives or the disk is nearly full.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
