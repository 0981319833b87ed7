"""A checkpoint directory that is a URL: the marker is the commit, without a rename."""

from __future__ import annotations

import errno
import itertools
import os

import pytest

from tests.checkpoint.fakes import (
    Words,
    content,
    names,
    open_directory,
    save,
    write_part,
)
from tests.fakes.storage import FaultyFiles, SimulatedCrash
from tfpreempt import errors
from tfpreempt.checkpoint import retention
from tfpreempt.checkpoint.catalog import Kind
from tfpreempt.checkpoint.contents import Contents
from tfpreempt.checkpoint.handle import Checkpoint, latest
from tfpreempt.checkpoint.state import StateRegistry
from tfpreempt.storage import failure, reading
from tfpreempt.storage.files import files_for
from tfpreempt.storage.opening import open_store
from tfpreempt.testing.clock import FakeClock

pytestmark = pytest.mark.tensorflow
tf = pytest.importorskip("tensorflow")

from tfpreempt.checkpoint import opening  # noqa: E402
from tfpreempt.storage.gfile import GfileFiles  # noqa: E402

_numbers = itertools.count()


@pytest.fixture
def url():
    """A directory that no other test has."""
    return failure.check_directory(f"ram://gfile/{os.getpid()}-{next(_numbers)}/")


def put(path, data):
    files_for(path).remove(path)  # to open what is there would append, in ram://
    with tf.io.gfile.GFile(path, "wb") as file:
        file.write(data)


def get(path):
    with reading.open_file(path) as file:
        return file.read()


def tree(url):
    return sorted(os.path.join(f, n) for f, _, ns in reading.walk(url) for n in ns)


def left(url):
    """What people see there."""
    return sorted(name for name in reading.names(url) if not name.startswith("."))


class ObjectContents(Contents):
    """TensorFlow's files, written by gfile."""

    def __init__(self):
        self.restored_from = None

    def capture(self, save, *args, **kwargs):
        super().capture(save, *args, **kwargs)
        for name in names("ckpt"):
            put(os.path.join(save.staging, name), content(save.step))

    def restore(self, prefix, with_data=True):
        self.restored_from = get(prefix + ".index")


def make(url, text="", files=None, max_to_keep=1, **kwargs):
    registry = StateRegistry()
    words = [
        Words("word", text, registry=registry),
        Words("own", text, per_worker=True, registry=registry),
    ]
    saver = open_directory(
        url,
        ObjectContents(),
        registry=registry,
        files=files,
        max_to_keep=max_to_keep,
        **kwargs,
    )
    return saver, words


def save_old(url):
    saver, words = make(url, "old")
    save(saver, 1)
    assert len(words) == 2  # a saver holds States weakly


def save_new(url, files):
    """Step 2 over step 1, with a fault somewhere."""
    saver, words = make(url, "new", files)
    saver.start()
    return save(saver, 2), words


def look(url):
    """The step that a restarted run restores, checked to be all of a piece."""
    saver, words = make(url, "nothing")
    restored = saver.restore(saver.newest())
    assert saver.contents.restored_from == content(restored.step)
    assert [word.text for word in words] == [{1: "old", 2: "new"}[restored.step]] * 2
    return restored.step


def make_base(number):
    url = failure.check_directory(f"ram://base/{os.getpid()}-{next(_numbers)}-{number}")
    save_old(url)
    return url


def count_operations():
    files = FaultyFiles(GfileFiles())
    save_new(make_base("dry"), files)
    return files.operations


@pytest.mark.parametrize("when", ["before", "after"])
def test_after_a_crash_anywhere_there_is_one_whole_commit(when):
    operations = count_operations()
    assert "rename" not in {operation.name for operation in operations}
    marker = next(
        i
        for i, operation in enumerate(operations)
        if operation.name == "write" and operation.path.endswith("COMMITTED")
    )
    for index in range(len(operations)):
        url = make_base(index)
        files = FaultyFiles(GfileFiles(), fail_at=index, when=when)
        with pytest.raises(SimulatedCrash):
            save_new(url, files)
        is_marked = index > marker or (index == marker and when == "after")
        step = look(url)
        assert step == (2 if is_marked else 1), operations[index]
        # The next run cleans up, saves, and then there is no doubt left.
        saver, _ = make(url, "new")
        saver.start()
        assert look(url) == step
        save(saver, 2, attempt="again")
        assert look(url) == 2
        assert left(url) == ["checkpoint", "commit-again"]


