"""Each of two workers writes a share of the common state; the chief commits them."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import pathlib
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tensorflow

from tests.checkpoint.fakes import capture_part, cluster, write_part  # noqa: E402
from tests.fakes.storage import (  # noqa: E402
    FaultyFiles,
    FaultyObjectStore,
    SimulatedCrash,
    damage,
)
from tfpreempt import errors  # noqa: E402
from tfpreempt.checkpoint.bundles import bundle_writer  # noqa: E402
from tfpreempt.checkpoint.bundles.partitioning import (  # noqa: E402
    DenseTensor,
    TensorSlice,
    partition,
)
from tfpreempt.checkpoint.directory import layout  # noqa: E402
from tfpreempt.checkpoint.directory.commit import CancellationToken  # noqa: E402
from tfpreempt.checkpoint.mirror.shard_transfer import ShardTransfer  # noqa: E402
from tfpreempt.checkpoint.restore import opening  # noqa: E402
from tfpreempt.checkpoint.state.state import StateRegistry  # noqa: E402
from tfpreempt.checkpoint.tensors import (  # noqa: E402
    tensor_contents,
    variables,
)
from tfpreempt.storage.files import LocalFiles  # noqa: E402

MANY = [(7, 3), (40, 5), (1,), (), (300,), (2, 2, 2), (64, 8), (90, 4)]
HUGE = [(3000, 4), (5, 2)]


@pytest.fixture(autouse=True)
def everything(monkeypatch):
    """Makes every tensor count as large; variables named `mirrored` are replicated."""
    monkeypatch.setattr(bundle_writer, "SMALL_BYTES", 1)
    monkeypatch.setattr(bundle_writer, "WORTH_BYTES", 1)
    monkeypatch.setattr(bundle_writer, "THREADS", 2)
    monkeypatch.setattr(tensor_contents, "is_replicated", is_mirrored)
    monkeypatch.setattr(
        "tfpreempt.checkpoint.tensors.gather.distributed", lambda each: each
    )


def is_mirrored(obj, workers):
    return isinstance(obj, tf.Variable) and obj.name.startswith("mirrored")


class Worker:
    """One worker's program: variables of the given shapes, and its saver."""

    def __init__(self, directory, index, shapes=MANY, world=2, files=None, **more):
        self.index = index
        self.variables = [
            tf.Variable(tf.zeros(shape), name=f"mirrored-{n}")
            for n, shape in enumerate(shapes)
        ]
        self.own = tf.Variable(tf.fill([50], float(index)), name="own")
        self.checkpoint = tf.train.Checkpoint(variables=self.variables, own=self.own)
        self.saver = opening.open_directory(
            self.checkpoint,
            str(directory),
            cluster=cluster(index, world),
            registry=StateRegistry(),
            files=files,
            **more,
        )
        if index == 0:
            self.saver.start()

    def train(self, step):
        for number, variable in enumerate(self.variables):
            rng = np.random.default_rng([step, number])
            variable.assign(rng.random(variable.shape, np.float32))

    def stage(self, step):
        return write_part(self.saver, step, f"run-{step}")

    def values(self):
        return [variable.numpy().tobytes() for variable in self.variables]


