"""Parts of workers, world sizes, named States, retention; without TensorFlow."""

from __future__ import annotations

import errno
import os
import shutil

import pytest

from tests.checkpoint.fakes import OwnContents, Words, open_directory, save, write_part
from tests.fakes.storage import damage
from tfpreempt import errors
from tfpreempt.checkpoint.restore.handle import checkpoints_in, latest_prefix
from tfpreempt.checkpoint.restore.reshard import load_worker_state
from tfpreempt.checkpoint.state.state import StateRegistry
from tfpreempt.states.values import ArrayDictState, JsonState, StepCounter
from tfpreempt.storage.files import LocalFiles


class Own(Words):
    """Words that no worker restores from another number of workers."""

    def reshard(self, files, worker, world):
        pass


def worker(directory, index, world, text=""):
    registry = StateRegistry()
    words = [
        Own("mine", f"{text}{index}", per_worker=True, registry=registry),
        Words("ours", f"{text}{index}", registry=registry),
    ]
    saver = open_directory(
        directory,
        OwnContents(index == 0),
        registry=registry,
        worker=index,
        world=world,
        random_state=Own("random", f"{text}{index}", per_worker=True, registry=None),
    )
    return saver, words


def save_all(directory, world, complete=None, step=5):
    workers = [worker(directory, i, world, "text") for i in range(world)]
    staged = [write_part(saver, step, f"a-{step}") for saver, _ in workers]
    return staged[0].publish("preemption", complete or range(world))


def restore(directory, index, world):
    saver, words = worker(directory, index, world, "fresh")
    candidate = saver.newest()
    saver.restore(candidate)
    return saver, candidate, [word.text for word in words]


def test_each_worker_gets_its_own_shard_and_the_chiefs_replicated_state(tmp_path):
    commit = save_all(tmp_path, 3)
    assert commit.world_size == 3
    names = os.listdir(tmp_path / "5")
    assert {"worker-0000", "worker-0001", "worker-0002", "states"} <= set(names)
    for index in range(3):
        saver, candidate, texts = restore(tmp_path, index, 3)
        assert texts == [f"text{index}", "text0"]
        assert saver.random_state.text == f"fresh{index}"  # only when asked
        assert saver.random_state is not None
        assert load_worker_state(candidate, saver.random_state, saver.cluster)
        assert saver.random_state.text == f"text{index}"


def test_another_number_of_workers_restores_shared_values_with_a_warning(
    tmp_path, caplog
):
    save_all(tmp_path, 3)
    assert restore(tmp_path, 1, 2)[2] == ["fresh1", "text0"]
    (record,) = [r for r in caplog.records if r.levelname == "WARNING"]
    assert "3 worker(s), and this run has 2" in record.getMessage()
    assert "dataset iterator starts from the beginning" in record.getMessage()


def test_a_shard_of_a_lost_worker_is_omitted_with_a_warning(tmp_path, caplog):
    save_all(tmp_path, 3, complete=[0, 2])
    assert not (tmp_path / "5" / "worker-0001").exists()
    assert restore(tmp_path, 2, 3)[2] == ["text2", "text0"]
    assert restore(tmp_path, 1, 3)[2] == ["fresh1", "text0"]
    assert "no part of worker 1" in caplog.text


def test_only_the_chief_commits(tmp_path):
    saver, _ = worker(tmp_path, 1, 2)
    staged = write_part(saver, 1, "a")
    with pytest.raises(errors.UsageError, match="the only worker that can"):
        staged.publish("save", [0, 1])


def test_retention_keeps_two_by_default_and_ignores_foreign_files(tmp_path):
    saver = open_directory(tmp_path, OwnContents())
    save(saver, 1)
    (tmp_path / "1" / "notes.txt").write_text("mine")
    (tmp_path / "workertemp_3").mkdir()
    for step in (2, 3):
        save(saver, step)
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "3", "checkpoint", "workertemp_3"]
    assert os.listdir(tmp_path / "1") == ["notes.txt"]
    # A stranger's directory under the number that we need:
    (tmp_path / "9").mkdir()
    assert save(saver, 9).path == str(tmp_path / "9.4")


@pytest.mark.parametrize("keep", [1, 3, None])
def test_retention_as_asked(tmp_path, keep):
    saver = open_directory(tmp_path, OwnContents(), max_to_keep=keep)
    for step in range(5):
        save(saver, step)
    kept = sorted(name for name in os.listdir(tmp_path) if name.isdigit())
    assert kept == [str(step) for step in range(5)][-(keep or 5) :]
    listed = (tmp_path / "checkpoint").read_text().splitlines()
    assert listed[0] == 'model_checkpoint_path: "4/ckpt"'
    assert len(listed) == len(kept) + 1


