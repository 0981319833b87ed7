"""Large tensors read by many threads are equal, bit for bit, to TensorFlow's."""

from __future__ import annotations

import gc
import os
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tensorflow

from tests.checkpoint.fakes import save  # noqa: E402
from tests.checkpoint.test_bundle_writer import (  # noqa: E402
    STRUCTURES,
    Holder,
    assert_restored,
    in_bytes,
    random_tensor,
    random_tensors,
    write,
)
from tests.fakes.storage import damage  # noqa: E402
from tfpreempt import errors  # noqa: E402
from tfpreempt.checkpoint.bundles import (  # noqa: E402
    bundle,
    bundle_writer,
    tensor_reader,
)
from tfpreempt.checkpoint.bundles.bundle_writer import data_file  # noqa: E402
from tfpreempt.checkpoint.directory.retention import RetentionPolicy  # noqa: E402
from tfpreempt.checkpoint.restore import opening  # noqa: E402
from tfpreempt.checkpoint.restore import restore as restore_  # noqa: E402
from tfpreempt.checkpoint.state.state import StateRegistry  # noqa: E402
from tfpreempt.checkpoint.tensors import bundle_reader  # noqa: E402
from tfpreempt.checkpoint.tensors.bundle_reader import reading_in_threads  # noqa: E402
from tfpreempt.core import private_api  # noqa: E402
from tfpreempt.storage import file_reading  # noqa: E402

FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
WHOLE = (tf.int8, tf.int16, tf.int32, tf.int64)
NATURAL = (tf.uint8, tf.uint16, tf.uint32, tf.uint64)
READ_BY_THREADS = {*FLOATS, *WHOLE, *NATURAL, tf.complex64, tf.complex128}


@pytest.fixture
def asked(monkeypatch):
    """Records the keys that TensorFlow reads; tfpreempt reads all dense tensors."""
    names = []
    inner = private_api.io_ops.restore_v2

    def restore_v2(prefix, tensor_names, *args, **kwargs):
        names.extend(tensor_names)
        return inner(prefix, tensor_names, *args, **kwargs)

    monkeypatch.setattr(private_api.io_ops, "restore_v2", restore_v2)
    monkeypatch.setattr(bundle_writer, "SMALL_BYTES", 0)
    monkeypatch.setattr(bundle_writer, "WORTH_BYTES", 0)
    monkeypatch.setattr(bundle_writer, "THREADS", 2)
    return names


def restore(checkpoint, prefix, ahead=None):
    with reading_in_threads(prefix, ahead):
        checkpoint.read(prefix).expect_partial()


@settings(max_examples=60)
@given(structure=STRUCTURES, threads=st.integers(0, 4), rng=st.randoms())
def test_any_structure(tmp_path_factory, structure, threads, rng):
    """Written by TensorFlow, or by some threads."""
    tensors = random_tensors(structure, rng)
    checkpoint = tf.train.Checkpoint(holder=Holder(tensors))
    prefix = str(tmp_path_factory.mktemp("any") / "ckpt")
    if threads:
        write(checkpoint, prefix, threads=threads)
    else:
        checkpoint.write(prefix)
    fresh = Holder(dict(tensors))
    with pytest.MonkeyPatch.context() as patch:
        names = asked.__wrapped__(patch)
        restore(tf.train.Checkpoint(holder=fresh), prefix)
    assert len(names) == sum(
        tensor.dtype not in READ_BY_THREADS for tensor in tensors.values()
    )
    assert_restored(fresh, tensors)
    for restored in fresh.tensors.values():
        if restored.dtype in READ_BY_THREADS and restored.shape.rank:
            assert np.asarray(restored).ctypes.data % 64 == 0  # as TensorFlow's own


@settings(max_examples=30)
@given(structure=STRUCTURES, rng=st.randoms())
def test_small_tensors_that_were_read_ahead(tmp_path_factory, structure, rng):
    """TensorFlow reads only tensors of other types, and empty tensors."""
    tensors = random_tensors(structure, rng)
    prefix = str(tmp_path_factory.mktemp("any") / "ckpt")
    write(tf.train.Checkpoint(holder=Holder(tensors)), prefix, threads=2)
    fresh = Holder(dict(tensors))
    small_bytes = bundle_writer.SMALL_BYTES
    with pytest.MonkeyPatch.context() as patch:
        names = asked.__wrapped__(patch)
        patch.setattr(bundle_writer, "SMALL_BYTES", small_bytes)
        ahead = bundle_reader.read_ahead(prefix)
        restore(tf.train.Checkpoint(holder=fresh), prefix, ahead)
    if ahead is not None:
        assert len(names) == sum(
            tensor.dtype not in READ_BY_THREADS or not in_bytes(tensor.numpy())
            for tensor in tensors.values()
        )
        assert not ahead.tensors
    assert_restored(fresh, tensors)


