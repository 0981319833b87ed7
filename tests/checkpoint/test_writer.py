"""The saver with TensorFlow: both forms, other people's checkpoints, wrong models."""

from __future__ import annotations

import logging
import os

import pytest

from tests.checkpoint.fakes import cluster, save, write_part
from tests.fakes.storage import FaultyFiles, damage
from tfpreempt import errors
from tfpreempt.checkpoint.directory import checkpoint_state
from tfpreempt.checkpoint.directory.catalog import Kind
from tfpreempt.checkpoint.directory.retention import RetentionPolicy
from tfpreempt.checkpoint.state.state import StateRegistry

pytestmark = pytest.mark.tensorflow
tf = pytest.importorskip("tensorflow")

from tfpreempt.checkpoint.restore import opening  # noqa: E402


class Job:
    """A checkpoint with one weight, and its directory, in the given form."""

    def __init__(self, directory, form="own", **kwargs):
        self.weight = tf.Variable([0.0, 0.0])
        self.checkpoint = tf.train.Checkpoint(weight=self.weight)
        self.checkpoint.checkpointed_runs = tf.Variable(0, dtype=tf.int64)
        self.directory = str(directory)
        self.manager = None
        if form == "manager":
            manager_args = kwargs.pop("manager_args", {"max_to_keep": 2})
            self.manager = tf.train.CheckpointManager(
                self.checkpoint, self.directory, **manager_args
            )
        self.saver = opening.open_directory(
            self.manager or self.checkpoint,
            self.directory,
            registry=StateRegistry(),
            **kwargs,
        )
        self.saver.start()

    def save(self, step, *args, **kwargs):
        self.weight.assign([step, step + 0.5])
        self.checkpoint.checkpointed_runs.assign(step)
        staged = write_part(
            self.saver, step, f"run-{step}-{os.urandom(4).hex()}", *args, **kwargs
        )
        return staged.publish("save", [0])

    def restore(self):
        candidate = self.saver.newest()
        assert candidate is not None
        self.saver.restore(candidate)
        return candidate, float(self.weight[0])


def stock(directory):
    """The weight as TensorFlow alone restores it."""
    weight = tf.Variable([0.0, 0.0])
    runs = tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(weight=weight, checkpointed_runs=runs)
    path = tf.train.latest_checkpoint(str(directory))
    checkpoint.restore(path).assert_consumed()
    return float(weight[0])


@pytest.mark.parametrize("form", ["own", "manager"])
def test_a_save_leaves_the_logging_of_the_program_as_it_is(tmp_path, monkeypatch, form):
    monkeypatch.setattr(logging.root, "handlers", [])
    job = Job(tmp_path, form)
    job.save(5)
    assert logging.root.handlers == []
    own = logging.NullHandler()
    logging.root.addHandler(own)
    job.save(6)
    assert logging.root.handlers == [own]


@pytest.mark.parametrize("form", ["own", "manager"])
def test_save_and_restore(tmp_path, form):
    job = Job(tmp_path, form)
    for step in (3, 5, 8):
        commit = job.save(step)
    assert (commit.step, commit.sequence, commit.because) == (8, 3, "save")
    fresh = Job(tmp_path, form)
    candidate, value = fresh.restore()
    assert (value, candidate.step) == (8.0, 8)
    assert int(fresh.checkpoint.checkpointed_runs) == 8
    assert int(fresh.checkpoint.save_counter) == 3
    assert stock(tmp_path) == 8.0
    kept = list(tmp_path.rglob("*.index"))
    assert len(kept) == 2
    assert len(list(tmp_path.rglob("COMMITTED"))) == 2


@pytest.mark.parametrize("form", ["own", "manager"])
def test_a_corrupt_newest_commit_falls_back_to_the_previous_commit(tmp_path, form):
    job = Job(tmp_path, form)
    job.save(3)
    commit = job.save(5)
    prefix = commit.path + ("/ckpt" if form == "own" else "")
    damage(prefix + ".data-00000-of-00001")
    fresh, problems = Job(tmp_path, form), []
    candidate = fresh.saver.newest(problems.append)
    assert candidate.step == 3
    (problem,) = problems
    assert "ckpt" in problem
    assert "data-00000-of-00001" in problem
    assert "crc32c" in problem
    fresh.saver.restore(candidate)
    fresh.save(7)
    assert Job(tmp_path, form).restore()[1] == 7.0
    if form == "manager":
        assert [os.path.basename(p) for p in fresh.manager.checkpoints] == [
            "ckpt-1",
            "ckpt-2",
        ]


