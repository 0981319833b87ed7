"""Values are restored from JSON with equal types and bits."""

from __future__ import annotations

import io
import json
import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfpreempt import errors
from tfpreempt.checkpoint.state.encoding import (
    decode,
    encode,
    read_parts,
    readable,
    write_parts,
)


def carried(value):
    arrays = []
    apart = json.dumps(encode(value, "value", arrays))
    inside = json.dumps(encode(value))
    back = decode(json.loads(apart), arrays)
    assert repr(decode(json.loads(inside))) == repr(back)
    return back


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        2**70,
        "a\ud800",
        -0.0,
        0.1 + 0.2,
        5e-324,
        math.inf,
        -math.inf,
        {"a": [1, (2.0, None)], "": {}, "dict": {"float": ()}},
        [[], (), {}],
        {1: "a", "1": "b", (2, None): {False: 0.5}},
    ],
)
def test_values_are_restored_with_their_type(value):
    back = carried(value)
    assert back == value
    assert repr(back) == repr(value)


def test_every_bit_of_a_nan_is_restored():
    bits = bytes.fromhex("fff8000000000abc")
    value = struct.unpack(">d", bits)[0]
    assert struct.pack(">d", carried(value)) == bits


@pytest.mark.parametrize(
    "value",
    [
        np.float32(0.1),
        np.float64(np.nan),
        np.bool_(True),
        np.int8(-3),
        np.str_("é"),
        np.datetime64("2020-01-02T03"),
        np.arange(6, dtype=">i2").reshape(2, 3).T,
        np.zeros((0, 3), np.float16),
        np.array(["a", "bc"]),
        np.array(1.5),
    ],
    ids=repr,
)
def test_numpy_values_are_restored_with_their_dtype(value):
    back = carried({"x": [value]})["x"][0]
    assert type(back) is type(value)
    assert back.dtype == value.dtype
    assert back.tobytes() == value.tobytes()
    assert back.shape == value.shape


def test_arrays_are_restored_writable():
    carried(np.zeros(3))[0] = 1


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": [0, {1, 2}]}, r"it\['a'\]\[1\] is \{1, 2\} \(set\)"),
        ({b"k": 1}, r"a key of it is b'k' \(bytes\)"),
        (np.zeros(2, "i4,f4"), r"it is an array of dtype \[\('f0'"),
    ],
)
def test_a_value_that_cannot_be_restored_is_refused_by_its_path(value, said):
    with pytest.raises(errors.SaveError, match=said):
        encode(value, "it")


@pytest.mark.parametrize("kind", ["array", "scalar"])
def test_saved_bytes_are_never_taken_for_objects(kind):
    hostile = {kind: "41" * 8, "dtype": "O", "shape": [1]}
    with pytest.raises(ValueError, match="which tfpreempt never saves"):
        decode(hostile)


@pytest.mark.parametrize("dtype", [",U1", "(2", "f8,,", "i4,i4", 7, {}, [], None])
def test_a_dtype_that_is_none_is_damage(dtype):
    """NumPy parses a name with a comma as Python, and raises Python's errors."""
    damaged = {"array": "", "dtype": dtype, "shape": [0]}
    with (
        pytest.raises(errors.CheckpointCorruptedError, match="the State"),
        readable("the State"),
    ):
        decode(damaged)


@settings(max_examples=200)
@given(st.lists(st.binary(max_size=50)), st.integers(0))
def test_parts(parts, cut):
    file = io.BytesIO()
    write_parts(file, {"n": len(parts)}, parts)
    data = file.getvalue()
    assert read_parts(io.BytesIO(data)) == ({"n": len(parts)}, parts)
    with pytest.raises(errors.CheckpointCorruptedError):
        read_parts(io.BytesIO(data[: cut % len(data)]))


@settings(max_examples=200)
@given(st.floats())
def test_floats_are_restored(number):
    assert struct.pack(">d", carried(number)) == struct.pack(">d", number)


def test_values_of_older_commits_are_read():
    old = {
        "list": [{"float": "0x1.8000000000000p+0"}, {"float": "-inf"}, {"tuple": [1]}]
    }
    assert decode(old) == [1.5, -math.inf, (1,)]
    assert decode({"float": "0x0.0p+0"}) == 0.0


@pytest.mark.parametrize("kind", ["|S0", "<U0"])
def test_no_array_takes_more_memory_than_its_bytes(kind):
    """NumPy gives each element of such a copy some bytes: a shape filled the memory."""
    saved = {"array": "", "dtype": kind, "shape": [10]}
    with pytest.raises(ValueError, match="never saved"):
        decode(saved)
    with pytest.raises(errors.SaveError, match="array of dtype"):
        encode(np.ndarray((10,), kind))
    assert decode(encode(np.str_(""))) == ""


@pytest.mark.parametrize("kind", ["array", "bytes"])
def test_the_bytes_of_an_array_are_copied_once(kind):
    """A file of 20 MB with 200,000 references to one array filled any memory."""
    saved = {kind: 0, "dtype": "|u1", "shape": [3]}
    assert bytes(decode(saved, [b"abc"])) == b"abc"
    with (
        pytest.raises(errors.CheckpointCorruptedError, match="the State"),
        readable("the State"),
    ):
        decode([saved, saved], [b"abc"])