def test_a_small_tensor_keeps_no_large_memory():
    sizes = [8, 1 << 20, 8, 1 << 20, 100]
    memory = tensor_reader._allocate(sizes)
    assert [each.nbytes for each in memory] == sizes
    assert all(each.ctypes.data % 64 == 0 for each in memory)
    for size, each in zip(sizes, memory, strict=True):
        while isinstance(each.base, np.ndarray):
            each = each.base
        assert (each.nbytes <= 1 << 16) == (size < bundle_writer.SMALL_BYTES)


@pytest.mark.parametrize("threads", [2, 5])
def test_a_tensor_stored_in_slices(tmp_path, asked, rng, threads):
    value = random_tensor(tf.float32, [5000, 3, 2], rng)
    small = [tf.Variable([1.0, 2.0]) for _ in range(3)]
    prefix = str(tmp_path / "ckpt")
    write(tf.train.Checkpoint(v=tf.Variable(value), s=small), prefix, threads=threads)
    variable = tf.Variable(tf.zeros_like(value))
    restore(tf.train.Checkpoint(v=variable), prefix)
    assert asked == []
    assert in_bytes(variable.numpy()) == in_bytes(value.numpy())


@pytest.mark.parametrize("axis", [0, 1])
def test_slices_that_tensorflow_wrote(tmp_path, asked, axis):
    """Slices of rows are contiguous in memory; slices of columns TensorFlow joins."""
    whole = tf.reshape(tf.range(24.0), [4, 6])
    cuts = {0: ("0,1:-", "1,3:-"), 1: ("-:0,2", "-:2,4")}[axis]
    parts = tf.split(whole, {0: [1, 3], 1: [2, 4]}[axis], axis)
    slices = {f"4 6 {cut}": part for cut, part in zip(cuts, parts, strict=True)}
    checkpoint = tf.train.Checkpoint(holder=Holder({"whole": slices}))
    prefix = str(tmp_path / "ckpt")
    checkpoint.write(prefix)
    fresh = Holder({"whole": tf.zeros([4, 6])})
    restore(tf.train.Checkpoint(holder=fresh), prefix)
    assert len(asked) == axis
    assert in_bytes(fresh.tensors["whole"].numpy()) == in_bytes(whole.numpy())


def test_a_tensor_larger_than_a_thread_reads_at_once(tmp_path, rng):
    """With the limits of the package."""
    value = tf.constant(np.frombuffer(rng.randbytes((40 << 20) + 12), np.float32))
    checkpoint = tf.train.Checkpoint(large=tf.Variable(value), small=tf.Variable(1.0))
    prefix = str(tmp_path / "ckpt")
    checkpoint.write(prefix)
    checkpoint.large.assign(tf.zeros_like(value))
    restore(checkpoint, prefix)
    assert in_bytes(checkpoint.large.numpy()) == in_bytes(value.numpy())


def test_the_variable_owns_the_memory_that_was_read(tmp_path, asked):
    """Each trains on in its own memory, also where replicas got the same tensor."""
    cpus = tf.config.list_logical_devices("CPU")
    strategy = tf.distribute.MirroredStrategy([cpu.name for cpu in cpus])
    with strategy.scope():
        mirrored = tf.Variable([1.0, 2.0])
    checkpoint = tf.train.Checkpoint(m=mirrored, v=tf.Variable([1.0, 2.0]))
    prefix = str(tmp_path / "ckpt")
    checkpoint.write(prefix)
    restore(checkpoint, prefix)
    assert asked == []
    for value in (checkpoint.v, *mirrored.values):
        value.assign_add([1.0, 1.0])
        value.scatter_nd_update([[0]], [9.0])
        assert value.numpy().tolist() == [9.0, 3.0]
    restore(checkpoint, prefix)
    for value in (checkpoint.v, *mirrored.values):
        assert value.numpy().tolist() == [1.0, 2.0]


def test_another_type_is_tensorflows_to_refuse(tmp_path, asked):
    prefix = str(tmp_path / "ckpt")
    tf.train.Checkpoint(v=tf.Variable([1.0])).write(prefix)
    with pytest.raises(tf.errors.InvalidArgumentError):
        restore(tf.train.Checkpoint(v=tf.Variable([1], dtype=tf.int32)), prefix)