def test_own_directories_and_the_number_that_the_caller_chose(tmp_path):
    job = Job(tmp_path)
    assert job.save(3).path == str(tmp_path / "3")
    assert job.save(4, checkpoint_number=17).path == str(tmp_path / "17")
    candidate, _ = Job(tmp_path).restore()
    assert (candidate.step, candidate.path) == (4, str(tmp_path / "17"))
    # the same number again: the older commit stays until retention takes it
    again = job.save(4, checkpoint_number=17)
    assert again.path == str(tmp_path / "17.3")
    assert (tmp_path / "17").exists()
    assert not (tmp_path / "3").exists()
    assert stock(tmp_path) == 4.0
    with pytest.raises(errors.ConfigurationError, match="checkpoint_number"):
        job.save(5, nonsense=1)


def test_manager_arguments_pass_through(tmp_path):
    job = Job(tmp_path, "manager")
    assert job.save(3, checkpoint_number=33).path == str(tmp_path / "ckpt-33")
    assert job.save(4, 44).path == str(tmp_path / "ckpt-44")


def test_a_managers_interval_does_not_lose_a_preemption(tmp_path):
    step = tf.Variable(0)
    job = Job(
        tmp_path,
        "manager",
        manager_args={
            "max_to_keep": 3,
            "step_counter": step,
            "checkpoint_interval": 100,
        },
    )
    job.manager.save()
    assert job.save(0).path.endswith("ckpt-2")
    step.assign(1)
    assert job.save(1).path.endswith("ckpt-3")
    assert job.manager.save() is None  # the interval holds for the user's own saves


def test_a_managers_state_file_is_synced_before_it_has_its_name(tmp_path):
    """The manager syncs nothing: after a loss of power the file could be empty, and no
    manager could be made in the directory any more."""
    files = FaultyFiles()
    job = Job(tmp_path, "manager", files=files)
    write = job.manager.save

    def spy(**kwargs):
        saved = write(**kwargs)
        assert tf.train.latest_checkpoint(job.directory) is None  # not before ours
        return saved

    job.manager.save = spy
    job.save(1)
    state = tf.train.get_checkpoint_state(job.directory)
    assert state.model_checkpoint_path == str(tmp_path / "ckpt-1")
    done = [(each.name, os.path.basename(each.path)) for each in files.operations]
    moved = done.index(("rename", "checkpoint"))
    assert ("sync_file", "checkpoint.tmp") in done[:moved]
    assert done.index(("rename", "COMMITTED")) < moved
    assert ("sync_dir", tmp_path.name) in done[moved:]


def test_a_manager_in_a_relative_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = Job("run", "manager")
    job.save(1)
    job.save(2)
    fresh = Job("run", "manager")
    assert fresh.restore()[1] == 2.0
    assert fresh.manager.checkpoints == ["run/ckpt-1", "run/ckpt-2"]
    assert fresh.manager.latest_checkpoint == "run/ckpt-2"
    assert fresh.save(3).path == str(tmp_path / "run" / "ckpt-3")
    assert fresh.manager.checkpoints == ["run/ckpt-2", "run/ckpt-3"]


def test_an_interval_that_the_caller_asked_for_may_say_no(tmp_path, caplog):
    step = tf.Variable(0)
    interval = {"max_to_keep": 3, "step_counter": step, "checkpoint_interval": 100}
    job = Job(tmp_path, "manager", manager_args=interval)
    job.save(0)
    step.assign(5)
    assert job.save(5, check_interval=True) is None
    assert "checkpoint_interval of the CheckpointManager has not passed" in caplog.text
    assert Job(tmp_path, "manager", manager_args=interval).restore()[0].step == 0


def test_an_async_manager_is_synced_before_the_commit(tmp_path):
    job = Job(tmp_path, "manager")
    options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
    job.weight.assign([1.0, 1.0])
    job.manager.save(options=options)
    commit = job.save(2, options=options)
    assert commit.path.endswith("ckpt-2")
    assert Job(tmp_path, "manager").restore()[1] == 2.0


