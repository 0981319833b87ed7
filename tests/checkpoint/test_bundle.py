"""A foreign index without meaning is corrupt, even if its checksums are right."""

from __future__ import annotations

import struct

import google_crc32c
import pytest

from tfpreempt import errors
from tfpreempt.checkpoint.bundles import bundle

MAGIC = 0xDB4775248B80FB57


def varint(number):
    found = []
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def entry(value, length=1):
    """The only one of a block: nothing shared, lengths of key and value, key, value."""
    return b"\0" + varint(length) + varint(len(value)) + b"k" + value


def stored(content):
    """Returns a block of the table with its type and checksum, and its length."""
    block = content + struct.pack("<II", 0, 1)
    crc = google_crc32c.value(block + b"\0")
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return block + b"\0" + struct.pack("<I", masked), len(block)


def table(first):
    """Returns an index with one block of one entry, and the block with its position."""
    data, length = stored(first)
    index, index_length = stored(entry(varint(0) + varint(length)))
    footer = varint(0) + varint(0) + varint(len(data)) + varint(index_length)
    return data + index + footer.ljust(40, b"\0") + struct.pack("<Q", MAGIC)


NUMBERS = {"for an index": 1 << 69, "for a file": (1 << 63) - 1}


@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
def test_a_length_that_nothing_can_have(tmp_path, number):
    field = varint(2 << 3 | 2) + varint(number)
    for first in (entry(b"", length=number), entry(field)):
        (tmp_path / "x.index").write_bytes(table(first))
        with pytest.raises(
            errors.CheckpointCorruptedError, match="is incomplete or corrupt"
        ):
            bundle.check(str(tmp_path / "x"))
