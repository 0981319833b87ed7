"""Plain variables are assigned directly; the values are those of TensorFlow's read."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tensorflow

from tensorflow.python.distribute import sharded_variable  # noqa: E402
from tensorflow.python.ops import resource_variable_ops  # noqa: E402

from tests.checkpoint.test_bundle_writer import Holder, in_bytes  # noqa: E402
from tfpreempt import errors  # noqa: E402
from tfpreempt.checkpoint.bundles import bundle_writer  # noqa: E402
from tfpreempt.checkpoint.tensors import reader  # noqa: E402
from tfpreempt.checkpoint.tensors.reader import assigning_directly  # noqa: E402
from tfpreempt.checkpoint.tensors.variables import local_parts, walk  # noqa: E402
from tfpreempt.core import private_api  # noqa: E402

PLAIN = (
    *(tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128),
    *(tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32),
    *(tf.uint64, tf.bool, tf.string, tf.qint8, tf.quint8, tf.qint32),
)


def filled(number, dtype, shape=(2, 3)):
    """Returns a tensor; each number gives other values."""
    if dtype is tf.string:
        return tf.constant(f"{number}" * 20, shape=shape)
    kind = dtype.as_numpy_dtype
    is_quantized = dtype.is_quantized
    array = np.full(shape, number % 2 if dtype is tf.bool else number)
    return tf.constant(array.astype(np.int32 if is_quantized else kind), dtype)


def of_every_type(number):
    return [tf.Variable(filled(number, dtype)) for dtype in PLAIN]


def of_every_shape(number):
    shapes = [(), (0,), (1,), (5, 0, 2), (3, 1, 2), (40, 40)]
    fixed = [tf.Variable(filled(number, tf.float32, shape)) for shape in shapes]
    any_length = tf.Variable(filled(number, tf.float32, (number, 2)), shape=[None, 2])
    any_rank = tf.Variable(
        filled(number, tf.float32, (number,)), shape=tf.TensorShape(None)
    )
    return [*fixed, any_length, any_rank]


def shared(number):
    """A variable with two names, and one in objects of the program."""
    module = tf.Module()
    module.kernel = tf.Variable([float(number)])
    return {"one": module.kernel, "two": module, "three": [module.kernel]}


def in_shards(number):
    parts = [tf.Variable([float(number), 2.0]), tf.Variable([number + 3.0])]
    return [sharded_variable.ShardedVariable(parts, name="sharded")]


class Doubled(resource_variable_ops.ResourceVariable):
    """A variable of the program's own class, which restores another value."""

    def _restore_from_tensors(self, restored):
        return super()._restore_from_tensors(
            {key: 2 * value for key, value in restored.items()}
        )


def of_the_program(number):
    return [Doubled([float(number)]), Holder({"held": tf.constant([number])})]


def mirrored(number):
    cpus = [cpu.name for cpu in tf.config.list_logical_devices("CPU")]
    with tf.distribute.MirroredStrategy(cpus).scope():
        return [
            tf.Variable([float(number)]),
            tf.Variable(
                [float(number)], aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
            ),
            tf.Variable(
                [float(number)],
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.MEAN,
            ),
        ]


def of_keras(number):
    keras = pytest.importorskip("keras")
    keras.utils.set_random_seed(number)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1, dtype="mixed_float16"),
        ]
    )
    model.compile(optimizer="adam", loss="mse")
    model.optimizer.build(model.trainable_variables)
    model.optimizer.iterations.assign(number)
    return {"model": model, "optimizer": model.optimizer}


def with_slots(number):
    """Returns an optimizer whose slots TensorFlow creates, and its variable."""
    legacy = pytest.importorskip("tf_keras").optimizers.legacy
    optimizer, variable = legacy.Adam(0.1 * number), tf.Variable([float(number)])
    if number == 1:
        optimizer.minimize(lambda: variable * number, [variable])
    return {"variable": variable, "optimizer": optimizer}


# The number of objects that TensorFlow still restores, of each kind.
KINDS = {
    of_every_type: 0,
    of_every_shape: 0,
    shared: 0,
    in_shards: 2,
    of_the_program: 2,
    mirrored: 1,
    of_keras: 0,
    with_slots: 2,  # and its slots, within the search
}