class Job:
    """All workers, which train equally and save together."""

    def __init__(self, directory, shapes=MANY, world=2, files=None, **more):
        self.directory = directory
        self.shapes = shapes
        files = files or {}
        self.workers = [
            Worker(directory, i, shapes, world, files.get(i), **more)
            for i in range(world)
        ]

    def train(self, step):
        for worker in self.workers:
            worker.train(step)

    def save(self, step, done=None):
        self.train(step)
        [chief, *others] = self.workers
        for worker in others:
            worker.stage(step)
        done = range(len(self.workers)) if done is None else done
        return chief.stage(step).publish("save", list(done))

    def check(self, step):
        """Checks that stock TensorFlow reads this step from the newest commit."""
        candidate = self.workers[0].saver.newest()
        assert candidate.step == step
        variables = [tf.Variable(tf.zeros(shape)) for shape in self.shapes]
        own = tf.Variable(tf.zeros([50]))
        fresh = tf.train.Checkpoint(variables=variables, own=own)
        fresh.restore(
            candidate.prefix
        ).assert_existing_objects_matched().expect_partial()
        self.workers[0].train(step)
        found = [variable.numpy().tobytes() for variable in variables]
        assert found == self.workers[0].values()
        assert own.numpy().tolist() == [0.0] * 50  # the chief's

    def data_files(self, step):
        found = self.directory.glob(f"{step}/ckpt.data-*")
        return {path.name: path.stat().st_size for path in sorted(found)}

    def left_over(self):
        """Returns the files that do not belong to commits."""
        return sorted(
            name
            for name in os.listdir(self.directory)
            if not name.isdecimal() and name not in ("checkpoint", layout.TOKEN)
        )


# --- the deal ------------------------------------------------------------------------


def tensor(name, shape, can_be_cut=True):
    size = 4 * int(np.prod(shape))
    data = np.zeros(size, np.uint8)
    return DenseTensor(
        name=name, dtype=1, shape=shape, data=data, can_be_cut=can_be_cut
    )


SIZES = st.lists(st.integers(1 << 14, 1 << 22), min_size=1, max_size=80)


@settings(max_examples=60)
@given(SIZES, st.integers(1, 16))
def test_shares_are_even_and_hold_each_row_once(sizes, count):
    tensors = [tensor(f"{n}", (size >> 8, 64)) for n, size in enumerate(sizes)]
    shares = partition([TensorSlice(tensor=each) for each in tensors], count)
    assert len(shares) == count
    held = [sum(each.data.nbytes for each in share) for share in shares]
    assert sum(held) == sum(each.data.nbytes for each in tensors)
    assert max(held) <= 1.1 * min(held) + 2 * 256  # by a row
    for each in tensors:
        slices = [part for share in shares for part in share if part.tensor is each]
        ranges = [range(each.shape[0])[part.start :][: part.rows] for part in slices]
        ranges.sort(key=lambda rows: rows.start)
        ends = [rows.stop for rows in ranges]
        assert [rows.start for rows in ranges] == [0, *ends[:-1]]
        assert ends[-1] == each.shape[0]


@pytest.mark.parametrize(
    "shapes", [[(1 << 22,)], [(1 << 16,)] * 63, [(1000, 1000)] * 8]
)
@pytest.mark.parametrize("count", [2, 3, 8])
def test_one_huge_tensor_and_many_are_dealt_alike(shapes, count):
    tensors = [tensor(str(n), shape) for n, shape in enumerate(shapes)]
    shares = partition([TensorSlice(tensor=each) for each in tensors], count)
    held = [sum(each.data.nbytes for each in share) for share in shares]
    assert max(held) <= 1.1 * min(held)


def test_few_tensors_are_cut():
    tensors = [TensorSlice(tensor=tensor(str(n), (1000,))) for n in range(16)]
    shares = partition(tensors, 4)
    assert all(each.rows is None for share in shares for each in share)


def test_a_tensor_that_cannot_be_cut_stays_whole():
    whole = tensor("whole", (4000,), can_be_cut=False)
    shares = partition(
        [TensorSlice(tensor=whole), TensorSlice(tensor=tensor("b", (10,)))], 2
    )
    assert [[each.rows for each in share] for share in shares] == [[None], [None]]


def test_shares_with_uncuttable_tensors_are_evened_out():
    """Three workers, and one tensor of half precision that is most of the model."""
    whole = tensor("whole", (3 << 18,), can_be_cut=False)
    shares = partition(
        [TensorSlice(tensor=whole), TensorSlice(tensor=tensor("b", (1 << 18,)))], 3
    )
    held = [sum(each.data.nbytes for each in share) for share in shares]
    assert held == [3 << 20, 1 << 19, 1 << 19]