def test_a_fault_anywhere_is_a_clear_error_or_a_commit():
    for index, operation in enumerate(count_operations()):
        url = make_base(index)
        full = OSError(errno.EDQUOT, "ResourceExhausted", operation.path)
        files = FaultyFiles(GfileFiles(), fail_at=index, error=full, when="after")
        try:
            commit, said = save_new(url, files)[0], ""
        except errors.SaveError as error:
            commit, said = None, str(error)
        assert commit or "the quota is used up" in said
        assert look(url) == (2 if commit else 1)
        assert commit or left(url) == ["checkpoint", "commit-run-1"]  # it was undone


def test_a_crash_while_tensorflow_writes_leaves_the_old_one(url):
    save_old(url)
    for name in (
        "ckpt.index.tempstate77",
        "ckpt_temp/part-0/ckpt",
        "worker-0001/a.state",
    ):
        put(os.path.join(url, "commit-dead", name), b"half")
    foreign = os.path.join(url, "commit-message", "notes.txt")
    for path in (foreign, os.path.join(url, "other", "file")):
        tf.io.gfile.makedirs(os.path.dirname(path))
        put(path, b"mine")
    tf.io.gfile.makedirs(os.path.join(url, "commit-empty"))
    assert look(url) == 1
    saver, _ = make(url)
    saver.start()
    assert look(url) == 1
    assert left(url) == ["checkpoint", "commit-message", "commit-run-1", "other"]
    assert get(foreign) == b"mine"


def test_many_workers_and_those_whose_shard_is_missing(url):
    chief, kept = make(url, "0", world=3)
    others = [make(url, str(i), worker=i, world=3) for i in (1, 2)]
    for other, _ in others:
        write_part(other, 4, "run-4")
    staged = write_part(chief, 4, "run-4")
    commit = staged.publish("preemption", [0, 1])  # 2 did not come in time
    candidate = chief.newest()
    assert candidate.path == commit.path == f"{url}/commit-run-4"
    assert candidate.kind is Kind.OWN
    assert candidate.manifest.workers == (0, 1)
    fresh, words = make(url, "?", worker=1, world=3)
    fresh.restore(fresh.find(candidate.token))
    assert [word.text for word in words] == ["0", "1"]
    assert len(kept) == 2
    handle = latest(url)
    assert (handle.path, handle.prefix) == (commit.path, f"{commit.path}/ckpt")


def test_what_is_discarded_leaves_nothing(url):
    saver, _ = make(url, "old")
    write_part(saver, 1, "run-1").discard()
    assert tree(url) == []
    assert reading.is_dir(url)


def test_a_save_that_never_committed_goes_once_nothing_of_it_changes(url):
    """A URL has no lease, so its writer may live. Files in memory are of 1970."""
    write_part(make(url, "old")[0], 1, "run-1")
    staged = set(tree(url))
    assert staged
    for age, stays in ((0.0, True), (retention.QUIET_SECONDS + 1, False)):
        fresh, _ = make(url, "old")
        fresh.clock = FakeClock(wall=age)
        fresh.start()
        assert bool(staged & set(tree(url))) == stays


# --- with TensorFlow's own checkpoints ------------------------------------------------


class Job:
    """A checkpoint with one weight."""

    def __init__(self, url):
        self.weight = tf.Variable([0.0, 0.0])
        self.checkpoint = tf.train.Checkpoint(weight=self.weight)
        self.saver = opening.open_directory(
            self.checkpoint, url, registry=StateRegistry()
        )
        self.saver.start()

    def save(self, step):
        self.weight.assign([step, step + 0.5])
        return save(self.saver, step)

    def restore(self):
        candidate = self.saver.newest()
        self.saver.restore(candidate)
        return candidate.step, float(self.weight[0])


def damage(path):
    data = bytearray(get(path))
    data[-1] ^= 1
    put(path, bytes(data))


