"""The ready-made States of TensorFlow's own things."""

from __future__ import annotations

import io

import pytest
import tensorflow as tf

from tests.checkpoint.test_ready_made_states import HOSTILE, load, parts, saved
from tfpreempt import errors
from tfpreempt.states import DatasetIteratorState, TensorFlowRandomState

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(120)]


def pipeline(count=40):
    return (
        tf.data.Dataset.range(count).shuffle(16, seed=3).map(lambda x: x * 2).batch(3)
    )


def rest(iterator):
    return [batch.numpy().tolist() for batch in iterator]


@pytest.mark.parametrize("taken_before", [0, 1, 6])
def test_an_iterator_resumes_exactly(taken_before):
    iterator = iter(pipeline())
    state = DatasetIteratorState("data", iterator, registry=None)
    assert state.per_worker
    for _ in range(4):
        next(iterator)
    data = saved(state)
    expected = rest(iterator)
    assert len(expected) == 10
    fresh = DatasetIteratorState("data", iter(pipeline()), registry=None)
    for _ in range(taken_before):
        next(fresh.iterator)
    load(fresh, data)
    assert rest(fresh.iterator) == expected


def test_an_iterator_at_its_beginning_and_its_end():
    state = DatasetIteratorState("data", iter(pipeline()), registry=None)
    start = saved(state)
    everything = rest(state.iterator)
    end = saved(state)
    assert rest(load(state, start).iterator) == everything
    state.iterator = iter(pipeline())
    assert rest(load(state, end).iterator) == []


def test_iterators_without_a_position():
    with pytest.raises(errors.ConfigurationError, match=r"iter\(dataset\)"):
        DatasetIteratorState("data", pipeline(), registry=None)

    def numbers():
        yield from range(5)

    generated = tf.data.Dataset.from_generator(numbers, output_types=tf.int64)
    for data in (generated, generated.shuffle(2)):
        with pytest.raises(errors.ConfigurationError, match=r"'data'.*generator"):
            DatasetIteratorState("data", iter(data), registry=None)
    state = DatasetIteratorState("data", iter(pipeline()), registry=None)
    state.iterator = iter(generated)
    next(state.iterator)
    with pytest.raises(errors.SaveError, match=r"'data'.*from_generator"):
        saved(state)


def test_another_pipeline_is_a_mismatch():
    data = saved(DatasetIteratorState("data", iter(pipeline()), registry=None))
    other = tf.data.Dataset.range(40).batch(3).shuffle(2).prefetch(1)
    with pytest.raises(errors.CheckpointMismatchError, match="another pipeline"):
        load(DatasetIteratorState("data", iter(other), registry=None), data)


@pytest.mark.parametrize(
    "data",
    [
        *HOSTILE,
        parts({"kind": "tf.data"}),
        parts({"kind": "else"}, b"x"),
        parts({"kind": "tf.data"}, b"no proto"),
        parts({"kind": "tf.data"}, bytes(tf.io.serialize_tensor([1, 2]).numpy())),
    ],
)
def test_hostile_positions(data):
    state = DatasetIteratorState("data", iter(pipeline()), registry=None)
    with pytest.raises(errors.CheckpointCorruptedError):
        load(state, data)


# --- random generators ---------------------------------------------------------------


def test_a_generator():
    generator = tf.random.Generator.from_seed(5, alg="philox")
    state = TensorFlowRandomState("own", generator, registry=None)
    generator.normal([3])
    data = saved(state)
    expected = generator.normal([5]).numpy().tolist()
    fresh = tf.random.Generator.from_seed(6, alg="philox")
    load(TensorFlowRandomState("own", fresh, registry=None), data)
    assert fresh.normal([5]).numpy().tolist() == expected


def test_another_algorithm_is_a_mismatch():
    philox = tf.random.Generator.from_seed(5, alg="philox")
    threefry = tf.random.Generator.from_seed(5, alg="threefry")
    data = saved(TensorFlowRandomState("x", philox, registry=None))
    with pytest.raises(errors.CheckpointMismatchError, match="algorithm"):
        load(TensorFlowRandomState("x", threefry, registry=None), data)


def test_the_global_seed():
    tf.random.set_seed(11)
    state = TensorFlowRandomState(registry=None)
    tf.random.uniform([2])
    data = saved(state)
    expected = [tf.random.uniform([2]).numpy().tolist() for _ in range(3)]
    tf.random.set_seed(12)
    load(state, data)
    assert [tf.random.uniform([2]).numpy().tolist() for _ in range(3)] == expected


@pytest.mark.parametrize("data", [*HOSTILE, b"{}", b'{"algorithm": 1, "states": []}'])
def test_hostile_generators(data):
    generator = tf.random.Generator.from_seed(5, alg="philox")
    for own in (None, generator):
        state = TensorFlowRandomState("x", own, registry=None)
        with pytest.raises(errors.CheckpointCorruptedError):
            state.load(io.BytesIO(data))
