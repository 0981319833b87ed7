"""The saver with TensorFlow where things go wrong: no worker hangs, all is said."""

from __future__ import annotations

import contextlib
import errno
import os
import resource

import pytest

from tests.checkpoint.fakes import OwnContents, cluster, open_directory, save
from tfpreempt import errors
from tfpreempt.checkpoint.directory import layout
from tfpreempt.storage.files import LocalFiles

pytestmark = pytest.mark.tensorflow
tf = pytest.importorskip("tensorflow")

import keras  # noqa: E402
from tensorflow.python.checkpoint import checkpoint as checkpoint_lib  # noqa: E402

from tests.checkpoint.test_writer import Job  # noqa: E402
from tfpreempt.checkpoint.restore import opening  # noqa: E402
from tfpreempt.checkpoint.tensors import gather, reader  # noqa: E402


class FullDisk(LocalFiles):
    """Fails at one operation."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def make_dirs(self, path):
        if self.at == "make_dirs":
            raise OSError(errno.ENOSPC, "No space left on device", path)
        super().make_dirs(path)

    def write(self, path, data):
        if self.at == "declare" and layout.INTENT_SUFFIX in path:
            raise OSError(errno.ENOSPC, "No space left on device", path)
        super().write(path, data)


@pytest.fixture
def gathered(monkeypatch):
    """How often the collective read was done, of known objects or of others."""
    calls = []
    evaluate = gather._evaluate

    def counted(tensors):
        calls.append(None)
        return evaluate(tensors)

    monkeypatch.setattr(gather, "_evaluate", counted)
    return calls


# --- what needs all workers ----------------------------------------------------------

FAULTS = [("own", "make_dirs"), ("manager", "make_dirs"), ("manager", "declare")]


@pytest.mark.parametrize(("form", "at"), FAULTS)
def test_a_chief_that_cannot_write_still_takes_part_in_the_collective_read(
    tmp_path, gathered, form, at
):
    job = Job(tmp_path, form, files=FullDisk(at))
    with pytest.raises(errors.SaveError, match="disk is full"):
        job.save(1)
    assert len(gathered) == 1
    job.saver.files.at = None
    job.save(2)
    assert len(gathered) == 2
    assert Job(tmp_path, form).restore()[1] == 2.0


def test_a_failed_collective_read_does_not_hide_the_first_error(
    tmp_path, monkeypatch, caplog
):
    def fail(self, *args):
        raise tf.errors.UnavailableError(None, None, "peer is gone")

    kind = checkpoint_lib.TrackableSaver
    monkeypatch.setattr(kind, "_gather_serialized_tensors", fail)
    with pytest.raises(errors.SaveError, match="disk is full"):
        Job(tmp_path, files=FullDisk("make_dirs")).save(1)
    assert "peer is gone" in caplog.text


@pytest.mark.parametrize("files", [FullDisk("make_dirs"), FullDisk(None)])
@pytest.mark.parametrize("kind", [MemoryError, OSError, RuntimeError])
@pytest.mark.parametrize("world", [1, 2])
def test_a_worker_outside_of_the_collective_read_raises_an_error(
    tmp_path, monkeypatch, kind, files, world
):
    """The other workers are in the read, so the save cannot just fail.

    In one process it does fail, and training continues.
    """

    def fail(self, *args):
        raise kind("can't start new thread")

    saver = checkpoint_lib.TrackableSaver
    monkeypatch.setattr(saver, "_gather_serialized_tensors", fail)
    job = Job(tmp_path, files=files, cluster=cluster(0, world))
    with pytest.raises((errors.SaveError, kind)) as raised:
        job.save(1)
    is_told = isinstance(raised.value, errors.CollectiveReadError)
    assert is_told == (world > 1)
    assert ("restart all workers" in str(raised.value)) == is_told


def test_a_save_fn_is_called_before_anything_can_fail(tmp_path):
    calls = []
    job = Job(tmp_path, save_fn=lambda: calls.append(1), files=FullDisk("make_dirs"))
    with pytest.raises(errors.SaveError, match="disk is full"):
        job.save(1)
    assert calls == [1]


# --- places --------------------------------------------------------------------------


def test_a_managers_url_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(), "ram://run", 2)
    with pytest.raises(errors.ConfigurationError, match="'ram://run'"):
        opening.open_directory(manager)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_a_save_fn_that_wrote_nothing_is_an_error(tmp_path, name):
    (tmp_path / "empty").mkdir()
    path = str(tmp_path / name)
    job = Job(tmp_path, save_fn=lambda: path)
    with pytest.raises(errors.SaveError, match="no checkpoint has this path") as caught:
        job.save(3)
    assert repr(path) in str(caught.value)
    assert job.saver.newest() is None


def test_a_save_fn_may_write_a_single_file(tmp_path):
    def save_fn():
        (tmp_path / "model.keras").write_bytes(b"weights")
        return tmp_path / "model.keras"

    Job(tmp_path, save_fn=save_fn).save(3)
    Job(tmp_path, save_fn=save_fn).save(4)  # its tidying leaves the file's sidecar
    candidate = Job(tmp_path, save_fn=save_fn).saver.newest()
    assert candidate.step == 4
    assert next(file.name for file in candidate.manifest.files) == "model.keras"


@pytest.mark.parametrize("where", ["elsewhere", "run/below"])
def test_a_save_fn_that_writes_outside_the_directory_is_warned(tmp_path, caplog, where):
    def save_fn():
        return job.checkpoint.write(str(tmp_path / where / "mine"))

    job = Job(tmp_path / "run", save_fn=save_fn)
    commit = job.save(3)
    assert commit.path == str(tmp_path / where / "mine")
    (record,) = [
        r
        for r in caplog.records
        if "searches only the checkpoint directory" in r.getMessage()
    ]
    assert repr(str(tmp_path / "run")) in record.getMessage()
    assert repr(str(tmp_path / where)) in record.getMessage()


@pytest.mark.parametrize("form", ["own", "manager"])
def test_a_path_that_tensorflow_takes_for_a_pattern_is_refused(tmp_path, form):
    with pytest.raises(errors.ConfigurationError, match="treats as a pattern"):
        Job(tmp_path / "lr=[1,2]", form)
    name = {"max_to_keep": 2, "checkpoint_name": "ckpt[1]"}
    with pytest.raises(errors.ConfigurationError, match="treats as a pattern"):
        Job(tmp_path / "run", "manager", manager_args=name)
    save(open_directory(tmp_path / "lr=[1,2]"), 1)  # States alone need no TensorFlow


def test_too_many_open_files_are_no_full_disk(tmp_path):
    job = Job(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []

    def take_all():
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))

    class Greedy(LocalFiles):
        def make_dirs(self, path):
            super().make_dirs(path)
            take_all()

    job.saver.files = Greedy()
    try:
        with pytest.raises(errors.SaveError, match="ulimit -n") as caught:
            job.save(1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)
    assert "disk is full" not in str(caught.value)


# --- another model -------------------------------------------------------------------


def test_an_index_that_tensorflow_cannot_read_is_skipped(tmp_path, caplog):
    """Its bytes match the manifest. The index is tried before any assignment."""
    Job(tmp_path).save(3)
    save(open_directory(tmp_path, OwnContents()), 4)
    job = Job(tmp_path)
    candidate = job.saver.newest()
    assert candidate.step == 3
    assert "TensorFlow cannot read" in caplog.text
    assert float(job.weight[0]) == 0.0
    assert job.restore()[1] == 3.0


def test_variables_that_the_model_no_longer_has_are_named(tmp_path, caplog):
    job = Job(tmp_path)
    for i in range(30):
        setattr(job.checkpoint, f"extra{i:02}", tf.Variable(float(i)))
    job.save(3)
    fresh = Job(tmp_path)
    assert fresh.restore()[1] == 3.0
    assert (
        "this program does not have" not in caplog.text
    )  # yet: a first step may make them
    for _ in range(2):
        fresh.saver.contents.warn_of_unrestored()
    (record,) = [
        r for r in caplog.records if "this program does not have" in r.getMessage()
    ]
    text = record.getMessage()
    assert "(30): " in text
    assert "extra00" in text
    assert "and 10 more" in text


def test_a_checkpoint_that_fits_warns_of_nothing(tmp_path, caplog):
    Job(tmp_path).save(3)
    weight = tf.Variable([0.0, 0.0])
    other = tf.train.Checkpoint(weight=weight)  # without our counter
    saver = opening.open_directory(other, tmp_path)
    saver.restore(saver.newest())
    assert float(weight[0]) == 3.0
    assert [r for r in caplog.records if r.levelname == "WARNING"] == []


def test_slots_that_an_optimizer_has_not_made_yet_are_no_surprise(tmp_path, caplog):
    def job():
        made = Job(tmp_path)
        made.optimizer = tf.compat.v1.train.MomentumOptimizer(0.1, 0.9)
        made.checkpoint.optimizer = made.optimizer
        return made

    first = job()
    first.optimizer.apply_gradients([(tf.ones([2]), first.weight)])
    first.save(3)
    names = [name for name, _ in tf.train.list_variables(str(tmp_path / "3" / "ckpt"))]
    assert any(".OPTIMIZER_SLOT" in name for name in names)
    restored = job()
    restored.restore()
    restored.saver.contents.warn_of_unrestored()
    assert "this program does not have" not in caplog.text


def test_variables_of_the_first_step_are_no_mismatch(tmp_path, caplog):
    def job():
        made = Job(tmp_path)
        made.checkpoint.optimizer = keras.optimizers.Adam(0.1)
        return made

    first = job()
    first.checkpoint.optimizer.apply([tf.ones([2])], [first.weight])
    first.save(3)
    restored = job()
    restored.restore()
    assert "optimizer/_variables/2" in restored.saver.contents.created_later()
    restored.checkpoint.optimizer.apply([tf.ones([2])], [restored.weight])
    assert restored.saver.contents.created_later() == []
    restored.saver.contents.warn_of_unrestored()
    assert restored.saver.contents.created_later() == ()
    assert "this program does not have" not in caplog.text


def test_a_file_of_tensorflow_1_is_restored_whole(tmp_path):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.get_variable("weight", initializer=[1.0, 2.0])
        session.run(tf.compat.v1.global_variables_initializer())
        prefix = tf.compat.v1.train.Saver().save(session, str(tmp_path / "model"))
    weight = tf.Variable([0.0, 0.0], name="weight")
    left = reader.restore(tf.train.Checkpoint(weight=weight), prefix, None, True)
    assert weight.numpy().tolist() == [1.0, 2.0]
    assert list(left()) == []


def test_a_commit_of_states_alone_does_not_stand_for_weights(tmp_path, caplog):
    Job(tmp_path).save(3)
    save(open_directory(tmp_path), 4)
    candidate, value = Job(tmp_path).restore()
    assert (candidate.step, value) == (3, 3.0)
    assert "only named States" in caplog.text
    assert Job(tmp_path, save_fn=lambda: None).saver.newest().step == 4


# --- dataset iterators ---------------------------------------------------------------


def with_data(directory, data, **kwargs):
    job = Job(directory, **kwargs)
    job.checkpoint.data = iter(data)
    return job


def take(job, count):
    return [int(next(job.checkpoint.data)) for _ in range(count)]


def shuffled(seed=3):
    return tf.data.Dataset.range(100).shuffle(10, seed=seed)


def test_a_worker_without_its_shard_reads_its_data_from_the_beginning(tmp_path, caplog):
    first = take(with_data(tmp_path / "other", shuffled()), 5)
    chief = with_data(tmp_path, shuffled(), cluster=cluster(0, 2))
    take(chief, 20)
    chief.save(3)  # the shard of worker 1 is not in it
    expected = take(chief, 5)
    lost = with_data(tmp_path, shuffled(), cluster=cluster(1, 2))
    assert lost.restore()[1] == 3.0
    assert take(lost, 5) == first
    assert "no part of worker 1" in caplog.text
    again = with_data(tmp_path, shuffled(), cluster=cluster(0, 2))
    assert again.restore()[1] == 3.0
    assert take(again, 5) == expected


@pytest.mark.parametrize("worker", [0, 1])
def test_another_world_size_restores_though_the_datasets_differ(tmp_path, worker):
    one = with_data(tmp_path, shuffled())
    take(one, 20)
    one.save(3)
    options = {"cluster": cluster(worker, 2)}
    data = tf.data.Dataset.range(100).shard(2, worker).map(lambda x: x + 1)
    two = with_data(tmp_path, data, **options)
    assert two.restore()[1] == 3.0
    assert take(two, 3) == [worker + 1, worker + 3, worker + 5]