def test_retention_stock_tensorflow_and_damage(url):
    job = Job(url)
    for step in (3, 5, 8):
        commit = job.save(step)
    assert commit.path == f"{url}/commit-run-8"
    assert left(url) == ["checkpoint", "commit-run-5", "commit-run-8"]
    assert Job(url).restore() == (8, 8.0)

    latest = tf.train.latest_checkpoint(url)
    assert latest == f"{url}/commit-run-8/ckpt"
    weight = tf.Variable([0.0, 0.0])
    tf.train.Checkpoint(weight=weight).restore(latest).assert_existing_objects_matched()
    assert weight.numpy().tolist() == [8.0, 8.5]

    damage(latest + ".data-00000-of-00001")
    fresh, problems = Job(url), []
    assert fresh.saver.newest(problems.append).step == 5
    assert "crc32c" in problems[0]
    assert fresh.restore() == (5, 5.0)


def test_what_a_manager_saved_there_is_found(url):
    job = Job(url)
    manager = tf.train.CheckpointManager(job.checkpoint, url, max_to_keep=2)
    job.weight.assign([7.0, 0.0])
    manager.save()
    fresh = Job(url)
    assert fresh.restore() == (None, 7.0)
    assert fresh.saver.newest().kind is Kind.FOREIGN


def test_a_copied_bucket_is_a_directory(url, tmp_path):
    Job(url).save(3)
    for path in tree(url):
        copy = tmp_path / os.path.relpath(path, url)
        copy.parent.mkdir(exist_ok=True, parents=True)
        copy.write_bytes(get(path))
    job = Job(str(tmp_path))
    assert job.restore() == (3, 3.0)
    assert job.save(4).path == str(tmp_path / "4")
    assert Job(str(tmp_path)).restore() == (4, 4.0)


# --- directories that cannot be -------------------------------------------------------


@pytest.mark.parametrize("scheme", ["s3", "nonsense"])
def test_a_scheme_that_tensorflow_does_not_serve(scheme):
    with pytest.raises(errors.ConfigurationError) as caught:
        failure.check_directory(f"{scheme}://bucket/run")
    assert f"no file system for {scheme}://" in str(caught.value)
    assert f"remote_checkpoint_dir='{scheme}://bucket/run'" in str(caught.value)


def test_a_file_is_no_directory(url):
    put(f"{url}/file", b"x")
    with pytest.raises(errors.ConfigurationError, match="is a file"):
        failure.check_directory(f"{url}/file")


def test_what_lies_flat_is_refused(url):
    checkpoint = tf.train.Checkpoint(weight=tf.Variable(0.0))
    manager = tf.train.CheckpointManager(checkpoint, url, max_to_keep=2)
    with pytest.raises(
        errors.ConfigurationError, match=r"tf\.train\.Checkpoint itself"
    ):
        opening.open_directory(manager)
    with pytest.raises(errors.ConfigurationError, match="save_fn"):
        opening.open_directory(checkpoint, url, save_fn=lambda: None)


def test_a_service_that_does_not_answer_is_no_empty_directory(url, monkeypatch):
    save_old(url)

    def fail(path):
        raise tf.errors.UnavailableError(None, None, "try again later")

    with monkeypatch.context() as broken:
        broken.setattr(tf.io.gfile, "stat", fail)
        with pytest.raises(errors.CheckpointError, match="try again later"):
            make(url)[0].newest()
        with pytest.raises(errors.ConfigurationError, match="check its name, the netw"):
            failure.check_directory(url)
    assert look(url) == 1


def test_errors_of_tensorflow_are_errors_of_a_disk(url):
    with pytest.raises(OSError, match="rename at once"):
        files_for(url).rename(f"{url}/a", f"{url}/b")
    with pytest.raises(errors.SaveError, match="save step 1"):
        write_part(make("nonsense://there")[0], 1, "a")


def test_a_deletion_leaves_the_folder_that_a_put_has_just_made(url):
    store, files = open_store(url), files_for(url)
    store.replace("a/b/1", b"x")
    files.make_dirs(f"{url}/a")  # another worker's put begins here
    store.delete("a/b/1")
    assert list(store.folders()) == []
    files.write(f"{url}/a/2", b"y")
    assert list(store.folders()) == ["a"]
    assert list(store.list()) == ["a/2"]


def test_a_handle_of_a_url_where_nothing_is():
    with pytest.raises(errors.CheckpointError, match="There is no checkpoint"):
        Checkpoint("ram://nothing/there").get_metadata()
