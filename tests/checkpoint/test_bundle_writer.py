"""Large tensors beside TensorFlow's files: stock readers read both."""

from __future__ import annotations

import ctypes
import errno
import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tensorflow

from tensorflow.core.protobuf import tensor_bundle_pb2  # noqa: E402

from tests.checkpoint.fakes import capture_part  # noqa: E402
from tests.checkpoint.test_writer import Job, stock  # noqa: E402
from tests.fakes.storage import (  # noqa: E402
    FaultyFiles,
    SimulatedCrash,
    damage,
)
from tfpreempt import errors  # noqa: E402
from tfpreempt.checkpoint.bundles import (  # noqa: E402
    bundle,
    bundle_writer,
    tensor_copies,
)
from tfpreempt.checkpoint.bundles.tensor_copies import CopyMemory  # noqa: E402
from tfpreempt.checkpoint.directory.commit import CancellationToken  # noqa: E402
from tfpreempt.checkpoint.tensors import gather  # noqa: E402
from tfpreempt.core import private_api  # noqa: E402
from tfpreempt.storage import checksum  # noqa: E402
from tfpreempt.storage.files import LocalFiles  # noqa: E402


class Holder(private_api.trackable_base.Trackable):
    """Saves tensors of any kind unchanged."""

    def __init__(self, tensors):
        self.tensors = tensors

    def _serialize_to_tensors(self):
        return self.tensors

    def _restore_from_tensors(self, restored):
        self.tensors = restored


@pytest.fixture
def everything(monkeypatch):
    """Makes tfpreempt write every possible tensor, of any size."""
    monkeypatch.setattr(bundle_writer, "SMALL_BYTES", 0)
    monkeypatch.setattr(bundle_writer, "WORTH_BYTES", 0)
    monkeypatch.setattr(bundle_writer, "THREADS", 3)


def write_small(checkpoint, prefix, *, small_bytes=0):
    """Makes TensorFlow write all but the large tensors; returns the large tensors."""
    large = gather.LargeTensors(small_bytes=small_bytes, worth_bytes=0)
    with gather.reading(checkpoint, are_others=False, graph=None) as read:
        read.extract = large.extract
        checkpoint.write(prefix)
    return large.found


def write(checkpoint, prefix, *, threads=3, small_bytes=0):
    """Writes the state by both writers; returns the tensors that tfpreempt wrote."""
    checkpoint.write(prefix + "-stock")
    tensors = write_small(checkpoint, prefix, small_bytes=small_bytes)
    sums = bundle_writer.add(LocalFiles(), prefix, tensors, threads)
    for path, found in sums.items():
        assert checksum.of_file(path) == found
    return {tensor.name.split("/")[0] for tensor in tensors}


def assert_same(prefix):
    """Checks that stock readers find the values of TensorFlow's files, bit for bit."""
    bundle.check(prefix)
    ours, theirs = tf.train.load_checkpoint(prefix), prefix + "-stock"
    theirs = tf.train.load_checkpoint(theirs)
    kinds = theirs.get_variable_to_dtype_map()
    assert ours.get_variable_to_dtype_map() == kinds
    shapes = ours.get_variable_to_shape_map()
    assert dict(tf.train.list_variables(prefix)) == shapes
    # An iterator reads ahead between the two saves, so its state may have grown.
    for name, shape in theirs.get_variable_to_shape_map().items():
        assert kinds[name] == tf.variant or shapes[name] == shape
    for name, kind in kinds.items():
        if not kind.is_numpy_compatible or kind == tf.variant:
            continue
        assert in_bytes(ours.get_tensor(name)) == in_bytes(theirs.get_tensor(name)), (
            name
        )


def in_bytes(value):
    """Returns the bits of an array, or of NumPy's form of a scalar."""
    array = np.asarray(value)
    return array.tolist() if array.dtype == object else array.tobytes()


# --- any structure -------------------------------------------------------------------

FLOATS = [tf.float16, tf.float32, tf.float64, tf.bfloat16]
FLOATS += [tf.dtypes.experimental.float8_e5m2, tf.dtypes.experimental.float8_e4m3fn]
WHOLE = [tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32]
NUMBERS = [*FLOATS, *WHOLE, tf.uint64, tf.complex64, tf.complex128]
KINDS = [*NUMBERS, tf.bool, tf.string, tf.qint8, tf.quint8, tf.qint32]
SHAPES = st.lists(st.integers(0, 5), max_size=4)
NAMES = st.text("aZ09_- äß漢", min_size=1, max_size=12)  # TensorFlow loses "." and "/"
STRUCTURES = st.dictionaries(NAMES, st.tuples(st.sampled_from(KINDS), SHAPES))