def test_a_managers_retention_deletes_the_sidecars_too(tmp_path):
    job = Job(tmp_path, "manager", manager_args={"max_to_keep": 1})
    for step in range(1, 4):
        job.save(step)
    names = sorted(os.listdir(tmp_path))
    assert names == [
        ".tfpreempt-directory",
        "checkpoint",
        "ckpt-3.data-00000-of-00001",
        "ckpt-3.index",
        "ckpt-3.tfpreempt",
    ]


# --- checkpoints from elsewhere ------------------------------------------------------


def test_a_managers_own_save_is_restored_when_it_is_newer(tmp_path):
    job = Job(tmp_path, "manager")
    job.save(3)
    job.weight.assign([4.0, 4.0])
    job.manager.save()
    candidate, value = Job(tmp_path, "manager").restore()
    assert (candidate.kind, value) == (Kind.EXTERNAL, 4.0)
    job.save(5)
    candidate, value = Job(tmp_path, "manager").restore()
    assert (candidate.kind, value) == (Kind.FLAT, 5.0)


def test_a_manager_deletes_no_checkpoint_of_another_directory(tmp_path, caplog):
    """A user with write access to the `checkpoint` file can name any checkpoint."""
    other = Job(tmp_path / "other", "manager")
    other.save(1)
    directory = tmp_path / "ckpt"
    Job(directory, "manager").save(1)
    kept = str(tmp_path / "other" / "ckpt-1")
    planted = checkpoint_state.CheckpointStateFile(
        latest="ckpt-1",
        paths=(kept, "../other/ckpt-1", "ckpt-1"),
        timestamps=(2.0, 2.0, 2.0),
        last_preserved=1.0,
    )
    (directory / "checkpoint").write_bytes(checkpoint_state.to_bytes(planted))
    job = Job(directory, "manager")
    job.restore()
    for step in (2, 3, 4):
        job.save(step)
    assert Job(tmp_path / "other", "manager").restore()[1] == 1.0
    assert f"names the checkpoint {kept!r}" in caplog.text
    names = [os.path.basename(path) for path in job.manager.checkpoints]
    assert names == ["ckpt-3", "ckpt-4"]
    assert not (directory / "ckpt-2.index").exists()


def test_a_checkpoint_without_our_counter_in_an_own_directory(tmp_path):
    weight = tf.Variable([6.0, 6.0])
    other = tf.train.CheckpointManager(
        tf.train.Checkpoint(weight=weight), str(tmp_path), max_to_keep=5
    )
    other.save()
    other.save()
    job = Job(tmp_path)
    candidate, value = job.restore()
    assert (candidate.kind, candidate.step, value) == (Kind.EXTERNAL, None, 6.0)
    assert int(job.checkpoint.checkpointed_runs) == 0
    for step in (7, 8, 9, 10):
        job.save(step)
    assert stock(tmp_path) == 10.0
    # theirs are still there, and still listed
    state = tf.train.get_checkpoint_state(str(tmp_path))
    listed = [os.path.relpath(p, tmp_path) for p in state.all_model_checkpoint_paths]
    assert listed == ["ckpt-1", "ckpt-2", "9/ckpt", "10/ckpt"]
    assert (tmp_path / "ckpt-1.index").exists()
    assert Job(tmp_path).restore()[1] == 10.0


@pytest.mark.parametrize("cut", ["data", "index", "no data"])
def test_an_incomplete_foreign_checkpoint_is_skipped(tmp_path, cut):
    job = Job(tmp_path, "manager")
    job.save(3)
    job.manager.save()
    data = tmp_path / "ckpt-2.data-00000-of-00001"
    if cut == "no data":
        data.unlink()
    else:
        path = data if cut == "data" else tmp_path / "ckpt-2.index"
        path.write_bytes(path.read_bytes()[:-3])
    problems = []
    candidate = Job(tmp_path, "manager").saver.newest(problems.append)
    assert candidate.step == 3
    assert "ckpt-2" in problems[0]


