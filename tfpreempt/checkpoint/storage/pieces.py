"""A file's bytes in pieces of one size, however little each read gives."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import IO


def size_of(source: IO[bytes]) -> int:
    """Bytes from the position to the end; the position stays.

    Raises:
        OSError: the file is not seekable.
    """
    start = source.tell()
    end = source.seek(0, io.SEEK_END)
    source.seek(start)
    return end - start


def read(source: IO[bytes], size: int) -> bytes:
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


def of(source: IO[bytes], size: int) -> Iterator[bytes]:
    """All that is left, so many bytes at a time; an empty file has no piece."""
    while piece := read(source, size):
        yield piece
