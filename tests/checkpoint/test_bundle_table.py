"""The table of a checkpoint's index is read as it was written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfpreempt.checkpoint.bundles import bundle


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
