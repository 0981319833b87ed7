"""RNGs, per-replica values and iterators come back bit for bit, without pickles."""

from __future__ import annotations

import io
import json
import random

import numpy as np
import pytest

from tfpreempt import errors

pytestmark = pytest.mark.tensorflow
tf = pytest.importorskip("tensorflow")

from tensorflow.python.ops import stateful_random_ops  # noqa: E402

from tfpreempt.checkpoint import structure, tf_state  # noqa: E402
from tfpreempt.checkpoint.encoding import decode, encode  # noqa: E402
from tfpreempt.checkpoint.iterator_state import IteratorState  # noqa: E402
from tfpreempt.checkpoint.per_replica import PerReplicaState  # noqa: E402


def saved(state):
    file = io.BytesIO()
    state.save(file)
    return file.getvalue()


def load(state, data):
    state.load(io.BytesIO(data))


def draw():
    numbers = [random.random(), random.gauss(0, 1), np.random.rand()]
    numbers += [np.random.randn(), float(tf.random.uniform([]))]
    return numbers


def test_random_generators_go_on_where_they_were():
    tf.random.set_seed(3)
    random.gauss(0, 1)  # leaves a second value in reserve, as randn does
    np.random.randn()
    draw()
    data = saved(tf_state.RandomState())
    expected = [draw() for _ in range(3)]
    random.seed(0)
    np.random.seed(0)
    tf.random.set_seed(99)
    load(tf_state.RandomState(), data)
    assert [draw() for _ in range(3)] == expected
    assert stateful_random_ops.global_generator is None  # not made on the way
    assert b"pickle" not in data


def test_the_global_generator_is_saved_if_there_is_one(monkeypatch):
    monkeypatch.setattr(stateful_random_ops, "global_generator", None)
    tf.random.set_global_generator(tf.random.Generator.from_seed(5))
    tf.random.get_global_generator().uniform([3])
    data = saved(tf_state.RandomState())
    expected = tf.random.get_global_generator().uniform([3]).numpy()
    load(tf_state.RandomState(), data)
    again = tf.random.get_global_generator().uniform([3]).numpy()
    np.testing.assert_array_equal(again, expected)
    monkeypatch.setattr(stateful_random_ops, "global_generator", None)
    load(tf_state.RandomState(), data)  # a fresh program that has none yet
    again = tf.random.get_global_generator().uniform([3]).numpy()
    np.testing.assert_array_equal(again, expected)


def test_another_bit_generator_of_numpy():
    before = np.random.get_state(legacy=False)
    assert str(decode(encode(before))) == str(before)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"python": 1}', b"\xff\x00"])
def test_a_damaged_random_state_is_a_clear_error(data):
    with pytest.raises(errors.CheckpointDamagedError, match=r"'tfpreempt\.random'"):
        load(tf_state.RandomState(), data)


def hostile_generators():
    """States of NumPy's global generator that would make it read elsewhere."""
    good = np.random.RandomState(1).get_state(legacy=False)
    for position in (-1, 625, 10**6, 1.5, True, None):
        yield {**good, "state": {**good["state"], "pos": position}}
    yield {**good, "state": [good["state"]]}
    yield ("MT19937", good["state"]["key"], 10**6)
    yield ["MT19937", good["state"]["key"], 10**6]


def hostile_records():
    yield from map(encode, hostile_generators())
    good = encode(np.random.RandomState(1).get_state(legacy=False))
    fields = {"array": "00" * 2504, "dtype": "|V2504", "shape": [1]}
    yield {"dict": {**good["dict"], "state": fields}}


@pytest.mark.parametrize("generator", list(hostile_records()))
def test_a_position_outside_of_the_generators_memory(generator):
    record = json.loads(saved(tf_state.RandomState()))
    record["numpy"] = generator
    before = (random.getstate(), str(np.random.get_state()))
    with pytest.raises(errors.CheckpointDamagedError):
        load(tf_state.RandomState(), json.dumps(record).encode())
    assert (random.getstate(), str(np.random.get_state())) == before


def test_nothing_to_save_without_on_read_variables():
    checkpoint = tf.train.Checkpoint(v=tf.Variable(1.0))
    assert not PerReplicaState(checkpoint).is_wanted()
    assert not IteratorState(checkpoint).is_wanted()


def test_iterators_go_on_where_they_were():
    def iterator():
        return iter(tf.data.Dataset.range(20).shuffle(7, seed=3).batch(2))

    first = iterator()
    for _ in range(3):
        next(first)
    data = saved(IteratorState(tf.train.Checkpoint(data=first)))
    expected = [list(batch.numpy()) for batch in first]
    second = iterator()
    load(IteratorState(tf.train.Checkpoint(data=second)), data)
    assert [list(batch.numpy()) for batch in second] == expected


@pytest.fixture
def strategy():
    return tf.distribute.MirroredStrategy(["CPU:0"])


@pytest.fixture
def for_all_workers(strategy):
    """A variable that only all workers together can read; alone, it is an error."""
    with strategy.scope():
        return tf.Variable(
            [0.0],
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.NONE,
            trainable=False,
            name="layer/total",
        )


def test_a_shape_and_a_name_are_had_without_a_read(for_all_workers):
    assert tf_state.variable_shape(for_all_workers) == (1,)
    assert structure.called(for_all_workers) == "layer/total"


def test_a_restored_variable_is_matched_without_a_read(for_all_workers, tmp_path):
    plain = tf.train.Checkpoint(it=tf.Variable([1.0]))
    prefix = plain.write(str(tmp_path / "plain"))
    status = tf.train.Checkpoint().read(prefix)
    tf_state.restore_while_traced(status, prefix)
    status._checkpoint.object_by_proto_id[1] = for_all_workers


def test_the_generator_of_keras_is_made_outside_of_a_scope(strategy):
    # In one of many workers it would be made by a broadcast, at its own moment.
    keras = pytest.importorskip("keras")
    state = keras.src.backend.common.global_state
    name = keras.src.random.seed_generator.GLOBAL_SEED_GENERATOR
    keras.random.uniform([1])
    data = saved(tf_state.RandomState())
    expected = keras.random.uniform([3]).numpy()
    state.set_global_attribute(name, None)  # a fresh program
    with strategy.scope():
        load(tf_state.RandomState(), data)
    made = state.get_global_attribute(name)
    assert tf_state.distributed(made.state) is None
    np.testing.assert_array_equal(keras.random.uniform([3]).numpy(), expected)