def tracked(**objects):
    """A checkpoint with a counter of saves, as a handler makes one."""
    checkpoint = tf.train.Checkpoint(**objects)
    _ = checkpoint.save_counter  # made as it is asked for
    return checkpoint


def values(checkpoint):
    """Returns the bytes of all local variables, and the value of a `Holder`."""
    found = {}
    for path, obj in walk(checkpoint):
        parts = getattr(obj, "variables", ()) if "ShardedV" in repr(type(obj)) else ()
        for number, part in enumerate((*local_parts(obj), *parts)):
            found[path, number] = in_bytes(part.read_value().numpy())
        if isinstance(obj, Holder):
            found[path] = [in_bytes(each.numpy()) for each in obj.tensors.values()]
    return found


@pytest.fixture
def by_tensorflow(monkeypatch):
    """Returns the objects that TensorFlow restores itself."""
    found = []
    convert = private_api.saveable_object_util.SaveableCompatibilityConverter

    def count(obj, saveables):
        found.append(obj)
        return convert(obj, saveables)

    monkeypatch.setattr(
        private_api.saveable_object_util, "SaveableCompatibilityConverter", count
    )
    return found


@pytest.mark.parametrize("worth_bytes", [0, 1 << 30], ids=["by threads", "by one op"])
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_values_are_those_of_tensorflow(
    tmp_path, monkeypatch, by_tensorflow, make, worth_bytes
):
    monkeypatch.setattr(bundle_writer, "SMALL_BYTES", 0)
    monkeypatch.setattr(bundle_writer, "WORTH_BYTES", worth_bytes)
    prefix = tracked(objects=make(1)).write(str(tmp_path / "ckpt"))
    stock, ours = (tracked(objects=make(2)) for _ in range(2))
    before = values(ours)
    stock.read(prefix).expect_partial()
    by_tensorflow.clear()
    reader.restore(ours, prefix, None, True)
    assert len(by_tensorflow) == KINDS[make]
    found, expected = values(ours), values(stock)
    assert {path: found[path] for path in expected} == expected
    assert found != before


def test_a_second_restore_assigns_again(tmp_path):
    checkpoint = tracked(objects=of_every_type(1))
    prefixes = [checkpoint.write(str(tmp_path / "one"))]
    for variable in checkpoint.objects:
        variable.assign(filled(2, variable.dtype))
    prefixes.append(checkpoint.write(str(tmp_path / "two")))
    two = values(checkpoint)
    for prefix in prefixes:
        reader.restore(checkpoint, prefix, None, True)
    assert values(checkpoint) == two


def test_variables_that_are_made_later_have_their_values(tmp_path):
    def grown(number):
        checkpoint = tracked(first=tf.Variable([float(number)]))
        yield checkpoint
        checkpoint.later = shared(number)
        checkpoint.last = tf.Variable([float(number)])
        yield checkpoint

    *_, saved = grown(1)
    prefix = saved.write(str(tmp_path / "ckpt"))
    restored = grown(2)
    left = reader.restore(next(restored), prefix, None, True)
    assert len(left()) == 2
    assert values(next(restored)) == values(saved)
    assert left() == []


def test_a_value_that_the_program_has_read_stays_as_it_is(tmp_path):
    checkpoint = tracked(v=tf.Variable([1.0, 2.0]))
    prefix = checkpoint.write(str(tmp_path / "ckpt"))
    reader.restore(checkpoint, prefix, None, True)
    held = checkpoint.v.read_value()
    checkpoint.v.assign_add([1.0, 1.0])
    reader.restore(checkpoint, prefix, None, True)
    assert held.numpy().tolist() == checkpoint.v.numpy().tolist() == [1.0, 2.0]


class Derived(Holder):
    """An object of the program that computes a value with a variable."""

    def __init__(self, variable):
        super().__init__({"raw": tf.constant(2.0)})
        self.variable = variable
        self.product = 0.0

    def _restore_from_tensors(self, restored):
        super()._restore_from_tensors(restored)
        self.product = float(self.tensors["raw"] * self.variable)


