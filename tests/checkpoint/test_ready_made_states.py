"""The ready-made States without TensorFlow: exact, without pickle, hard to fool."""

from __future__ import annotations

import collections
import enum
import io
import json
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfpreempt import errors
from tfpreempt.checkpoint.state.encoding import write_parts
from tfpreempt.states import (
    ArrayDictState,
    JsonState,
    NumpyRandomState,
    PythonRandomState,
    StepCounter,
    random_states,
)


def saved(state):
    buffer = io.BytesIO()
    state.save(buffer)
    return buffer.getvalue()


def load(state, data):
    state.load(io.BytesIO(data))
    return state


def parts(header, *data):
    buffer = io.BytesIO()
    write_parts(buffer, header, list(data))
    return buffer.getvalue()


# --- JSON ----------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@pytest.mark.slow  # searches long
@settings(max_examples=100)
@given(JSON)
def test_json_is_restored(value):
    data = saved(JsonState("x", value, registry=None))
    back = load(JsonState("x", registry=None), data).value
    assert back == value
    assert repr(back) == repr(value)  # 1 is not 1.0, 0.0 is not -0.0


def test_json_keeps_numbers_that_are_not_finite():
    data = saved(JsonState("x", [math.nan, math.inf], registry=None))
    first, second = load(JsonState("x", registry=None), data).value
    assert math.isnan(first)
    assert second == math.inf


CIRCLE: list = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": [1, (2, 3)]}, r"value\['a'\]\[1\] is a tuple"),
        ({1: 2}, "the key 1, a int"),
        ({"a": {None: 2}}, r"value\['a'\] has the key None"),
        ([np.float32(1)], r"value\[0\] is a float32"),
        (b"x", "is a bytes"),
        ({1, 2}, "is a set"),
        ({"a": collections.defaultdict(int)}, r"value\['a'\] is a defaultdict"),
        (CIRCLE, "contains itself"),
        ([10**6000], "cannot be written"),
        (object(), "is a object"),
    ],
)
def test_a_value_that_json_would_change_is_refused(value, said):
    state = JsonState("settings", value, registry=None)
    with pytest.raises(errors.SaveError, match=said) as caught:
        saved(state)
    assert "'settings'" in str(caught.value)


def test_subclasses_are_restored_as_plain_values():
    class Level(enum.IntEnum):
        LOW = 1

    data = saved(JsonState("x", {"a": Level.LOW, "b": np.float64(0.1)}, registry=None))
    assert load(JsonState("x", registry=None), data).value == {"a": 1, "b": 0.1}


HOSTILE = [
    b"",
    b"{",
    b"\xff\xfe",
    b"[" * 100_000,
    b"tfpbytes\xff\xff\xff\xff",
    b"\0" * 40,
]


@pytest.mark.parametrize("data", HOSTILE)
@pytest.mark.parametrize(
    "make",
    [JsonState, StepCounter, ArrayDictState, PythonRandomState, NumpyRandomState],
)
def test_hostile_files(make, data):
    before = (random.getstate(), np.random.get_state(legacy=False)["state"]["pos"])
    with pytest.raises(errors.CheckpointCorruptedError):
        load(make("x", registry=None), data)
    after = (random.getstate(), np.random.get_state(legacy=False)["state"]["pos"])
    assert before == after


# --- steps ---------------------------------------------------------------------------


def test_steps():
    counter = StepCounter(registry=None)
    assert counter.name == "step"
    assert [counter.increment(), counter.increment(5)] == [1, 6]
    counter.value = np.int64(9)
    back = load(StepCounter(registry=None), saved(counter))
    assert (back.value, type(back.value)) == (9, int)


@pytest.mark.parametrize("value", [-1, 1.0, True, "3", None, 1 << 63])
def test_invalid_steps_are_refused(value):
    with pytest.raises(errors.ConfigurationError, match="StepCounter"):
        StepCounter(value=value, registry=None)
    with pytest.raises(errors.CheckpointCorruptedError, match="'step'"):
        load(StepCounter(registry=None), json.dumps(value).encode())


# --- arrays --------------------------------------------------------------------------