def test_what_tensorflows_own_handler_wrote_is_restored(tmp_path):
    weight = tf.Variable([2.0, 2.0])
    runs = tf.Variable(11, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(weight=weight)
    checkpoint.checkpointed_runs = runs
    tf.train.CheckpointManager(checkpoint, str(tmp_path), max_to_keep=1).save()
    job = Job(tmp_path)
    assert job.restore()[1] == 2.0
    assert int(job.checkpoint.checkpointed_runs) == 11


# --- another model -------------------------------------------------------------------


def test_another_models_checkpoint_is_refused_before_anything_is_assigned(tmp_path):
    Job(tmp_path).save(3)
    first, second = tf.Variable([9.0, 9.0]), tf.Variable([[1.0]])
    checkpoint = tf.train.Checkpoint(weight=first, extra=second)
    saver = opening.open_directory(checkpoint, tmp_path, registry=StateRegistry())
    candidate = saver.newest()
    with pytest.raises(errors.CheckpointMismatchError, match="extra") as caught:
        saver.restore(candidate)
    assert "(1, 1)" in str(caught.value)
    assert float(first[0]) == 9.0


@pytest.mark.parametrize(
    ("value", "what"), [([1.0] * 3, r"\(3,\).*\(2,\)"), ([1, 2], "int32.*float32")]
)
def test_wrong_shapes_and_types_are_named(tmp_path, value, what):
    Job(tmp_path).save(3)
    other = tf.train.Checkpoint(weight=tf.Variable(value))
    saver = opening.open_directory(other, tmp_path, registry=StateRegistry())
    with pytest.raises(errors.CheckpointMismatchError, match=f"weight: .*{what}"):
        saver.restore(saver.newest())


def test_a_layer_built_later_is_restored_then_or_explained(tmp_path):
    def job(units):
        import keras

        model = keras.Sequential([keras.layers.Dense(units)])
        checkpoint = tf.train.Checkpoint(model=model)
        return model, opening.open_directory(
            checkpoint, tmp_path, registry=StateRegistry()
        )

    model, saver = job(3)
    model(tf.zeros([1, 2]))
    save(saver, 1)
    later, saver = job(3)
    saver.restore(saver.newest())
    later(tf.zeros([1, 2]))
    tf.debugging.assert_equal(
        later.layers[0].kernel.value, model.layers[0].kernel.value
    )
    wrong, saver = job(4)
    saver.restore(saver.newest())
    with pytest.raises(errors.CheckpointMismatchError, match="built after"):
        wrong(tf.zeros([1, 2]))


# --- save_fn and bad input -----------------------------------------------------------


def test_save_fn_gets_a_manifest_for_the_path_that_it_returns(tmp_path):
    def save_fn(name):
        return job.checkpoint.write(str(tmp_path / name))

    job = Job(tmp_path, save_fn=save_fn)
    commit = job.save(3, "mine")
    assert commit.path == str(tmp_path / "mine")
    candidate, value = Job(tmp_path).restore()
    assert (candidate.step, value) == (3, 3.0)
    assert candidate.manifest.files


def test_save_fn_that_returns_none_commits_nothing(tmp_path, caplog):
    job = Job(tmp_path, save_fn=lambda: None)
    assert job.save(3) is None
    assert "save_fn returned None" in caplog.text
    assert job.saver.newest() is None
    assert os.listdir(tmp_path) == [".tfpreempt-directory"]


def test_bad_arguments():
    with pytest.raises(
        errors.ConfigurationError, match="expected the path of the directory"
    ):
        opening.open_directory(tf.train.Checkpoint())
    with pytest.raises(errors.ConfigurationError, match="of type int"):
        opening.open_directory(3, "/tmp")
    with pytest.raises(errors.ConfigurationError, match="max_to_keep"):
        RetentionPolicy(max_to_keep=0)


def test_named_states_alone(tmp_path):
    from tests.checkpoint.fakes import Words

    registry = StateRegistry()
    words = Words("words", "hello", registry=registry)
    saver = opening.open_directory(None, tmp_path, registry=registry)
    save(saver, 4)
    words.text = ""
    assert saver.restore(saver.newest()).step == 4
    assert words.text == "hello"
    assert tf.train.latest_checkpoint(str(tmp_path)) is None


@pytest.mark.parametrize("world", [1, 2])
def test_a_save_fn_may_need_the_peers_but_a_lone_worker_has_none(tmp_path, world):
    job = Job(tmp_path, save_fn=lambda: None, cluster=cluster(0, world))
    assert job.saver.contents.needs_peers() == (world > 1)