def test_other_files_and_later_restores_use_tensorflows_reader(tmp_path, asked):
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    checkpoint = tf.train.Checkpoint(v=tf.Variable([1.0]))
    for prefix in (one, other):
        checkpoint.write(prefix)
    with reading_in_threads(one):
        checkpoint.read(other)
        assert len(asked) == 1
        checkpoint.read(one)
        assert len(asked) == 1
    checkpoint.read(one)
    assert len(asked) == 2


def test_a_restore_on_another_thread_uses_tensorflows_reader(tmp_path, asked):
    """Which gives no tensor for the prefix, but text."""
    prefix = str(tmp_path / "ckpt")
    tf.train.Checkpoint(v=tf.Variable([1.0])).write(prefix)
    key = "v/.ATTRIBUTES/VARIABLE_VALUE"
    with reading_in_threads(prefix), ThreadPoolExecutor() as threads:
        ask = threads.submit(
            private_api.io_ops.restore_v2, prefix, [key], [""], [tf.float32]
        )
        assert ask.result()[0].numpy().tolist() == [1.0]
    assert asked == [key]


def test_an_error_of_the_programs_own_is_not_damage(tmp_path, asked):
    class Opens(Holder):
        def _restore_from_tensors(self, restored):
            raise FileNotFoundError("the program's own")

    holder = Opens({"v": tf.constant([1.0])})
    prefix = str(tmp_path / "ckpt")
    tf.train.Checkpoint(holder=holder).write(prefix)
    with pytest.raises(FileNotFoundError, match="the program's own"):
        restore(tf.train.Checkpoint(holder=holder), prefix)


def indexes_read(monkeypatch, checkpoint, prefix):
    """Counts reads of the index by tfpreempt while each tensor is read separately."""
    entries, calls = bundle.entries, []

    def counted(data):
        calls.append(data)
        return entries(data)

    with monkeypatch.context() as patch, reading_in_threads(prefix):
        patch.setattr(bundle, "entries", counted)
        for _ in range(3):
            checkpoint.read(prefix)
    return len(calls)


def test_the_index_is_read_once_at_most(tmp_path, asked, monkeypatch):
    checkpoint = tf.train.Checkpoint(v=tf.Variable([1.0]))
    prefix = str(tmp_path / "ckpt")
    checkpoint.write(prefix)
    assert indexes_read(monkeypatch, checkpoint, prefix) == 1
    monkeypatch.setattr(bundle_writer, "WORTH_BYTES", 1 << 25)
    assert indexes_read(monkeypatch, checkpoint, prefix) == 0


# --- damage --------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path, asked):
    """Writes a checkpoint in two files of tfpreempt, and then changes the variables."""
    variables = [tf.Variable(tf.fill([100], float(i))) for i in range(3)]
    checkpoint = tf.train.Checkpoint(variables=variables)
    prefix = str(tmp_path / "ckpt")
    write(checkpoint, prefix, threads=2)
    for variable in variables:
        variable.assign(tf.fill([100], -1.0))
    return checkpoint, prefix


def assert_nothing_is_assigned(checkpoint, prefix, match):
    with pytest.raises(errors.CheckpointCorruptedError, match=match):
        restore(checkpoint, prefix)
    for variable in checkpoint.variables:
        assert set(variable.numpy()) == {-1.0}


@pytest.mark.parametrize("shard", [1, 2])
def test_a_flipped_bit_anywhere_is_found(written, rng, shard):
    checkpoint, prefix = written
    with open(data_file(prefix, shard, 3), "r+b") as file:
        data = bytearray(file.read())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.seek(0)
        file.write(data)
    assert_nothing_is_assigned(checkpoint, prefix, "is corrupt: the checksum")


@pytest.mark.parametrize("shard", [1, 2])
def test_a_truncated_or_missing_file_is_found(written, rng, shard):
    checkpoint, prefix = written
    path = data_file(prefix, shard, 3)
    os.truncate(path, rng.randrange(os.path.getsize(path)))
    assert_nothing_is_assigned(checkpoint, prefix, "ends within a tensor")
    os.remove(path)
    assert_nothing_is_assigned(checkpoint, prefix, "could not be read")


# --- tensors that are read while a commit is verified ---------------------------------