def test_the_next_largest_slice_is_cut_if_the_largest_cannot_be():
    dealt = [
        tensor("first", (1000,), can_be_cut=False),
        tensor("second", (950,), can_be_cut=False),
        tensor("third", (900,)),  # assigned to the worker with the second tensor
    ]
    shares = partition([TensorSlice(tensor=each) for each in dealt], 2)
    assert [sum(each.data.nbytes for each in share) for share in shares] == [5700, 5700]
    assert [each.rows for share in shares for each in share] == [None, 425, None, 475]


# --- what all workers hold -----------------------------------------------------------


def test_variables_equal_on_all_workers_are_divided():
    keras = pytest.importorskip("keras")
    alone = tf.distribute.MultiWorkerMirroredStrategy()  # of one worker
    first_only = tf.VariableAggregation.ONLY_FIRST_REPLICA
    on_read = tf.VariableSynchronization.ON_READ
    with alone.scope():
        layer = keras.layers.Dense(3)
        layer.build((None, 2))
        optimizer = keras.optimizers.Adam()
        optimizer.build(layer.trainable_variables)
        mean = keras.metrics.Mean()
        weights = tf.Variable([1.0])
        counter = tf.Variable(1, aggregation=first_only)
        total = tf.Variable(
            1.0,
            synchronization=on_read,
            aggregation=tf.VariableAggregation.SUM,
            trainable=False,
        )
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        local = tf.Variable([1.0])

    def held(*objects, workers=1):
        return [variables.is_replicated(each, workers) for each in objects]

    assert all(held(weights, layer.kernel, *optimizer.variables[2:]))
    assert not any(held(counter, total, mean.total, optimizer.iterations))
    assert not any(held(local, tf.Variable([1.0]), layer, None))
    assert held(weights, workers=2) == [False]  # each worker trains separately


# --- a save --------------------------------------------------------------------------