def test_retention_continues_if_another_process_deletes_files(tmp_path, caplog):
    class Slow(LocalFiles):
        """A user deletes files by hand while a commit is written."""

        def write(self, path, data):
            shutil.rmtree(tmp_path / "1", ignore_errors=True)
            super().write(path, data)

    for step in (1, 2, 3):
        save(open_directory(tmp_path, OwnContents(), max_to_keep=None), step)
    save(open_directory(tmp_path, OwnContents(), files=Slow(), max_to_keep=1), 4)
    assert sorted(os.listdir(tmp_path)) == ["4", "checkpoint"]
    assert caplog.text == ""


@pytest.mark.parametrize("keep", [0, -1, 1.5, True, "2"])
def test_retention_refuses(tmp_path, keep):
    with pytest.raises(errors.ConfigurationError, match="max_to_keep"):
        open_directory(tmp_path, OwnContents(), max_to_keep=keep)


def test_a_start_removes_files_of_interrupted_saves(tmp_path):
    saver = open_directory(tmp_path, OwnContents())
    save(saver, 1)
    write_part(saver, 2, "dead")
    (tmp_path / ".tfpreempt-staging" / "keep me").mkdir()
    open_directory(tmp_path, OwnContents()).start()
    assert os.listdir(tmp_path / ".tfpreempt-staging") == ["keep me"]
    assert saver.newest().step == 1


UNREADABLE = {
    "json": (JsonState, "[" * 100_000),
    "step": (StepCounter, "-1"),
    "arrays": (ArrayDictState, "tfpbytes"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("per_worker", [False, True])
def test_a_state_that_cannot_be_read_is_damage_though_its_bytes_are_right(
    tmp_path, caplog, kind, per_worker
):
    """And it is found before anything is restored, also in another worker's shard."""
    make, text = UNREADABLE[kind]

    def job(made, step):
        payload = OwnContents()
        saver = open_directory(tmp_path, payload, registry=made._registry)
        if step is not None:
            save(saver, step)
        return saver, payload

    good = make("x", per_worker=per_worker, registry=StateRegistry())
    job(good, 1)
    job(Words("x", text, per_worker=per_worker, registry=StateRegistry()), 2)
    again = make("x", per_worker=per_worker, registry=StateRegistry())
    saver, payload = job(again, None)
    candidate = saver.newest()
    assert candidate.step == 1
    assert payload.restored_from is None
    saver.restore(candidate)
    assert "skipping a checkpoint" in caplog.text


def test_discard(tmp_path):
    saver = open_directory(tmp_path, OwnContents())
    staged = write_part(saver, 2, "no")
    staged.discard()
    assert not os.path.exists(staged.staging)
    staged.discard()


@pytest.mark.parametrize("attempt", ["", "../x", "a/b", "x" * 101, "a b"])
def test_an_attempt_that_cannot_be_a_name(tmp_path, attempt):
    with pytest.raises(errors.ConfigurationError, match="attempt"):
        write_part(open_directory(tmp_path, OwnContents()), 1, attempt)


def test_handles(tmp_path):
    saver = open_directory(tmp_path, OwnContents())
    save(saver, 6)
    [handle] = checkpoints_in(saver.path)
    assert (handle.path, handle.step) == (str(tmp_path / "6"), 6)
    assert handle.prefix == str(tmp_path / "6" / "ckpt")
    assert repr(handle) == f"Checkpoint({str(tmp_path / '6')!r}, step=6, local)"
    assert handle.prefix == latest_prefix(saver.path)
    assert [handle] == checkpoints_in(saver.path)
    save(saver, 7)
    assert [each.step for each in checkpoints_in(saver.path)] == [6, 7]
    with pytest.raises(TypeError, match=r"\.path"):
        os.path.exists(handle)


@pytest.mark.parametrize(("keep", "kept"), [(2, ["1", "3"]), (None, ["1", "2", "3"])])
def test_retention_does_not_count_a_commit_that_was_found_corrupt(tmp_path, keep, kept):
    saver = open_directory(tmp_path, OwnContents())
    save(saver, 1)
    save(saver, 2)
    damage(str(tmp_path / "2" / "ckpt.index"))
    saver = open_directory(tmp_path, OwnContents(), max_to_keep=keep)
    assert saver.newest().step == 1
    save(saver, 3)
    assert sorted(name for name in os.listdir(tmp_path) if name.isdigit()) == kept
    save(saver, 2)  # a new commit with the corrupt commit's number is valid
    assert saver.newest().step == 2


def test_a_commit_of_states_is_skipped_if_weights_are_needed(tmp_path):
    save(open_directory(tmp_path, OwnContents()), 1)
    save(open_directory(tmp_path), 2)
    assert open_directory(tmp_path).newest().step == 2
    problems = []
    contents = OwnContents()
    contents.needs_prefix = True
    saver = open_directory(tmp_path, contents)
    assert saver.newest(problems.append).step == 1
    (problem,) = problems
    assert "only named States" in problem
    assert str(tmp_path / "2") in problem


def test_a_commit_is_valid_if_later_work_has_too_many_open_files(
    tmp_path, broken, caplog
):
    broken(tmp_path / "checkpoint", errno.EMFILE)
    assert save(open_directory(tmp_path, OwnContents()), 2).step == 2
    assert "old files could not be deleted" in caplog.text
