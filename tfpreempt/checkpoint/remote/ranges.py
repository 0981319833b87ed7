"""Ranges of a file that is downloaded: split, checksummed, and written into."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from tfpreempt.storage import checksum

_RANGE_BYTES = 32 << 20  # each costs a request
_PIECE = 4 << 20


class Range(NamedTuple):
    """Some bytes of a file."""

    offset: int
    length: int


def split(size: int) -> list[Range]:
    """The ranges of a file; none for an empty one."""
    return [
        Range(offset, min(_RANGE_BYTES, size - offset))
        for offset in range(0, size, _RANGE_BYTES)
    ]


def of_range(descriptor: int, part: Range) -> int | None:
    """The crc32c of a range of a file; None if the file ends before it."""
    offset, left = part
    crc = 0
    while left:
        piece = os.pread(descriptor, min(left, _PIECE), offset)
        if not piece:
            return None
        crc = checksum.extended(crc, piece)
        offset += len(piece)
        left -= len(piece)
    return crc


class RangeWriter(io.RawIOBase):
    """The file that a store writes into: puts bytes where they belong, sums them up.

    More bytes than belong there are counted and not written.

    Args:
        descriptor: of the file.
        part: the range.
        on_piece: called with the size of each piece before it is written; what it
            raises ends the call of the store.
    """

    def __init__(
        self, descriptor: int, part: Range, on_piece: Callable[[int], None]
    ) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._part = part
        self._on_piece = on_piece
        self._position = self._end = 0
        self._crc = 0
        self._is_straight = True  # each byte came once, in order

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """A store that tries again goes back to where it began."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._end}
        position = start[whence] + offset
        self._is_straight = self._is_straight and position == self._position
        self._position = self._end = max(0, position)
        return self._position

    def truncate(self, size: int | None = None, /) -> int:
        """What is behind the position counts no more, as after `seek`."""
        return self.seek(self._position if size is None else size)

    def write(self, data: Any, /) -> int:
        with memoryview(data) as view:
            count = view.nbytes
        self._on_piece(count)
        offset, length = self._part
        room = max(0, length - self._position)
        fits = data if isinstance(data, bytes) and count <= room else bytes(data)[:room]
        if self._is_straight:
            self._crc = checksum.extended(self._crc, fits)
        _write_at(self._descriptor, fits, offset + self._position)
        self._position += count
        self._end = max(self._end, self._position)
        return count

    def checksum(self) -> int | None:
        """The crc32c of the range; None if it is not as long as it should be."""
        if self._end != self._part[1]:
            return None
        if self._is_straight:
            return self._crc
        return of_range(self._descriptor, self._part)

    def fault(self) -> str:
        """What is wrong with its length."""
        offset, length = self._part
        if self._end > length:
            return f"has more than {offset + length} bytes"
        return f"ends after {offset + self._end} bytes"


def _write_at(descriptor: int, data: bytes, offset: int) -> None:
    written = os.pwrite(descriptor, data, offset)
    while written < len(data):  # seldom: a signal, or a disk that is nearly full
        written += os.pwrite(descriptor, data[written:], offset + written)