@pytest.mark.parametrize("shapes", [MANY, HUGE], ids=["many", "one huge"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_commit_of_all_workers_is_a_stock_checkpoint(tmp_path, shapes, world):
    job = Job(tmp_path, shapes, world)
    for step in (1, 2):
        job.save(step)
    job.check(2)
    assert job.left_over() == []
    candidate = job.workers[0].saver.newest()
    for worker in job.workers:
        worker.train(7)
        worker.saver.restore(candidate)
    expected = Worker(tmp_path, 1, shapes, world)
    expected.train(2)
    assert all(worker.values() == expected.values() for worker in job.workers)


@pytest.mark.parametrize("shapes", [[(300, 100)] * 30, HUGE], ids=["many", "one huge"])
def test_one_copy_is_written_in_shares_of_equal_size(tmp_path, shapes):
    job = Job(tmp_path, shapes)
    job.train(1)
    [chief, other] = job.workers
    staged = [other.stage(1), chief.stage(1)]
    shares = [sum(part.size for part in each.parts) for each in staged]
    assert max(shares) <= 1.1 * min(shares)
    staged[1].publish("save", [0, 1])
    state = sum(len(value) for value in [*chief.values(), chief.own.numpy().tobytes()])
    files = job.data_files(1)
    small = files.pop(min(files))  # TensorFlow's: the object graph
    assert len(files) == 4
    assert sum(files.values()) == state + 8  # the number of saves
    assert small < 3000


def test_every_file_is_in_the_manifest_with_its_sum(tmp_path):
    job = Job(tmp_path)
    path = job.save(1).path
    manifest = json.loads((tmp_path / "1" / "MANIFEST.json").read_text())
    named = {entry["name"] for entry in manifest["files"]}
    data = job.data_files(1)
    assert set(data) <= named
    last = max(data)
    damage(os.path.join(path, last))
    assert job.workers[0].saver.newest() is None


def test_a_worker_reads_no_more_than_its_share(tmp_path):
    """From a GPU that is a copy."""
    job = Job(tmp_path, [(300, 100)] * 30, 3)
    job.train(1)
    for worker in job.workers[1:]:
        captured = capture_part(worker.saver, 1, "run-1", None)
        read = [each for each in captured.tensors if each.data.strides == (1,)]
        assert len(captured.tensors) == 30
        assert len(read) == 10
        captured.write()
    chief = job.workers[0]
    chief.stage(1).publish("save", [0, 1, 2])
    job.check(1)


def test_the_duration_of_a_share_is_reported_with_the_save(tmp_path, monkeypatch):
    job = Job(tmp_path)
    assert all(worker.stage(1).share_seconds > 0.0 for worker in job.workers[::-1])
    monkeypatch.setattr(bundle_writer, "WORTH_BYTES", 1 << 20)
    assert all(worker.stage(2).share_seconds == 0.0 for worker in job.workers[::-1])


# --- shares that are not used --------------------------------------------------------


def test_the_chief_writes_the_share_of_a_silent_worker(tmp_path):
    job = Job(tmp_path)
    job.save(1)
    job.save(2, done=[0])
    job.check(2)
    assert job.left_over() == []
    assert json.loads((tmp_path / "2" / "MANIFEST.json").read_text())["workers"] == [0]


def unusable(folder, kind):
    path = os.path.join(folder, "part.json")
    if kind == "no description":
        os.remove(path)
    elif kind == "half a description":
        os.truncate(path, os.path.getsize(path) // 2)
    elif kind == "no data":
        os.remove(os.path.join(folder, "1"))
    elif kind == "half the data":
        os.truncate(os.path.join(folder, "1"), 10)
    elif kind == "too deep":
        pathlib.Path(path).write_text("[" * 100_000)
    else:
        told = json.loads(pathlib.Path(path).read_text())
        if kind == "other rows":
            told["files"].pop()
        elif kind == "too few sums":
            told["files"][0]["sums"].pop()
        elif kind == "nonsense":
            told = ["nonsense"]
        elif kind == "no number":
            told["files"][0]["name"] = float("inf")
        elif kind == "another place":
            told["files"][0]["name"] = "../0000/0"
        else:
            told[kind] = 17
        pathlib.Path(path).write_text(json.dumps(told))


@pytest.mark.parametrize(
    "kind",
    [
        *("no description", "half a description", "no data", "half the data"),
        *("other rows", "nonsense", "another place", "step", "num_workers", "tensors"),
        *("too few sums", "files", "too deep", "no number"),
    ],
)
def test_the_chief_writes_a_share_that_does_not_fit(tmp_path, caplog, kind):
    job = Job(tmp_path)
    job.train(1)
    [chief, other] = job.workers
    staged = other.stage(1)
    unusable(layout.parts_directory(staged.staging, 1), kind)
    with caplog.at_level(logging.WARNING):
        chief.stage(1).publish("save", [0, 1])
    assert "that worker 1 wrote for step 1" in caplog.text
    job.check(1)
    assert job.left_over() == []


def test_workers_that_have_drifted_apart_are_not_mixed(tmp_path, caplog):
    job = Job(tmp_path, [(5000,), (100, 40), (60, 60)])
    job.train(3)
    [chief, other] = job.workers
    other.variables[1].assign_add(tf.fill([100, 40], 1e-6))
    other.stage(3)
    with caplog.at_level(logging.WARNING):
        chief.stage(3).publish("save", [0, 1])
    [warning] = caplog.messages
    assert "worker(s) [1]" in warning
    assert "'variables/1/.ATTRIBUTES/VARIABLE_VALUE' has another value" in warning
    job.check(3)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("row", [0, 1234, 2999])
def test_one_number_that_differs_on_a_worker_is_in_no_commit(
    tmp_path, caplog, world, row
):
    """As in a table of which each worker has read different rows."""
    job = Job(tmp_path, [(3000, 4), (100, 40)], world)
    job.train(3)
    [chief, *others] = job.workers
    for other in others:
        other.variables[0].scatter_nd_update([[row, 2]], [other.index + 7.0])
        other.stage(3)
    with caplog.at_level(logging.WARNING):
        chief.stage(3).publish("save", range(world))
    job.check(3)
    assert len(caplog.messages) <= 1  # the row may be in the chief's own share


def test_the_chief_writes_a_tensor_that_differed_before(tmp_path, caplog):
    """A variable that each worker sets by itself is reported once."""
    job = Job(tmp_path, [(300, 100)] * 8)
    [chief, other] = job.workers
    shared = len(chief.variables) - 1
    with caplog.at_level(logging.WARNING):
        for step in range(1, 5):
            job.train(step)
            for number in range(shared):
                other.variables[number].assign_add(tf.ones([300, 100]))
            other.stage(step)
            staged = chief.stage(step)
            written = sum(part.size for part in staged.parts)
            staged.publish("save", [0, 1])
            job.check(step)
    assert len(caplog.messages) == 1
    assert "From now on" in caplog.text
    assert written >= shared * 300 * 100 * 4  # at once, not once the others are done
    assert job.left_over() == []


def test_a_data_file_of_which_only_some_is_wanted_is_a_stock_checkpoint(tmp_path):
    """Only a part of a data file belongs to the commit."""
    job = Job(tmp_path, [(40, 40)] * 12)
    job.train(1)
    [chief, other] = job.workers
    for variable in other.variables[::3]:
        variable.assign(tf.zeros([40, 40]))
    other.stage(1)
    chief.stage(1).publish("save", [0, 1])
    job.check(1)
    job.save(2)
    job.check(2)
    candidate = chief.saver.newest()
    fresh = Worker(tmp_path, 0, [(40, 40)] * 12)
    fresh.saver.restore(candidate)
    assert fresh.values() == chief.values()


def test_a_share_that_cannot_be_moved_is_written_by_the_chief(tmp_path, caplog):
    """The share was valid, and is unreachable a moment later."""

    class OutOfReach(FaultyFiles):
        def rename(self, source, target):
            if "parts/0001" in source:
                raise OSError(errno.ESTALE, "Stale file handle")
            super().rename(source, target)

    job = Job(tmp_path, files={0: OutOfReach()})
    with caplog.at_level(logging.WARNING):
        job.save(1)
    assert "Stale file handle" in caplog.text
    job.check(1)
    assert job.left_over() == []


def test_a_worker_with_another_model_writes_nothing_into_the_commit(tmp_path, caplog):
    job = Job(tmp_path)
    job.train(1)
    Worker(tmp_path, 1, [*MANY, (80, 80)]).stage(1)
    [chief, _] = job.workers
    with caplog.at_level(logging.WARNING):
        chief.stage(1).publish("save", [0, 1])
    assert "its tensors" in caplog.text
    job.check(1)


def test_a_late_worker_changes_no_file_of_a_commit(tmp_path):
    """The worker was frozen during its write, and the others continued without it."""
    job = Job(tmp_path)
    job.train(2)
    [chief, other] = job.workers
    captured = capture_part(other.saver, 2, "run-2", None)
    folder = layout.parts_directory(captured.staging, 1)
    os.makedirs(folder)
    with open(os.path.join(folder, "0"), "wb") as under_way:
        under_way.write(b"begun")
        chief.stage(2).publish("save", [0])
        under_way.write(b"and ended")
    captured.write()
    job.check(2)
    assert chief.saver.newest().step == 2
    Job(tmp_path).save(3)  # a start removes its leftovers
    assert job.left_over() == []


def test_a_worker_that_is_ahead_keeps_its_share_of_the_next_save(tmp_path):
    """The other workers do not wait until the chief has committed a save."""
    job = Job(tmp_path)
    job.train(1)
    [chief, other] = job.workers
    captured = capture_part(chief.saver, 1, "run-1", None)
    other.stage(1)
    job.train(2)
    ahead = other.stage(2)
    captured.write()
    captured.publish("save", [0, 1])
    assert os.path.isdir(layout.parts_directory(ahead.staging, 1))
    chief.stage(2).publish("save", [0, 1])
    job.check(2)
    assert job.left_over() == []


# --- saves that are the chief's alone ------------------------------------------------


def parts_of(worker, step, **kwargs):
    staged = write_part(worker.saver, step, f"run-{step}", **kwargs)
    return os.path.isdir(staged.staging + layout.PARTS_SUFFIX)


def test_a_variable_with_an_open_dimension_is_dealt_out(tmp_path):
    job = Job(tmp_path)
    for worker in job.workers:
        worker.checkpoint.open = tf.Variable(
            tf.ones([60, 3]), shape=[None, 3], name="mirrored-open"
        )
    job.train(1)
    [chief, other] = job.workers
    staged = [other.stage(1), chief.stage(1)]
    assert all(each.is_dealt for each in staged)
    assert staged[1].publish("save", [0, 1]).step == 1
    job.check(1)


def test_a_small_state_is_the_chiefs(tmp_path, monkeypatch):
    monkeypatch.setattr(bundle_writer, "WORTH_BYTES", 1 << 20)
    assert not parts_of(Worker(tmp_path, 1), 1)
    assert not parts_of(Worker(tmp_path, 0), 1)


def test_options_are_tensorflows_to_follow(tmp_path):
    options = tf.train.CheckpointOptions()
    assert not parts_of(Worker(tmp_path, 1), 1, options=options)


def test_the_chief_alone_writes_asynchronous_saves(tmp_path):
    [chief, other] = Job(tmp_path).workers
    captured = [
        capture_part(each.saver, 1, "run-1", CancellationToken())
        for each in (other, chief)
    ]
    assert not any(each.is_dealt for each in captured)
    assert captured[0].tensors == ()  # no superfluous copy


def test_workers_with_disks_of_their_own_write_no_share(tmp_path):
    exchange = ShardTransfer(FaultyObjectStore(), 1, [0], LocalFiles(str(tmp_path)))
    assert not parts_of(Worker(tmp_path, 1, exchange=exchange), 1)


# --- crashes -------------------------------------------------------------------------


def stop_at(tmp_path, victim, index, when="before", error=None):
    """Step 2 over step 1, with a fault at one operation of a worker.

    Returns:
        The job after a restart, and the operations of the victim up to there; None
        where all of them were done.
    """
    directory = tmp_path / f"{victim}-{when}-{index}"
    shutil.copytree(tmp_path / "base", directory)
    files = FaultyFiles(fail_at=index, when=when, error=error)
    job = Job(directory, files={victim: files})
    [chief, other] = job.workers
    job.train(2)
    is_over = False
    done = [0]
    try:
        try:
            other.stage(2)
            done.append(1)
        except (SimulatedCrash, errors.SaveError):
            pass  # its tombstone, or its word, tells the chief
        chief.stage(2).publish("save", done)
        is_over = True
    except (SimulatedCrash, errors.SaveError):
        pass
    operations = files.operations[: index + (when == "after")]
    return job, is_over, operations if len(files.operations) > index else None


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("when", ["before", "after", "torn"])
def test_after_a_crash_anywhere_there_is_one_intact_commit(tmp_path, victim, when):
    """The order of operations in threads differs between saves."""
    Job(tmp_path / "base").save(1)
    index = 0
    while True:
        job, is_over, done = stop_at(tmp_path, victim, index, when)
        if done is None:
            break
        is_marked = any(
            each.name == "rename" and each.path.endswith("COMMITTED") for each in done
        )
        if victim == 1:
            assert is_over, done  # the chief commits alone
        job.check(2 if is_over or is_marked else 1)
        again = Job(job.directory)
        again.save(3)
        again.check(3)
        assert again.left_over() == [], done
        shutil.rmtree(job.directory)
        index += 1
    assert index > (25 if victim == 0 else 6)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_full_disk_anywhere_is_a_clear_error_or_a_commit(tmp_path, victim):
    Job(tmp_path / "base").save(1)
    index = 0
    while True:
        full = OSError(errno.ENOSPC, "No space left on device")
        job, is_over, done = stop_at(tmp_path, victim, index, error=full)
        if done is None:
            break
        if victim == 1:
            assert is_over, done
        step = job.workers[0].saver.newest().step
        assert step == 2 or not is_over
        job.check(step)
        shutil.rmtree(job.directory)
        index += 1
    assert index > 5


class NoPlace(FaultyFiles):
    """A disk that takes no more data files from a worker."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, path, pieces):
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "I/O error"),
        OSError(errno.EDQUOT, "Quota"),
        MemoryError(),
        RuntimeError("can't start new thread"),
    ],
    ids=["EIO", "EDQUOT", "no memory", "no thread"],
)
def test_a_share_that_cannot_be_written_costs_the_worker_nothing_else(
    tmp_path, caplog, error
):
    """The worker's generators and positions in the data are in the commit."""
    job = Job(tmp_path, files={1: NoPlace(error)})
    with caplog.at_level(logging.WARNING):
        job.save(1)
    assert (
        "cannot write this worker's share (a part of the tensors) of step 1"
        in caplog.text
    )
    job.check(1)
    assert (tmp_path / "1" / "worker-0001").is_dir()
    told = json.loads((tmp_path / "1" / "MANIFEST.json").read_text())
    assert told["workers"] == [0, 1]
    assert job.left_over() == []


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no memory to copy it"),
        tf.errors.ResourceExhaustedError(None, None, "no memory to copy it"),
    ],
    ids=["NumPy's", "TensorFlow's"],
)
def test_an_unreadable_share_does_not_fail_the_save(
    tmp_path, caplog, monkeypatch, error
):
    """For example, a share on a GPU."""

    def replicated(*arguments, **options):
        raise error

    monkeypatch.setattr("tfpreempt.checkpoint.tensors.gather.replicated", replicated)
    job = Job(tmp_path)
    with caplog.at_level(logging.WARNING):
        job.save(1)
    assert "no memory to copy it" in caplog.text
    job.check(1)
    assert (tmp_path / "1" / "worker-0001").is_dir()


def test_python_collects_no_garbage_while_shares_are_merged(tmp_path, monkeypatch):
    """Not even the garbage of a program that has imported TensorFlow."""
    merge, enabled = bundle_writer.merge, []

    def watch(*args):
        enabled.append(gc.isenabled())
        return merge(*args)

    monkeypatch.setattr(bundle_writer, "merge", watch)
    Job(tmp_path).save(1)
    assert enabled == [False]
    assert gc.isenabled()


def shares_on_disk(directory):
    return list(directory.rglob("*" + layout.PARTS_SUFFIX))


def test_a_share_of_a_failed_save_is_deleted_by_the_next_save(tmp_path):
    """The chief had ended the save before this worker."""
    job = Job(tmp_path)
    [chief, other] = job.workers
    job.train(1)
    chief.stage(1).discard()
    other.stage(1)
    assert shares_on_disk(tmp_path)
    job.save(2)
    assert shares_on_disk(tmp_path) == []


def test_the_share_of_a_given_up_worker_is_deleted_later(tmp_path):
    job = Job(tmp_path)
    [chief, other] = job.workers
    job.train(1)
    chief.stage(1).publish("save", [0])
    other.stage(1)
    assert shares_on_disk(tmp_path)
    job.save(2)
    assert shares_on_disk(tmp_path) == []
    assert len(chief.saver.ended_saves) == 1  # not the complete save


def test_shares_that_cannot_be_deleted_are_deleted_later(tmp_path):
    class Stuck(FaultyFiles):
        def remove(self, path):
            if layout.PARTS_SUFFIX in path:
                raise OSError(errno.EBUSY, "Device or resource busy")
            super().remove(path)

    job = Job(tmp_path, files={0: Stuck()})
    job.save(1)
    assert shares_on_disk(tmp_path)
    Job(tmp_path).workers[0].saver.start()
    assert shares_on_disk(tmp_path) == []


def test_a_save_that_is_given_up_leaves_nothing(tmp_path):
    job = Job(tmp_path)
    job.workers[1].stage(1)
    chief = job.workers[0]
    chief.stage(1).discard()
    assert job.left_over() == []
