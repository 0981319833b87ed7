"""Tracked objects: variables are found without a read, iterators continue."""

from __future__ import annotations

import io

import pytest

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tensorflow

from tfpreempt.checkpoint.tensors import reader  # noqa: E402
from tfpreempt.checkpoint.tensors.iterator_state import IteratorState  # noqa: E402
from tfpreempt.checkpoint.tensors.per_replica import PerReplicaState  # noqa: E402
from tfpreempt.checkpoint.tensors.variables import attach, variable_shape  # noqa: E402


def test_nothing_to_save_without_on_read_variables():
    checkpoint = tf.train.Checkpoint(v=tf.Variable(1.0))
    assert not PerReplicaState(attach(checkpoint)).should_save()
    assert not IteratorState(attach(checkpoint)).should_save()


def test_iterators_continue_where_they_were():
    def iterator():
        return iter(tf.data.Dataset.range(20).shuffle(7, seed=3).batch(2))

    first = iterator()
    for _ in range(3):
        next(first)
    file = io.BytesIO()
    IteratorState(attach(tf.train.Checkpoint(data=first))).save(file)
    file.seek(0)
    expected = [list(batch.numpy()) for batch in first]
    second = iterator()
    IteratorState(attach(tf.train.Checkpoint(data=second))).load(file)
    assert [list(batch.numpy()) for batch in second] == expected


@pytest.fixture
def for_all_workers():
    """Returns a variable that only all workers together can read."""
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        return tf.Variable(
            [0.0],
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.NONE,
            trainable=False,
            name="layer/total",
        )


def test_a_shape_and_a_name_are_had_without_a_read(for_all_workers):
    assert variable_shape(for_all_workers) == (1,)
    assert reader.called(for_all_workers) == "layer/total"


def test_a_restored_variable_is_matched_without_a_read(for_all_workers, tmp_path):
    plain = tf.train.Checkpoint(it=tf.Variable([1.0]))
    prefix = plain.write(str(tmp_path / "plain"))
    status = tf.train.Checkpoint().read(prefix)
    reader.follow_later_restores(status, prefix)
    status._checkpoint.object_by_proto_id[1] = for_all_workers


def kind(*shape, dtype="float32"):
    return tf.TensorSpec(shape, dtype)


def test_a_structure_that_differs_is_described():
    here = kind(2, None)
    assert reader.problem(here, kind(2, 5)) is None
    wrong = reader.problem(here, kind(3, 5))
    assert wrong == "the model has shape (2, None), the checkpoint (3, 5)"
    assert "has type float32" in reader.problem(here, kind(2, 5, dtype="int8"))
    assert "has no value" in reader.problem(here, None)
    text = str(reader.mismatch("p", [wrong] * 31, ["old/kernel"]))
    assert wrong in text
    assert "and 11 more" in text
    assert "old/kernel" in text