RECORD = np.dtype([("a", "<i4"), ("b", ">f8", (2,)), ("c", [("é", "S3")])])
ARRAYS = {
    "plain": np.arange(6, dtype=np.float32).reshape(2, 3),
    "0-d": np.array(7, np.int16),
    "empty": np.zeros((0, 3), np.complex64),
    "no bytes": np.zeros((3,), "V0"),
    "reversed": np.arange(10)[::-2],
    "transposed": np.arange(6.0).reshape(2, 3).T,
    "sliced": np.arange(24).reshape(2, 3, 4)[:, ::2, 1:],
    "big-endian": np.arange(3, dtype=">u2"),
    "bits": np.array([np.nan, -0.0, np.inf]).view(np.uint64).view(np.float64),
    "words": np.array(["a", "bcd"]),
    "times": np.array(["2026-01-01"], "M8[ns]"),
    "bool": np.array([True, False]),
    "record": np.zeros((2, 2), RECORD),
    "aligned": np.ones(3, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "a/../name": np.float16([1, 2]),
}


def test_arrays_are_restored_exactly():
    data = saved(ArrayDictState("x", dict(ARRAYS), registry=None))
    kept = {"old": np.zeros(1)}
    state = load(ArrayDictState("x", kept, registry=None), data)
    assert state.arrays is kept
    assert list(kept) == list(ARRAYS)
    for name, array in ARRAYS.items():
        back = kept[name]
        assert (back.dtype, back.shape) == (array.dtype, array.shape), name
        assert back.tobytes() == array.tobytes(), name
        assert back.flags.writeable, name
    assert kept["transposed"].flags.f_contiguous
    assert b"pickle" not in data


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.array([{}, None]), "with Python objects; expected"),
        (np.zeros(2, [("a", "O")]), "Python objects"),
        ([1, 2], "is a list"),
        (np.float64(1), "is a float64"),
        (np.ma.array([1, 2], mask=[0, 1]), "is a MaskedArray"),
    ],
)
def test_arrays_that_cannot_be_restored_are_refused(array, said):
    state = ArrayDictState("arrays", {"bad": array}, registry=None)
    with pytest.raises(errors.SaveError, match=said) as caught:
        saved(state)
    assert "'arrays'" in str(caught.value)
    with pytest.raises(errors.SaveError, match="the name 3"):
        saved(ArrayDictState("arrays", {3: np.zeros(1)}, registry=None))


def test_dtypes_of_other_packages_are_refused():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    state = ArrayDictState("arrays", {"bad": np.zeros(2, bfloat16)}, registry=None)
    with pytest.raises(errors.SaveError, match=r"bfloat16.*save a view"):
        saved(state)


GOOD = {"name": "a", "dtype": "'<f4'", "shape": [2], "order": "C"}


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"dtype": "'|O'"}, bytes(16)),
        ({"dtype": "[('a', '|O')]"}, bytes(16)),
        ({"dtype": "__import__('os')"}, bytes(8)),
        ({"dtype": "(" * 50_000}, bytes(8)),
        ({"dtype": "'<f4'" + " " * 200_000}, bytes(8)),
        ({"dtype": 5}, bytes(8)),
        ({"shape": [10**13]}, bytes(8)),
        ({"shape": [-2]}, bytes(8)),
        ({"shape": [-1, -2]}, bytes(8)),
        ({"shape": [2.0]}, bytes(8)),
        ({"shape": [2] + [1] * 100}, bytes(8)),
        ({"shape": "2"}, bytes(8)),
        ({"dtype": "'|V0'", "shape": [10**30]}, b""),
        ({"order": "K"}, bytes(8)),
        ({"order": None}, bytes(8)),
        ({}, bytes(7)),
    ],
)
def test_hostile_arrays(change, part):
    state = ArrayDictState("x", {"mine": np.ones(1)}, registry=None)
    with pytest.raises(errors.CheckpointCorruptedError):
        load(state, parts([{**GOOD, **change}], part))
    assert list(state.arrays) == ["mine"]


def test_hostile_heads():
    for header in ({}, 3, None, [3], [GOOD], [GOOD, GOOD], [{}]):
        data = parts(header, *([bytes(8)] if header == [GOOD, GOOD] else []))
        if header == {}:
            continue  # no arrays
        with pytest.raises(errors.CheckpointCorruptedError):
            load(ArrayDictState("x", registry=None), data)


def test_sizes_that_lie_are_found_before_anything_is_read():
    for sizes in ([10**13], [-1], [-1, 1], [1.5], ["8"], [8, 8], []):
        head = json.dumps({"header": [GOOD], "sizes": sizes}).encode()
        data = b"tfpbytes" + len(head).to_bytes(4, "little") + head + bytes(8)
        with pytest.raises(errors.CheckpointCorruptedError):
            load(ArrayDictState("x", registry=None), data)


# --- random generators ---------------------------------------------------------------


def test_python_generators():
    own = random.Random(3)
    for state, draw in (
        (PythonRandomState(registry=None), random.random),
        (PythonRandomState("own", own, registry=None), own.random),
        (PythonRandomState("gauss", own, registry=None), lambda: own.gauss(0, 1)),
    ):
        assert state.per_worker
        draw()
        data = saved(state)
        first = [draw() for _ in range(5)]
        assert [draw() for _ in range(5)] != first
        load(state, data)
        assert [draw() for _ in range(5)] == first


