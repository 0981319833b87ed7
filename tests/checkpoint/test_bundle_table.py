"""The table of a checkpoint's index is read as it was written."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfpreempt.checkpoint.bundles import bundle
from tfpreempt.storage import checksum


@given(st.dictionaries(st.binary(max_size=300), st.binary(max_size=300)))
def test_written_entries_are_read_in_order(values):
    table = bundle.to_bytes(values)
    assert list(bundle.entries(table)) == sorted(values.items())


def test_a_table_of_many_blocks():
    values = {b"%06d" % number: b"x" * 500 for number in range(3000)}
    table = bundle.to_bytes(values)
    assert list(bundle.entries(table)) == sorted(values.items())


@pytest.mark.parametrize("end", [0, 20, 60, -1])
def test_a_table_that_is_cut_short(end):
    table = bundle.to_bytes({b"a": b"1", b"b": b"2"})
    with pytest.raises(ValueError, match="index"):
        list(bundle.entries(table[:end]))


def test_every_bit_of_a_block_counts():
    table = bytearray(bundle.to_bytes({b"a": b"1", b"b": b"2"}))
    for position in range(20):
        table[position] ^= 1
        with pytest.raises(ValueError, match="index"):
            list(bundle.entries(bytes(table)))
        table[position] ^= 1


def varint(number: int) -> bytes:
    low = bytes([number & 127 | 128 if number > 127 else number])
    return low + (varint(number >> 7) if number > 127 else b"")


def entry(shared: int, key: bytes, value: bytes = b"") -> bytes:
    return varint(shared) + varint(len(key)) + varint(len(value)) + key + value


def table_of(block: bytes, blocks: int) -> bytes:
    """Returns a table that names one block several times."""
    table = bytearray()

    def add(content: bytes) -> bytes:
        content += struct.pack("<II", 0, 1)
        handle = varint(len(table)) + varint(len(content))
        content += b"\0"
        crc = bundle.masked(checksum.of_bytes(content))
        table.extend(content + struct.pack("<I", crc))
        return handle

    handle, footer = add(block), add(b"")
    footer += add(b"".join(entry(0, b"%04d" % n, handle) for n in range(blocks)))
    magic = bundle.to_bytes({})[-8:]
    return bytes(table) + footer.ljust(40, b"\0") + magic


def test_keys_that_share_their_beginnings_are_read() -> None:
    """TensorFlow writes each sixteenth key in full."""
    block = b"".join(
        entry(0 if number % 16 == 0 else 100, b"k" * (0 if number % 16 else 100))
        for number in range(64)
    )
    assert [*bundle.entries(table_of(block, 1))] == [(b"k" * 100, b"")] * 64


@pytest.mark.parametrize(
    ("block", "blocks", "says"),
    [
        (entry(0, b"k"), 100, "blocks of the index overlap"),
        (entry(0, b"k" * 9000) + entry(9000, b"") * 200, 1, "keys of the index are"),
    ],
)
def test_a_small_table_does_not_become_a_large_one(
    block: bytes, blocks: int, says: str
) -> None:
    """A file of 500 KiB filled the memory of a start, or kept a start busy."""
    with pytest.raises(ValueError, match=says):
        list(bundle.entries(table_of(block, blocks)))


def test_a_tensor_has_at_most_as_many_dimensions_as_in_tensorflow() -> None:
    """The product of 100,000 dimensions takes minutes."""
    shape = (2,) * 254
    known = bundle.TensorEntry(dtype=1, shape=shape)
    assert bundle.TensorEntry.parse(known.to_bytes()).shape == shape
    more = bundle.TensorEntry(dtype=1, shape=(*shape, 2))
    with pytest.raises(ValueError, match="255 dimensions"):
        bundle.TensorEntry.parse(more.to_bytes())