def test_an_object_that_uses_a_variable_finds_the_restored_value(tmp_path):
    variable = tf.Variable(7.0)
    prefix = tracked(a=variable, o=Derived(variable)).write(str(tmp_path / "ckpt"))
    variable = tf.Variable(1.0)
    restored = Derived(variable)
    reader.restore(tracked(a=variable, o=restored), prefix, None, True)
    assert restored.product == 14.0


def test_an_iterator_that_uses_a_variable_finds_the_restored_value(tmp_path):
    def make(length):
        variable = tf.Variable(length, dtype=tf.int64)
        data = tf.data.Dataset.range(5).flat_map(
            lambda _: tf.data.Dataset.range(variable.read_value())
        )
        options = tf.data.Options()
        ignore = tf.data.experimental.ExternalStatePolicy.IGNORE
        options.experimental_external_state_policy = ignore
        return tracked(a=variable, data=iter(data.with_options(options)))

    saved = make(8)
    for _ in range(3):
        next(saved.data)
    prefix = saved.write(str(tmp_path / "ckpt"))
    restored = make(1)
    reader.restore(restored, prefix, None, True)
    batches = [[int(next(each.data)) for _ in range(7)] for each in (saved, restored)]
    assert batches == [[3, 4, 5, 6, 7, 0, 1]] * 2


def test_slots_of_an_old_optimizer_are_not_assigned_ahead_of_a_corrupt_tensor(
    tmp_path, monkeypatch
):
    """TensorFlow restores each slot while it searches for other objects."""

    def make(number, has_slots):
        optimizer = tf.compat.v1.train.AdamOptimizer(0.1)
        weights = tf.Variable([number] * 10)
        if has_slots:
            optimizer.minimize(lambda: tf.reduce_sum(weights**2), var_list=[weights])
        deep = tf.Module()
        deep.deeper = tf.Module()
        deep.deeper.last = tf.Variable([number] * 10)
        first = tf.Variable(number)
        return tracked(a=first, w=weights, optimizer=optimizer, z=deep)

    prefix = make(1.0, True).write(str(tmp_path / "ckpt"))
    inner = private_api.io_ops.restore_v2

    def fail_on_last(*args, **kwargs):
        names = kwargs["tensor_names"] if "tensor_names" in kwargs else args[1]
        if any("last" in each for each in map(str, np.asarray(names).reshape(-1))):
            raise tf.errors.DataLossError(None, None, "a bad sector")
        return inner(*args, **kwargs)

    monkeypatch.setattr(private_api.io_ops, "restore_v2", fail_on_last)
    restored = make(2.0, False)
    with pytest.raises(errors.CheckpointCorruptedError, match="a bad sector"):
        reader.restore(restored, prefix, None, True)
    assert float(restored.a) == 2.0
    assert restored.w.numpy().tolist() == [2.0] * 10


def test_nothing_is_assigned_if_another_object_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(bundle_writer, "WORTH_BYTES", 1 << 30)
    plain, sharded = tf.Variable([1.0]), in_shards(1)
    prefix = tracked(a=plain, b=sharded).write(str(tmp_path / "ckpt"))
    plain.assign([2.0])
    inner = private_api.io_ops.restore_v2

    def fail_on_slices(path, names, slices, *args, **kwargs):
        if any(slices):
            raise tf.errors.DataLossError(None, None, "a bad sector")
        return inner(path, names, slices, *args, **kwargs)

    monkeypatch.setattr(private_api.io_ops, "restore_v2", fail_on_slices)
    with pytest.raises(errors.CheckpointCorruptedError, match="a bad sector"):
        reader.restore(tracked(a=plain, b=sharded), prefix, None, True)
    assert plain.numpy().tolist() == [2.0]


def test_other_files_and_other_threads_are_restored_by_tensorflow(
    tmp_path, by_tensorflow
):
    checkpoint = tf.train.Checkpoint(v=tf.Variable([1.0]))
    one, other = (checkpoint.write(str(tmp_path / name)) for name in ("one", "other"))
    by_tensorflow.clear()
    read = functools.partial(checkpoint.read, one)
    with assigning_directly(one), ThreadPoolExecutor() as threads:
        read()
        assert not by_tensorflow
        checkpoint.read(other)
        threads.submit(read).result()
        assert len(by_tensorflow) == 2
    read()
    assert len(by_tensorflow) == 3