def random_tensor(kind, shape, rng):
    """Returns random bits of the type, which may also be NaN."""
    count = int(np.prod(shape))
    if kind == tf.string:
        words = [rng.randbytes(rng.randrange(200)) for _ in range(count)]
        return tf.reshape(tf.constant(words, tf.string), shape)
    if kind == tf.bool:
        return tf.reshape(tf.constant([rng.random() < 0.5] * count, tf.bool), shape)
    data = np.frombuffer(rng.randbytes(count * kind.size), kind.as_numpy_dtype)
    if kind.is_quantized:
        plain = {tf.qint8: tf.int8, tf.quint8: tf.uint8, tf.qint32: tf.int32}[kind]
        data = np.frombuffer(data.tobytes(), plain.as_numpy_dtype)
        return tf.bitcast(tf.constant(data.reshape(shape), plain), kind)
    return tf.constant(data.reshape(shape), kind)


def random_tensors(structure, rng):
    return {
        name: random_tensor(kind, shape, rng)
        for name, (kind, shape) in structure.items()
    }


def assert_restored(holder, tensors):
    """Other tensors, of the same bits."""
    for name, tensor in tensors.items():
        restored = holder.tensors[name]
        assert restored is not tensor
        assert (restored.dtype, restored.shape) == (tensor.dtype, tensor.shape)
        assert in_bytes(restored.numpy()) == in_bytes(tensor.numpy())


@settings(max_examples=60)
@given(structure=STRUCTURES, threads=st.integers(1, 5), rng=st.randoms())
def test_any_structure(tmp_path_factory, structure, threads, rng):
    tensors = random_tensors(structure, rng)
    checkpoint = tf.train.Checkpoint(holder=Holder(tensors))
    prefix = str(tmp_path_factory.mktemp("any") / "ckpt")
    write(checkpoint, prefix, threads=threads, small_bytes=rng.choice([0, 0, 8]))
    assert_same(prefix)
    fresh = Holder(dict(tensors))
    tf.train.Checkpoint(holder=fresh).read(prefix).assert_consumed()
    assert_restored(fresh, tensors)


def test_thousands_of_small_variables(tmp_path):
    variables = {f"v{i}": tf.Variable(float(i)) for i in range(2500)}
    checkpoint = tf.train.Checkpoint(**variables)
    prefix = str(tmp_path / "ckpt")
    taken = write(checkpoint, prefix)
    assert set(variables) <= taken
    assert_same(prefix)


def test_tensorflow_writes_tensors_that_are_not_dense(tmp_path):
    """Strings, variants, slices, variables without a value, and quantized tensors."""
    sliced = {"whole": {"4 0,2": tf.constant([1, 2]), "4 2,2": tf.constant([3, 4])}}
    without_value = private_api.saveable_object.SaveSpec(
        lambda: None, "", "name", tf.float32, tf.zeros([]).device
    )
    checkpoint = tf.train.Checkpoint(
        data=iter(tf.data.Dataset.range(5)),
        plain=tf.Variable([1.0, 2.0]),
        sliced=Holder(sliced),
        string=tf.Variable("text"),
        without=Holder({"value": without_value}),
    )
    next(checkpoint.data)
    prefix = str(tmp_path / "ckpt")
    assert write(checkpoint, prefix) == {"plain"}
    assert_same(prefix)
    fresh = tf.train.Checkpoint(data=iter(tf.data.Dataset.range(5)))
    fresh.read(prefix).expect_partial()
    assert int(next(fresh.data)) == 1


def test_tensorflow_writes_values_on_another_machine(tmp_path, monkeypatch):
    """A machine's name may begin as another's does: `.../task:1` and `.../task:10`."""
    context = private_api.eager_context.Context
    for here in ("/job:worker/replica:0/task:0", "/job:localhost/replica:0/task:"):
        monkeypatch.setattr(context, "host_address_space", lambda self, here=here: here)
        checkpoint = tf.train.Checkpoint(plain=tf.Variable([1.0, 2.0]))
        assert write_small(checkpoint, str(tmp_path / "ckpt")) == []


