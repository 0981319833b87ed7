"""Ranges of a file that is downloaded: split, checksummed, and written into."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import NamedTuple

from tfpreempt.storage import checksum, pieces

# Each costs a request, which is milliseconds of the interpreter that all threads share;
# and a download that is killed loses those that are under way.
_SMALLEST, _LARGEST = 32 << 20, 64 << 20
_SHARES = 8  # as many as there are threads


class Range(NamedTuple):
    """Some bytes of a file."""

    offset: int
    length: int


def split(size: int, total: int) -> list[Range]:
    """The ranges of a file; none for an empty one.

    Args:
        size: of the file.
        total: of all files of its checkpoint; the more, the longer the ranges.
    """
    length = max(_SMALLEST, min(total // _SHARES, _LARGEST))
    return [
        Range(offset, min(length, size - offset)) for offset in range(0, size, length)
    ]


def of_range(file: io.FileIO, part: Range) -> int | None:
    """The crc32c of a range of a file; None if the file ends before it."""
    file.seek(part.offset)
    found = checksum.of_source(file, part.length)
    return found.crc32c if found.size == part.length else None


class RangeWriter:
    """The file that a store writes into: puts bytes where they belong, sums them up.

    More bytes than belong there are counted and not written.

    Args:
        file: that is written into, by nobody else through this object.
        part: the range.
        on_piece: called with the size of each piece before it is written; what it
            raises ends the call of the store.

    Attributes:
        crc32c: of the bytes that are there.
    """

    def __init__(
        self, file: io.FileIO, part: Range, on_piece: Callable[[int], None]
    ) -> None:
        self.crc32c = 0
        self._file = file
        self._part = part
        self._on_piece = on_piece
        self._count = 0
        file.seek(part.offset)

    def write(self, data: bytes) -> int:
        self._on_piece(len(data))
        fits = data[: max(0, self._part.length - self._count)]
        self.crc32c = checksum.extended(self.crc32c, fits)
        pieces.write(self._file, fits)
        self._count += len(data)
        return len(data)

    @property
    def fault(self) -> str:
        """What is wrong with its length; "" if nothing is."""
        offset, length = self._part
        if self._count > length:
            return f"has more than {offset + length} bytes"
        if self._count < length:
            return f"ends after {offset + self._count} bytes"
        return ""