class Run:
    """A checkpoint directory whose commits have tensors, text and slices."""

    def __init__(self, directory):
        self.variables = [tf.Variable(tf.zeros([100 + i])) for i in range(7)]
        text, flags = tf.Variable(["a" * 99]), tf.Variable([True] * 50)
        self.checkpoint = tf.train.Checkpoint(v=self.variables, t=text, f=flags)
        self.directory = opening.open_directory(
            self.checkpoint,
            directory,
            registry=StateRegistry(),
            policy=RetentionPolicy(max_to_keep=None),
        )
        self.directory.start()

    def assign(self, number):
        for i, variable in enumerate(self.variables):
            variable.assign(tf.fill([100 + i], float(number + i)))

    def save(self, number):
        self.assign(number)
        save(self.directory, number)
        self.assign(-100)

    @property
    def numbers(self):
        """Returns the numbers from which the values were made."""
        found = [set(each.numpy() - i) for i, each in enumerate(self.variables)]
        return set.union(*found)


@pytest.fixture
def run(tmp_path, asked):
    run = Run(tmp_path / "run")
    run.save(1)
    run.save(2)
    return run


@pytest.fixture
def opened(monkeypatch):
    """The data files that were opened, in the order of the reads."""
    paths, inner = [], file_reading.open_file

    def open_file(path, **kwargs):
        if ".data-" in path:
            paths.append(os.path.basename(path))
        return inner(path, **kwargs)

    monkeypatch.setattr(file_reading, "open_file", open_file)
    return paths


def test_a_commit_is_verified_and_restored_by_one_read(run, opened):
    newest = run.directory.newest()
    large = sorted(set(opened))
    assert len(large) == bundle_writer.THREADS  # TensorFlow's own file has the rest
    assert sorted(opened) == large
    run.directory.restore(newest)
    assert run.numbers == {2}
    assert sorted(opened) == large


@pytest.mark.parametrize("how", ["flip", "cut", "grow", "remove", "pipe", "directory"])
@pytest.mark.parametrize("place", range(4))
def test_damage_is_refused_as_by_a_verification(run, monkeypatch, how, place):
    """In each file, with the same message; the commit before is restored."""
    newest = run.directory.newest()
    names = ("ckpt.index", *(f"ckpt.data-0000{n}-of-00003" for n in range(3)))
    path = os.path.join(newest.path, names[place])
    if how == "flip":
        damage(path, offset=os.path.getsize(path) // 2)
    elif how == "cut":
        os.truncate(path, os.path.getsize(path) // 2)
    elif how == "grow":
        with open(path, "ab") as file:
            file.write(b"more")
    else:
        os.remove(path)
        {"remove": lambda _: None, "pipe": os.mkfifo, "directory": os.mkdir}[how](path)
    said, expected = [], []
    commit = run.directory.newest(said.append)
    with monkeypatch.context() as patch:
        patch.setattr(run.directory.contents, "read_ahead", lambda prefix: {})
        run.directory.newest(expected.append)
    assert said == expected != []
    run.directory.restore(commit)
    assert run.numbers == {1}


def test_verified_tensors_are_restored_even_if_the_files_change(run):
    newest = run.directory.newest()
    damage(os.path.join(newest.path, "ckpt.data-00001-of-00003"))
    run.directory.restore(newest)
    assert run.numbers == {2}


def test_tensors_of_another_commit_are_not_restored(run):
    """A worker may restore another commit than the last verified commit."""
    older, newest = restore_.find_candidates(run.directory.path)[::-1]
    run.directory.check(older)
    run.directory.restore(newest)
    assert run.numbers == {2}


@pytest.mark.parametrize("end", ["restore", "save", "damage", "free"])
def test_tensors_that_were_read_are_freed(run, monkeypatch, end):
    kept = []
    inner = bundle_reader.read_ahead

    def read_ahead(prefix):
        ahead = inner(prefix)
        kept.append(weakref.ref(next(iter(ahead.tensors.values()))[1]))
        return ahead

    monkeypatch.setattr(bundle_reader, "read_ahead", read_ahead)
    newest = run.directory.newest()
    assert kept[0]() is not None
    if end == "restore":
        run.directory.restore(newest)
    elif end == "save":
        run.save(3)
    elif end == "damage":
        damage(os.path.join(newest.path, "MANIFEST.json"))
        damage(os.path.join(newest.path, "ckpt.data-00000-of-00003"))
        with pytest.raises(errors.CheckpointCorruptedError):
            run.directory.check(newest)
    else:
        run.directory.contents.free_read_ahead()
    gc.collect()
    assert kept[0]() is None


def test_a_file_system_may_give_less_than_it_has(run, monkeypatch, rng):
    inner = os.preadv

    def preadv(descriptor, buffers, offset):
        some = buffers[: rng.randint(1, len(buffers))]
        last = some[-1][: rng.randint(1, some[-1].nbytes)]
        return inner(descriptor, [*some[:-1], last], offset)

    monkeypatch.setattr(os, "preadv", preadv)
    run.directory.restore(run.directory.newest())
    assert run.numbers == {2}