@pytest.mark.parametrize("strategy", ["mirrored", "one device"])
def test_variables_of_strategies(tmp_path, strategy):
    devices = tf.distribute.MirroredStrategy(["CPU:0"])
    if strategy == "one device":
        devices = tf.distribute.OneDeviceStrategy("CPU:0")
    with devices.scope():
        variables = [tf.Variable(tf.random.normal([8, 8])) for _ in range(3)]
        total = tf.Variable(
            [1.0] * 8,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
    checkpoint = tf.train.Checkpoint(variables=variables, total=total)
    prefix = str(tmp_path / "ckpt")
    assert "variables" in write(checkpoint, prefix)
    assert_same(prefix)
    before = [variable.numpy() for variable in variables]
    for variable in variables:
        variable.assign(tf.zeros_like(variable))
    checkpoint.read(prefix).assert_consumed()
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_variables_of_keras_under_a_strategy(tmp_path):
    """TensorFlow wrote them: Keras 3 passes variables to the saver, not tensors."""
    keras = pytest.importorskip("keras")
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16)])
    checkpoint = tf.train.Checkpoint(model=model)
    prefix = str(tmp_path / "ckpt")
    assert write(checkpoint, prefix, small_bytes=16 * 4) == {"model"}
    assert_same(prefix)
    before = [in_bytes(variable.numpy()) for variable in model.variables]
    model.set_weights([np.zeros(each.shape) for each in model.variables])
    checkpoint.read(prefix).assert_existing_objects_matched()
    assert [in_bytes(variable.numpy()) for variable in model.variables] == before


def test_each_thread_has_about_as_much_to_write(tmp_path):
    sizes = [900, 10, 500, 20, 400, 300, 800, 5]
    variables = [tf.Variable(tf.zeros([size])) for size in sizes]
    checkpoint = tf.train.Checkpoint(variables=variables)
    write(checkpoint, str(tmp_path / "ckpt"), threads=3)
    assert_same(str(tmp_path / "ckpt"))
    paths = sorted(tmp_path.glob("ckpt.data-*-of-00004"))
    found = [path.stat().st_size for path in paths[1:]]
    assert len(found) == 3
    assert max(found) <= 1.1 * 4 * sum(sizes) / 3


@pytest.mark.parametrize("shape", [[3001], [5000, 2], [150, 3, 4, 5], [70, 0]])
@pytest.mark.parametrize("threads", [2, 3, 4, 5])
def test_a_tensor_that_is_nearly_everything_is_cut(tmp_path, shape, threads, rng):
    large = tf.Variable(random_tensor(tf.float32, shape, rng))
    small = [tf.Variable(random_tensor(tf.float32, [7, 3], rng)) for _ in range(3)]
    checkpoint = tf.train.Checkpoint(large=large, small=small)
    prefix = str(tmp_path / "ckpt")
    write(checkpoint, prefix, threads=threads)
    assert_same(prefix)
    if 0 not in shape:
        found = [path.stat().st_size for path in tmp_path.glob("ckpt.data-*-of-*")]
        assert sum(size > 2000 for size in found) >= threads
    before = in_bytes(large.numpy())
    large.assign(tf.zeros_like(large))
    checkpoint.read(prefix).assert_consumed()
    assert in_bytes(large.numpy()) == before


def test_a_cut_tensor_has_tensorflows_slice_format(tmp_path):
    """The same keys and entries, but for where the bytes are."""
    for rows, axes in ((9, 1), (100, 2), (70_000, 1), (20_000_000, 1)):
        half = rows // 2
        shape = [rows, *[1] * (axes - 1)]
        whole = tf.zeros(shape, tf.uint8)
        text = " ".join(map(str, shape))
        others = ":-" * (axes - 1)
        tf.raw_ops.SaveV2(
            prefix=str(tmp_path / "theirs"),
            tensor_names=["näme", "näme"],
            shape_and_slices=[
                f"{text} 0,{half}{others}",
                f"{text} {half},{rows - half}{others}",
            ],
            tensors=[whole[:half], whole[half:]],
        )
        theirs = entries_of(tmp_path / "theirs.index")
        empty = tf.train.Checkpoint()
        empty.write(str(tmp_path / "ours"))
        data = np.zeros(rows, np.uint8)
        tensor = bundle_writer.DenseTensor(
            name="näme", dtype=4, shape=tuple(shape), data=data, can_be_cut=True
        )
        bundle_writer.add(LocalFiles(), str(tmp_path / "ours"), [tensor], 2)
        ours = entries_of(tmp_path / "ours.index")
        assert theirs.keys() <= ours.keys()
        assert {key: ours[key] for key in theirs} == theirs


def entries_of(path):
    """Entries by key, without the header and where the bytes are."""
    found = {}
    for key, value in bundle.entries(path.read_bytes()):
        if key:
            entry = tensor_bundle_pb2.BundleEntryProto.FromString(value)
            entry.shard_id = entry.offset = 0
            found[key] = str(entry)
    return found


# --- a commit ------------------------------------------------------------------------


