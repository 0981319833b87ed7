"""Per-replica values on two logical devices; run by test_per_replica.py.

In a process of its own: the number of logical devices is fixed at TensorFlow's start.
"""

from __future__ import annotations

import io

import numpy as np
import pytest
import tensorflow as tf

from tests.checkpoint.fakes import save
from tfpreempt.checkpoint.restore.opening import open_directory
from tfpreempt.checkpoint.state.state import StateRegistry
from tfpreempt.checkpoint.tensors.per_replica import PerReplicaState
from tfpreempt.checkpoint.tensors.variables import attach


def saved(state):
    file = io.BytesIO()
    state.save(file)
    return file.getvalue()


def load(state, data):
    state.load(io.BytesIO(data))


@pytest.fixture(scope="module")
def strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def on_read(strategy, dtype, aggregation=tf.VariableAggregation.SUM):
    with strategy.scope():
        return tf.Variable(
            tf.zeros([4], dtype),
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=aggregation,
            trainable=False,
        )


RAW = {
    "float32": np.array([0x7FC00123, 0xFF800000, 0x80000000, 1], np.uint32),
    "float64": np.array([0x7FF8000000000BAD, 1 << 63, 3, 4], np.uint64),
    "float16": np.array([0x7E01, 0x8000, 1, 0x3555], np.uint16),
    "bfloat16": np.array([0x7FC1, 0x8000, 1, 0x3EAB], np.uint16),
    "int32": np.array([1, 2, 3, 1 << 31], np.uint32),
    "int64": np.array([1, 1 << 63, 3, 4], np.uint64),
    "bool": np.array([1, 0, 1, 0], np.uint8),
}


@pytest.mark.parametrize("name", list(RAW))
def test_per_replica_values_are_bit_exact(strategy, name):
    variable = on_read(strategy, tf.as_dtype(name), tf.VariableAggregation.NONE)
    dtype = tf.as_dtype(name).as_numpy_dtype
    values = [RAW[name].view(dtype), RAW[name][::-1].copy().view(dtype)]
    for component, value in zip(variable.values, values, strict=True):
        component.assign(tf.constant(value))
    before = [component.numpy().tobytes() for component in variable.values]
    assert before[0] == values[0].tobytes()
    state = PerReplicaState(attach(tf.train.Checkpoint(deep=[variable])))
    data = saved(state)
    for component in variable.values:
        component.assign(tf.zeros([4], tf.as_dtype(name)))
    load(state, data)
    assert [c.numpy().tobytes() for c in variable.values] == before


def test_parts_survive_a_save_that_reduces(strategy, tmp_path):
    total = on_read(strategy, tf.float32)
    for number, component in enumerate(total.values):
        component.assign([1.67 - number * 0.72] * 4)
    before = [component.numpy().tobytes() for component in total.values]
    saver = open_directory(
        tf.train.Checkpoint(total=total), tmp_path, registry=StateRegistry()
    )
    save(saver, 1)
    for component in total.values:
        component.assign([0.0] * 4)
    saver.restore(saver.newest())
    assert [component.numpy().tobytes() for component in total.values] == before
    plain = tf.Variable([0.0] * 4)
    path = tf.train.latest_checkpoint(str(tmp_path))
    tf.train.Checkpoint(total=plain).restore(path).expect_partial()
    assert float(plain[0]) == np.float32(1.67) + np.float32(0.95)


def test_batch_statistics_of_keras_3_are_each_replicas_own(strategy, tmp_path):
    """Keras assigns a value in each replica; TensorFlow saves only the first value."""
    import keras

    with strategy.scope():
        layer = keras.layers.BatchNormalization()
        layer.build((None, 3))

    @tf.function
    def step():
        def on_replica():
            context = tf.distribute.get_replica_context()
            replica = tf.cast(context.replica_id_in_sync_group, tf.float32)
            layer(tf.fill([2, 3], 1.0 + replica), training=True)

        strategy.run(on_replica)

    step()
    means = strategy.experimental_local_results(layer.moving_mean.value)
    before = [part.numpy().tobytes() for part in means]
    assert before[0] != before[1]
    saver = open_directory(
        tf.train.Checkpoint(layer=layer), tmp_path, registry=StateRegistry()
    )
    save(saver, 1)
    step()
    saver.restore(saver.newest())
    assert [part.numpy().tobytes() for part in means] == before


