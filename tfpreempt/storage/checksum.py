"""Computes crc32c checksums of files in chunks, and combines checksums.

google-crc32c releases the GIL on large buffers and is fast (about 13 GB/s). So reading
the bytes takes most of the time, and threads can compute several checksums at once.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import TYPE_CHECKING, Any

import google_crc32c

from tfpreempt.storage import file_reading
from tfpreempt.storage.chunks import SeekableReader

if TYPE_CHECKING:
    import numpy as np

_CHUNK_BYTES = 1 << 20  # a larger chunk is no faster, and each thread holds two chunks
_POLYNOMIAL = 0x82F63B78  # Castagnoli's polynomial; the lowest bit is the highest power
_ONE, _X = 1 << 31, 1 << 30  # the polynomials 1 and x


def of_bytes(data: bytes) -> int:
    """Returns the crc32c of the bytes, as an unsigned 32-bit number."""
    return int(google_crc32c.value(data))


def extended(crc: int, data: bytes | np.ndarray[Any, Any]) -> int:
    """Returns the crc32c of earlier bytes followed by `data`.

    Args:
        crc: crc32c of the earlier bytes.
        data: the bytes that follow.
    """
    return int(google_crc32c.extend(crc, data))


def joined(first: int, second: int, second_size: int) -> int:
    """Returns the crc32c of two joined byte strings, from the checksum of each.

    A CRC is the remainder of a division of polynomials. So the first checksum is
    multiplied by x**n, where n is the number of bits in the second string; then the
    second checksum is added. The product is computed from a table, four bits at a time.

    Args:
        first: crc32c of the first string.
        second: crc32c of the second string.
        second_size: length of the second string in bytes.
    """
    if not first:  # every product of 0 is 0
        return second
    for products in _products(second_size):
        second ^= products[first & 15]
        first >>= 4
    return second


@dataclasses.dataclass(slots=True)
class ChecksumWriter:
    """File object that computes size and crc32c of the written bytes; keeps no bytes.

    Attributes:
        size: number of bytes written so far.
        crc32c: checksum of the bytes written so far.
    """

    size: int = 0
    crc32c: int = 0

    def write(self, data: bytes) -> int:
        self.crc32c = int(google_crc32c.extend(self.crc32c, data))
        self.size += len(data)
        return len(data)

    def append(self, crc: int, size: int) -> None:
        """Adds `size` further bytes, of which only the checksum `crc` is known."""
        self.crc32c = joined(self.crc32c, crc, size)
        self.size += size


def of_source(source: SeekableReader, limit: int = sys.maxsize) -> ChecksumWriter:
    """Reads an open file to its end, or at most `limit` bytes.

    Returns:
        Size and crc32c of the bytes.
    """
    size = crc = 0
    while chunk := source.read(min(_CHUNK_BYTES, limit - size)):
        crc = int(google_crc32c.extend(crc, chunk))
        size += len(chunk)
    return ChecksumWriter(size, crc)


def of_file(path: str) -> tuple[int, int]:
    """Returns size in bytes and crc32c of a file.

    Raises:
        OSError: the file cannot be read.
    """
    with file_reading.open_file(path, buffering=0) as file:
        found = of_source(file)
    return found.size, found.crc32c


@functools.lru_cache(maxsize=1024)
def _products(size: int) -> list[list[int]]:
    """Returns the tables with which `joined` multiplies a checksum by x**(8 * size).

    Each table has the 16 products for four bits of a checksum; the first table is for
    the lowest four bits. Results are cached, because most tensors of a model have one
    of a few sizes.
    """
    product = _power_of_x(8 * size)
    of_bits = [product]  # product for the highest bit, which is x**0; the next is x**1
    while len(of_bits) < 32:
        product = product >> 1 ^ (_POLYNOMIAL if product & 1 else 0)
        of_bits.insert(0, product)
    products = []
    for start in range(0, 32, 4):
        found = [0]
        for product in of_bits[start : start + 4]:
            found += [each ^ product for each in found]
        products.append(found)
    return products


def _power_of_x(exponent: int) -> int:
    result, square = _ONE, _X
    while exponent:
        if exponent & 1:
            result = _times(result, square)
        square = _times(square, square)
        exponent >>= 1
    return result


def _times(first: int, second: int) -> int:
    """Returns the product of two polynomials modulo the polynomial of crc32c."""
    product = 0
    for bit in range(31, -1, -1):
        if first >> bit & 1:
            product ^= second
        second = second >> 1 ^ (_POLYNOMIAL if second & 1 else 0)
    return product