def test_a_commit_is_a_stock_checkpoint(tmp_path, everything):
    job = Job(tmp_path)
    for step in (3, 5, 8):
        job.save(step)
    assert stock(tmp_path) == 8.0
    assert Job(tmp_path).restore()[1] == 8.0
    names = sorted(name for name in os.listdir(tmp_path / "8") if "data" in name)
    assert len(names) == 4
    assert all(name.endswith("-of-00004") for name in names)


def test_every_byte_is_in_the_manifest(tmp_path, everything):
    commit = Job(tmp_path).save(3)
    manifest = Job(tmp_path).saver.newest().manifest
    for entry in manifest.files:
        path = os.path.join(commit.path, entry.name)
        assert checksum.of_file(path) == (entry.size, entry.crc32c)


def test_a_corrupt_tensor_is_found_by_us_and_by_tensorflow(tmp_path, everything):
    job = Job(tmp_path)
    job.save(3)
    commit = job.save(5)
    large = commit.path + "/ckpt.data-00001-of-00004"
    damage(large)
    problems = []
    assert Job(tmp_path).saver.newest(problems.append).step == 3
    assert "ckpt.data-00001-of-00004" in problems[0]
    with pytest.raises(tf.errors.OpError, match="Checksum does not match"):
        read_all(commit.path + "/ckpt")


def read_all(prefix):
    reader = tf.train.load_checkpoint(prefix)
    return [reader.get_tensor(name) for name in reader.get_variable_to_shape_map()]


def test_a_large_state_is_not_read_back(tmp_path):
    """Counts the bytes that this process reads during a commit."""
    job = Job(tmp_path)
    job.checkpoint.large = [tf.Variable(tf.ones([2**20])) for _ in range(16)]
    job.save(1)
    before = bytes_read()
    commit = job.save(2)
    assert commit.bytes > 64 << 20
    assert bytes_read() - before < 1 << 20


def bytes_read():
    """Returns the bytes of all read calls of this process, from any cache."""
    with open("/proc/self/io") as file:
        return int(file.readline().removeprefix("rchar: "))


def test_a_small_state_is_tensorflows_to_write(tmp_path):
    commit = Job(tmp_path).save(3)
    names = [name for name in os.listdir(commit.path) if "data" in name]
    assert names == ["ckpt.data-00000-of-00001"]


def test_options_are_tensorflows_to_follow(tmp_path, everything):
    called = []
    options = tf.train.CheckpointOptions(experimental_write_callbacks=[called.append])
    commit = Job(tmp_path).save(3, options=options)
    assert [os.path.basename(prefix) for prefix in called] == ["ckpt"]
    names = [name for name in os.listdir(commit.path) if "data" in name]
    assert names == ["ckpt.data-00000-of-00001"]


# --- faults --------------------------------------------------------------------------


def test_a_captured_state_does_not_change_during_an_asynchronous_save(
    tmp_path, everything
):
    """Every variable changes between the capture and the write, in each possible way.

    The value is assigned, a row is assigned, or the memory of the value is overwritten.
    """
    job = Job(tmp_path)
    job.checkpoint.table = tf.Variable(tf.ones([64, 8]))
    job.checkpoint.other = tf.Variable(tf.fill([1 << 23], 3.0))  # copied in pieces
    job.weight.assign([7.0, 7.5])
    shared = np.asarray(job.checkpoint.other.read_value())
    captured = capture_part(job.saver, 7, "run-7", CancellationToken())
    assert captured.tensors
    assert job.saver.newest() is None
    job.weight.assign([0.0, 0.0])
    job.checkpoint.table.scatter_nd_update([[0]], [[9.0] * 8])
    job.checkpoint.other.assign_add(tf.ones_like(job.checkpoint.other))
    ctypes.memset(shared.ctypes.data, 9, shared.nbytes)
    captured.write()
    captured.publish("save", [0])
    assert stock_values(tmp_path) == {"weight": [7.0, 7.5], "table": 1.0, "other": 3.0}


def stock_values(directory):
    """Returns the weight, and the uniform value of each large variable."""
    found = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(directory)))

    def read(name):
        return found.get_tensor(f"{name}/.ATTRIBUTES/VARIABLE_VALUE")

    throughout = {name: np.unique(read(name)) for name in ("table", "other")}
    values = {name: value.tolist() for name, value in throughout.items()}
    values = {
        name: value[0] if len(value) == 1 else value for name, value in values.items()
    }
    return {"weight": read("weight").tolist(), **values}