def test_accumulated_gradients_of_keras_3_are_each_replicas_own(strategy, tmp_path):
    """A replica adds its own gradients, and TensorFlow saves only the first sums."""
    import keras

    with strategy.scope():
        weight = keras.Variable([1.0, 2.0])
        sgd = keras.optimizers.SGD(gradient_accumulation_steps=4)
        optimizer = keras.optimizers.LossScaleOptimizer(sgd)
        optimizer.build([weight])

    def step():
        def on_replica():
            context = tf.distribute.get_replica_context()
            replica = tf.cast(context.replica_id_in_sync_group, tf.float32)
            optimizer.apply([tf.fill([2], 1.0 + replica)], [weight])

        strategy.run(on_replica)  # eagerly, or compiled by XLA for GPUs

    step()
    [sums] = sgd._accumulated_gradients
    parts = strategy.experimental_local_results(sums.value)
    before = [part.numpy().tobytes() for part in parts]
    assert before[0] != before[1]
    saver = open_directory(
        tf.train.Checkpoint(optimizer=optimizer), tmp_path, registry=StateRegistry()
    )
    save(saver, 1)
    step()
    saver.restore(saver.newest())
    assert [part.numpy().tobytes() for part in parts] == before


def test_an_attribute_of_the_program_with_a_name_of_keras_is_no_list(tmp_path):
    class Owner(tf.Module):
        def __init__(self):
            super().__init__()
            self._accumulated_gradients = None

    checkpoint = tf.train.Checkpoint(owner=Owner(), weight=tf.Variable(1.0))
    save(open_directory(checkpoint, tmp_path, registry=StateRegistry()), 1)


SUM, MEAN = tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN
NONE = tf.VariableAggregation.ONLY_FIRST_REPLICA


def lonely(dtype, aggregation):
    """A variable of one replica."""
    return on_read(tf.distribute.MirroredStrategy(["CPU:0"]), dtype, aggregation)


def values(variable):
    return [part.numpy().tolist() for part in variable.values]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [(SUM, [4.0, 6.0, 8.0, 10.0]), (MEAN, [2.0, 3.0, 4.0, 5.0]), (NONE, [1, 2, 3, 4])],
)
def test_fewer_replicas_hold_what_reads_the_same(strategy, aggregation, expected):
    two = on_read(strategy, tf.float32, aggregation)
    for part, value in zip(two.values, ([1, 2, 3, 4], [3, 4, 5, 6]), strict=True):
        part.assign(value)
    one = lonely(tf.float32, aggregation)
    data = saved(PerReplicaState(attach(tf.train.Checkpoint(v=two))))
    load(PerReplicaState(attach(tf.train.Checkpoint(v=one))), data)
    assert values(one) == [expected]


def test_more_replicas_have_shares_that_add_up(strategy):
    one = lonely(tf.int64, SUM)
    one.values[0].assign([1, 2, 3, 5])
    two = on_read(strategy, tf.int64)
    data = saved(PerReplicaState(attach(tf.train.Checkpoint(v=one))))
    load(PerReplicaState(attach(tf.train.Checkpoint(v=two))), data)
    assert values(two) == [[1, 1, 2, 3], [0, 1, 1, 2]]


def test_as_many_replicas_of_other_workers_have_the_same_values(strategy):
    """Two workers with one replica each become one worker with two, and back."""
    ones = [lonely(tf.float32, SUM) for _ in range(2)]
    for number, one in enumerate(ones):
        one.values[0].assign([number, 0.1, number / 3, -0.0])
    files = [saved(PerReplicaState(attach(tf.train.Checkpoint(v=one)))) for one in ones]
    two = on_read(strategy, tf.float32)
    state = PerReplicaState(attach(tf.train.Checkpoint(v=two)))
    state.reshard([io.BytesIO(file) for file in files], 0, 1)
    assert values(two) == [value for one in ones for value in values(one)]
    again = [lonely(tf.float32, SUM) for _ in range(2)]
    for number, one in enumerate(again):
        state_of_one = PerReplicaState(attach(tf.train.Checkpoint(v=one)))
        state_of_one.reshard([io.BytesIO(saved(state))], number, 2)
    assert [values(one) for one in again] == [values(one) for one in ones]