KINDS = ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"]


@pytest.mark.parametrize("kind", [None, "legacy", *KINDS])
def test_numpy_generators(kind):
    generator = None
    if kind == "legacy":
        generator = np.random.RandomState(5)
    elif kind is not None:
        generator = np.random.Generator(getattr(np.random, kind)(5))
    draw = (generator or np.random).standard_normal
    state = NumpyRandomState("x", generator, registry=None)
    draw(3)
    data = saved(state)
    first = draw(1001)
    assert not np.array_equal(draw(1001), first)
    load(state, data)
    assert np.array_equal(draw(1001), first)


def test_the_unused_half_of_a_64_bit_draw_is_kept():
    generator = np.random.default_rng(1)
    generator.integers(0, 100, dtype=np.uint32)
    state = NumpyRandomState("x", generator, registry=None)
    data = saved(state)
    first = generator.integers(0, 100, 7, dtype=np.uint32)
    load(state, data)
    assert np.array_equal(generator.integers(0, 100, 7, dtype=np.uint32), first)


def test_a_restored_generator_spawns_the_next_generator():
    """The restarted run spawned the generators of the first steps again."""
    generator, restarted = np.random.default_rng(1), np.random.default_rng(1)
    generator.spawn(2)
    data = saved(NumpyRandomState("x", generator, registry=None))
    load(NumpyRandomState("x", restarted, registry=None), data)
    [following], [same] = generator.spawn(1), restarted.spawn(1)
    assert same.normal() == following.normal()


@pytest.mark.parametrize("count", [10**15, -1, 1.5, True, "2"])
def test_a_wrong_number_of_spawned_generators_is_an_error(count):
    """A planted number filled the memory."""
    generator = np.random.default_rng(1)
    generator.spawn(2)
    data = json.loads(saved(NumpyRandomState("x", generator, registry=None)))
    data["dict"]["spawned"] = count
    state = NumpyRandomState("x", np.random.default_rng(1), registry=None)
    with pytest.raises(errors.CheckpointCorruptedError, match="spawned is"):
        load(state, json.dumps(data).encode())


def test_a_save_of_too_many_spawned_generators_is_refused(monkeypatch):
    """A restart could not read the saved number."""
    monkeypatch.setattr(random_states, "_MOST_SPAWNED", 1)
    generator = np.random.default_rng(1)
    generator.spawn(2)
    with pytest.raises(errors.SaveError, match="spawned more than 1 generators"):
        saved(NumpyRandomState("x", generator, registry=None))


def test_many_spawned_generators_are_spawned_in_pieces():
    generator, restarted = np.random.default_rng(1), np.random.default_rng(1)
    generator.spawn(2_001)
    restarted.spawn(1)
    data = saved(NumpyRandomState("x", generator, registry=None))
    load(NumpyRandomState("x", restarted, registry=None), data)
    assert restarted.bit_generator.seed_seq.n_children_spawned == 2_001


def test_more_spawned_generators_than_saved_cause_a_warning(caplog):
    """The next spawned generators differed without a message."""
    generator, restarted = np.random.default_rng(1), np.random.default_rng(1)
    generator.spawn(1)
    restarted.spawn(2)
    data = saved(NumpyRandomState("x", generator, registry=None))
    load(NumpyRandomState("x", restarted, registry=None), data)
    assert "this process has already spawned 2" in caplog.text


def test_another_kind_of_generator_is_a_mismatch():
    data = saved(NumpyRandomState("x", np.random.default_rng(1), registry=None))
    philox = np.random.Generator(np.random.Philox(1))
    with pytest.raises(errors.CheckpointMismatchError, match=r"PCG64.*Philox"):
        load(NumpyRandomState("x", philox, registry=None), data)


@pytest.mark.parametrize(
    ("kind", "field"), [("MT19937", "pos"), ("Philox", "buffer_pos")]
)
@pytest.mark.parametrize("position", [-1, 10**6])
def test_positions_outside_of_a_generators_memory(kind, field, position):
    generator = np.random.Generator(getattr(np.random, kind)(5))
    state = NumpyRandomState("x", generator, registry=None)
    good = saved(state)
    text = good.decode()
    start = text.index(f'"{field}": ') + len(field) + 4
    end = min(text.find(c, start) for c in ",}" if text.find(c, start) > 0)
    bad = text[:start] + str(position) + text[end:]
    with pytest.raises(errors.CheckpointCorruptedError, match=field):
        load(state, bad.encode())
    load(state, good)