def test_unshared_memory_is_not_copied():
    """Such as the bytes of a tensor that was copied from a GPU."""
    data = np.arange(64, dtype=np.uint8)
    shared = bundle_writer.DenseTensor(
        name="x", dtype=4, shape=(64,), data=data, can_be_cut=True
    )
    own = shared._replace(is_shared=False)
    first, second = CopyMemory(is_kept=False).copied([shared, own], 2)
    assert not np.shares_memory(first.data, data)
    assert second.data is data
    assert first.data.tolist() == data.tolist()


@pytest.mark.parametrize("at_once", [1, 5, 8, 1 << 20])
def test_copies_use_the_memory_of_copies_of_the_same_size(at_once, monkeypatch):
    monkeypatch.setattr(tensor_copies, "_COPIED_AT_ONCE", at_once)
    whole = np.arange(30, dtype=np.uint8)
    tensors = [
        bundle_writer.DenseTensor(
            name=f"{part.size}", dtype=4, shape=part.shape, data=part, can_be_cut=True
        )
        for part in (whole[:8], whole[8:8], whole[8:21], whole[21:])
    ]
    memory = CopyMemory(is_kept=True)
    copies = memory.copied(tensors, 2)
    assert [each.data.tolist() for each in copies] == [
        each.data.tolist() for each in tensors
    ]
    whole += 1
    again = memory.copied(tensors, 2)
    assert np.shares_memory(again[0].data, copies[0].data)
    assert np.array_equal(np.concatenate([each.data for each in copies]), whole)
    [smaller] = memory.copied(tensors[:1], 2)
    assert not np.shares_memory(smaller.data, copies[0].data)
    assert np.array_equal(smaller.data, whole[:8])


def test_captured_tensors_are_written_by_another_thread(tmp_path, everything):
    job = Job(tmp_path)
    job.weight.assign([5.0, 5.5])
    captured = capture_part(job.saver, 5, "run-5", CancellationToken())

    def finish():
        captured.write()
        captured.publish("save", [0])

    thread = threading.Thread(target=finish)
    thread.start()
    thread.join(30.0)
    assert Job(tmp_path).restore()[1] == 5.0


def test_a_capture_that_is_given_up_leaves_no_files(tmp_path, everything):
    job = Job(tmp_path)
    capture_part(job.saver, 5, "run-5", CancellationToken()).discard()
    assert os.listdir(tmp_path) == [".tfpreempt-directory"]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after", "torn"])
def test_after_a_crash_anywhere_there_is_one_intact_commit(tmp_path, everything, when):
    """The order of operations in threads differs between saves."""
    index, is_over = 0, False
    while not is_over:
        directory = tmp_path / f"{when}-{index}"
        Job(directory).save(1)
        files = FaultyFiles(fail_at=index, when=when)
        job = Job(directory, files=files)
        try:
            job.save(2)
            is_over = True
        except SimulatedCrash:
            pass
        done = files.operations[: index + (when == "after")]
        is_marked = any(
            operation.name == "rename" and operation.path.endswith("COMMITTED")
            for operation in done
        )
        again = Job(directory)
        assert again.restore()[1] == (2.0 if is_marked else 1.0), done
        again.save(3)
        assert stock(directory) == 3.0
        index += 1
    assert index > 20
    written = {path for name, path in files.operations if name == "write"}
    assert any(".data-" in path for path in written)


@pytest.mark.parametrize("shard", [1, 2, 3])
def test_a_full_disk_in_one_thread_ends_the_others(tmp_path, everything, shard):
    class Full(LocalFiles):
        def write(self, path, data):
            if f"data-{shard:05d}" in path:
                raise OSError(errno.ENOSPC, "No space left on device", path)
            super().write(path, data)

    job = Job(tmp_path, files=Full())
    before = set(threading.enumerate())
    with pytest.raises(errors.SaveError, match="disk is full"):
        job.save(3)
    assert set(threading.enumerate()) <= before
    assert os.listdir(tmp_path) == [".tfpreempt-directory"]
    assert job.saver.newest() is None


def test_everything_is_synced_before_the_marker(tmp_path, everything):
    files = FaultyFiles()
    Job(tmp_path, files=files).save(3)
    names = [operation.path for operation in files.operations]
    marker = next(i for i, name in enumerate(names) if name.endswith("COMMITTED"))
    synced = {
        os.path.basename(operation.path)
        for operation in files.operations[:marker]
        if operation.name == "sync_file"
    }
    written = {name for name in os.listdir(tmp_path / "3") if name.startswith("ckpt")}
    assert len(written) == 5
    assert written <= synced


@pytest.mark.timeout(60)
def test_a_pipe_in_place_of_the_index_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "ckpt.index")
    with pytest.raises(OSError, match="Not a regular file"):
        bundle_writer.add(LocalFiles(str(tmp_path)), str(tmp_path / "ckpt"), [], 1)
