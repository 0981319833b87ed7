"""Which checkpoint is chosen: by sequence, verified, and the same for all workers."""

from __future__ import annotations

import errno
import os
import pty
import shutil
import sys

import pytest

from tests.checkpoint.fakes import (
    FlatContents,
    FunctionContents,
    Later,
    OwnContents,
    Words,
    open_directory,
    save,
)
from tests.fakes.storage import FaultyFiles, SimulatedCrash, damage
from tfpreempt import errors
from tfpreempt.checkpoint.bundles import bundle
from tfpreempt.checkpoint.directory import checkpoint_state
from tfpreempt.checkpoint.restore import restore
from tfpreempt.checkpoint.restore.handle import Checkpoint
from tfpreempt.checkpoint.state.state import StateRegistry
from tfpreempt.core import progress_bar
from tfpreempt.storage import file_reading


@pytest.fixture
def three(tmp_path):
    saver = open_directory(tmp_path, OwnContents(), max_to_keep=None)
    for step in (10, 30, 20):
        save(saver, step)
    return tmp_path


def steps(directory):
    return [c.step for c in restore.find_candidates(str(directory))]


def test_the_last_commit_wins_not_the_highest_step_or_newest_file(three):
    for name in ("10", "30"):
        os.utime(three / name / "COMMITTED", (4e9, 4e9))
    assert steps(three) == [20, 30, 10]


FILES = ["ckpt.index", "ckpt.data-00001-of-00002", "MANIFEST.json", "COMMITTED"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["flip", "cut", "remove", "empty"])
def test_any_damage_leads_to_the_one_before(three, name, how):
    path = three / "20" / name
    if how == "flip":
        damage(str(path), offset=5)
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    problems = []
    found = restore.newest_verified(str(three), problems.append)
    assert found.step == 30
    (problem,) = problems
    assert str(three / "20") in problem
    assert name not in FILES[:2] or str(three / "20" / name) in problem


@pytest.mark.parametrize("gone", [["COMMITTED"], ["COMMITTED", "MANIFEST.json"]])
def test_a_commit_without_its_marker_is_lost_and_stays(three, gone):
    """The state file names it, which no save does before the marker is there."""
    save(
        open_directory(three, OwnContents(), max_to_keep=None, random_state=Words("r")),
        40,
    )
    for name in gone:
        (three / "40" / name).unlink()
    saver = open_directory(three, OwnContents(), max_to_keep=None)
    saver.start()
    lost = []
    assert restore.newest_verified(str(three), pytest.fail, lost.append).step == 20
    (problem,) = lost
    assert problem.startswith(f"{str(three / '40' / 'COMMITTED')!r} is missing")
    assert f"Delete {str(three / '40')!r}, or restore" in problem
    save(saver, 40)
    assert (three / "40" / "ckpt.index").exists()
    (three / "checkpoint").unlink()  # no trace of the commit is left
    assert steps(three) == [40, 20, 30, 10]


def test_a_commit_written_in_place_is_lost_without_its_marker(tmp_path):
    """As in a bucket; files of a crashed save are removed."""
    save(open_directory(tmp_path, OwnContents()), 40)
    commit = (tmp_path / "40").rename(tmp_path / "commit-run-40")
    state_file = tmp_path / "checkpoint"
    state_file.write_text(state_file.read_text().replace("40/", "commit-run-40/"))
    (commit / "COMMITTED").unlink()
    open_directory(tmp_path, OwnContents(), clock=Later()).start()
    assert (commit / "ckpt.index").exists()
    lost = []
    assert restore.newest_verified(str(tmp_path), pytest.fail, lost.append) is None
    assert len(lost) == 1
    state_file.unlink()
    open_directory(tmp_path, OwnContents(), clock=Later()).start()
    assert not commit.exists()


def test_so_is_one_of_states_alone(tmp_path):
    """TensorFlow's state file cannot name it."""
    registry = StateRegistry()
    word = Words("word", registry=registry)
    for step in (1, 2, 3):
        save(open_directory(tmp_path, registry=registry), step)
    assert not (tmp_path / "1").exists()
    (tmp_path / "3" / "COMMITTED").unlink()
    saver = open_directory(tmp_path, registry=registry)
    saver.start()
    lost = []
    assert restore.newest_verified(str(tmp_path), pytest.fail, lost.append).step == 2
    [problem] = lost
    assert f"Delete {str(tmp_path / '3')!r}." in problem
    assert (tmp_path / "3" / "states" / "word.state").exists()
    del word


def test_so_is_one_of_a_save_fn_that_writes_no_files_of_tensorflow(tmp_path):
    class Folders(FunctionContents):
        def capture(self, save, *args, **kwargs):
            folder = tmp_path / f"model-{save.step}"
            folder.mkdir()
            (folder / "weights").write_bytes(b"weights")
            save.create_staging()
            save.prefix = str(folder)

    saver = open_directory(tmp_path, Folders(str(tmp_path)), random_state=Words("r"))
    for step in (1, 2):
        save(saver, step)
    (tmp_path / "model-2.tfpreempt" / "COMMITTED").unlink()
    lost = []
    assert restore.newest_verified(str(tmp_path), pytest.fail, lost.append).step == 1
    assert len(lost) == 1


def test_a_commit_that_is_marked_while_others_look_is_not_lost(three, monkeypatch):
    marker = three / "20" / "COMMITTED"
    data, named = marker.read_bytes(), checkpoint_state.named

    def asked(directory):
        marker.write_bytes(data)  # the state file is written after that
        return named(directory)

    marker.unlink()
    monkeypatch.setattr(checkpoint_state, "named", asked)
    assert restore.newest_verified(str(three), pytest.fail).step == 20


def crash_in_every_operation(directory, do):
    """Runs a function in copies of a directory, and crashes after each file operation.

    Yields:
        Each copy.
    """
    base = directory.with_name("base")
    directory.rename(base)
    shutil.copytree(base, directory)
    do(dry := FaultyFiles())
    for index in range(len(dry.operations)):
        shutil.rmtree(directory)
        shutil.copytree(base, directory)
        with pytest.raises(SimulatedCrash):
            do(FaultyFiles(fail_at=index, when="after"))
        yield directory


def start(directory, payload):
    """Returns the step that a start tries first; checks that no commit is lost."""
    open_directory(directory, payload).start()
    found = restore.find_candidates(str(directory), lambda text: None, pytest.fail)
    return found[0].step if found else None


@pytest.mark.parametrize("make_payload", [OwnContents, lambda: None])
def test_a_deletion_of_the_only_commit_that_is_cut_short_is_no_loss(
    tmp_path, make_payload
):
    directory = tmp_path / "run"
    word = Words("word", registry=(registry := StateRegistry()))
    save(open_directory(directory, make_payload(), registry=registry), 10)

    def delete(files):
        saver = open_directory(directory, make_payload(), files=files)
        saver.delete(Checkpoint(str(directory / "10")))

    found = [
        start(each, make_payload())
        for each in crash_in_every_operation(directory, delete)
    ]
    del word
    assert set(found) == {10, None}
    assert not (directory / "10").exists()
    assert not (directory / "checkpoint").exists()


def test_an_incomplete_witness_is_deleted_with_its_commit(tmp_path):
    """Otherwise its directory would stay, with only the witness."""

    def save_one(files):
        save(open_directory(tmp_path / "run", files=files), 1)

    save_one(dry := FaultyFiles())
    written = [each.path.endswith(".was-committed.tmp") for each in dry.operations]
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(SimulatedCrash):
        save_one(FaultyFiles(fail_at=written.index(True), when="after"))
    saver = open_directory(tmp_path / "run")
    saver.delete(Checkpoint(str(tmp_path / "run" / "1")))
    assert not (tmp_path / "run" / "1").exists()


def test_a_killed_save_under_the_name_of_a_deleted_commit_is_no_loss(tmp_path):
    """TensorFlow's state file still names the commit that was deleted by hand."""
    directory = tmp_path / "run"
    save(open_directory(directory, OwnContents()), 10)
    shutil.rmtree(directory / "10")

    def save_again(files):
        save(open_directory(directory, OwnContents(), files=files), 10)

    found = [
        start(each, OwnContents())
        for each in crash_in_every_operation(directory, save_again)
    ]
    assert set(found) == {10, None}


def test_a_killed_save_of_a_save_fn_is_no_loss(tmp_path):
    """Its file is complete, and belongs to the program until there is a commit."""
    directory = tmp_path / "run"
    payload = FunctionContents(str(directory))
    save(open_directory(directory, payload), 1)

    def save_both(files):
        saver = open_directory(directory, payload, files=files)
        save(saver, 1, attempt="anew")
        save(saver, 2)

    found = []
    for each in crash_in_every_operation(directory, save_both):
        found.append(start(each, payload))
        assert not list(each.glob("*.tfpreempt-intent"))
    assert set(found) == {1, 2, None}


@pytest.mark.parametrize("dies_at", ["MANIFEST.json", "ckpt-5.tfpreempt", "COMMITTED"])
def test_a_users_save_over_a_killed_save_belongs_to_the_user(tmp_path, dies_at):
    payload = FlatContents(str(tmp_path))
    dry = FaultyFiles()
    save(
        open_directory(
            tmp_path / "dry", FlatContents(str(tmp_path / "dry")), files=dry
        ),
        5,
    )
    fail_at = next(
        index
        for index, operation in enumerate(dry.operations)
        if operation.name == "rename" and operation.path.endswith(dies_at)
    )
    with pytest.raises(SimulatedCrash):
        save(open_directory(tmp_path, payload, files=FaultyFiles(fail_at=fail_at)), 5)
    assert start(tmp_path, payload) is None
    assert not (tmp_path / "ckpt-5.tfpreempt").exists()
    (tmp_path / "ckpt-5.index").write_bytes(b"by the user's own manager.save()")
    open_directory(tmp_path, payload).start()
    (candidate,) = restore.find_candidates(str(tmp_path), pytest.fail)
    assert candidate.kind.value == "external"


def test_a_users_save_over_a_commit_without_marker_is_the_users(tmp_path):
    save(open_directory(tmp_path, FlatContents(str(tmp_path))), 1)
    marker = tmp_path / "ckpt-1.tfpreempt" / "COMMITTED"
    marked = marker.stat().st_mtime
    marker.unlink()
    assert restore.find_candidates(str(tmp_path), lambda text: None) == []
    (tmp_path / "ckpt-1.index").write_bytes(b"by the user's own manager.save()")
    os.utime(tmp_path / "ckpt-1.index", (marked + 10, marked + 10))
    (candidate,) = restore.find_candidates(str(tmp_path), pytest.fail)
    assert candidate.kind.value == "external"


def test_nothing_is_deleted_if_the_state_file_is_unreadable(three, monkeypatch):
    """The file may name the commit without a marker."""
    (three / "20" / "COMMITTED").unlink()
    real = file_reading.open_file

    def fail(path):
        if path == str(three / "checkpoint"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path)

    monkeypatch.setattr(file_reading, "open_file", fail)
    open_directory(three, OwnContents()).start()
    monkeypatch.undo()
    lost = []
    assert restore.newest_verified(str(three), pytest.fail, lost.append).step == 30
    assert len(lost) == 1


@pytest.mark.parametrize("name", ["COMMITTED", "MANIFEST.json"])
@pytest.mark.parametrize("how", ["flip", "remove", "remove both"])
def test_a_corrupt_flat_commit_is_no_foreign_checkpoint(tmp_path, name, how):
    """Otherwise only TensorFlow's part would be restored, without the States."""
    payload = FlatContents(str(tmp_path))
    payload.committed = lambda: None
    saver = open_directory(tmp_path, payload, random_state=Words("r"))
    for step in (1, 2):
        save(saver, step)
    sidecar = tmp_path / "ckpt-2.tfpreempt"
    if how == "flip":
        damage(str(sidecar / name))
    elif how == "remove":
        (sidecar / name).unlink()
    else:
        (sidecar / "COMMITTED").unlink()
        (sidecar / "MANIFEST.json").unlink()
    open_directory(tmp_path, payload).start()
    lost = []
    assert restore.newest_verified(str(tmp_path), pytest.fail, lost.append).step == 1
    assert len(lost) == 1


def test_a_corrupt_checkpoint_named_in_the_state_file_is_a_loss(tmp_path):
    """Any other file may only be called as an index of a checkpoint is."""
    (tmp_path / "faiss.index").write_bytes(b"of another program")
    (tmp_path / "ckpt-1.index").write_bytes(b"cut sho")
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "ckpt-1"\n')
    skipped, lost = [], []
    found = restore.newest_verified(str(tmp_path), skipped.append, lost.append)
    assert found is None
    assert ["faiss" in each for each in skipped] == [True]
    assert ["ckpt-1" in each for each in lost] == [True]


def test_data_without_their_index_are_lost_if_they_were_the_newest(tmp_path):
    (tmp_path / "ckpt-2.data-00000-of-00001").write_bytes(b"data")
    (tmp_path / "ckpt-1.data-00000-of-00001").write_bytes(b"a deletion was cut short")
    named = b'model_checkpoint_path: "ckpt-2"\nall_model_checkpoint_paths: "ckpt-1"\n'
    (tmp_path / "checkpoint").write_bytes(named)
    lost = []
    assert restore.newest_verified(str(tmp_path), pytest.fail, lost.append) is None
    assert any("ckpt-2.index" in each for each in lost)


def test_data_are_lost_if_no_checkpoint_has_an_index(tmp_path):
    """A manager keeps the newest checkpoint, so no interrupted deletion leaves this."""
    (tmp_path / "ckpt-1.data-00000-of-00001").write_bytes(b"data")
    named = b'model_checkpoint_path: "ckpt-2"\nall_model_checkpoint_paths: "ckpt-1"\n'
    (tmp_path / "checkpoint").write_bytes(named)
    lost = []
    assert restore.newest_verified(str(tmp_path), pytest.fail, lost.append) is None
    assert ["ckpt-1.index" in each for each in lost] == [True]


def test_so_are_others_while_an_older_one_is_there(tmp_path):
    """A manager deletes the oldest first."""
    names = [f"ckpt-{step}" for step in (1, 2, 3)]
    for name in names:
        (tmp_path / f"{name}.index").write_bytes(bundle.to_bytes({b"": b""}))
        (tmp_path / f"{name}.data-00000-of-00001").write_bytes(b"")
    kept = checkpoint_state.CheckpointStateFile(latest=names[-1], paths=tuple(names))
    (tmp_path / "checkpoint").write_bytes(checkpoint_state.to_bytes(kept))
    (tmp_path / "ckpt-2.index").unlink()
    (tmp_path / "ckpt-3.index").write_bytes(b"cut sho")
    lost = []
    restore.newest_verified(str(tmp_path), pytest.fail, lost.append)
    assert any("ckpt-2.index" in each for each in lost)
    (tmp_path / "ckpt-1.index").unlink()
    lost.clear()
    restore.newest_verified(str(tmp_path), pytest.fail, lost.append)
    assert not any("ckpt-2.index" in each for each in lost)


def test_a_commit_of_a_save_fn_without_its_index_is_reported(tmp_path):
    """TensorFlow's state file does not name such commits."""
    saver = open_directory(tmp_path, FunctionContents(str(tmp_path)))
    for step in (1, 2, 3):
        save(saver, step)
    (tmp_path / "ckpt-3.index").unlink()
    open_directory(tmp_path, FunctionContents(str(tmp_path))).start()
    lost = []
    newest = restore.newest_verified(str(tmp_path), pytest.fail, lost.append)
    assert newest.step == 2
    assert ["ckpt-3.index" in each for each in lost] == [True]


def test_a_deletion_that_was_cut_short_is_finished_with_the_next_sweep(tmp_path):
    saver = open_directory(tmp_path, FunctionContents(str(tmp_path)))
    for step in (1, 2, 3):
        save(saver, step)
    (tmp_path / "ckpt-1.index").unlink()
    open_directory(tmp_path, FunctionContents(str(tmp_path))).start()
    assert not (tmp_path / "ckpt-1.tfpreempt").exists()
    assert (tmp_path / "ckpt-2.tfpreempt").exists()


def test_corruption_found_only_by_the_restore_has_advice(tmp_path):
    class Damaged(OwnContents):
        def restore(self, prefix, with_data=True, is_partial=False):
            raise errors.CheckpointCorruptedError(f"{prefix} has another checksum.")

    prefix = tmp_path / "ckpt-1"
    index = bundle.to_bytes({b"": b""})
    prefix.with_suffix(".index").write_bytes(index)
    prefix.with_suffix(".data-00000-of-00001").write_bytes(b"")
    loader = open_directory(tmp_path, Damaged())
    with pytest.raises(errors.CheckpointCorruptedError) as raised:
        loader.restore(loader.newest())
    assert str(raised.value) == (
        f"{prefix} has another checksum. Put the files back from a copy; or move "
        f"'{prefix}' away, to resume from an older checkpoint"
    )


def test_a_file_that_is_a_link_is_not_restored_from(three):
    path = three / "20" / "ckpt.index"
    path.rename(three / "elsewhere")
    os.symlink(three / "elsewhere", path)
    problems = []
    assert restore.newest_verified(str(three), problems.append).step == 30
    assert "links are not followed" in problems[0]


def test_a_manifest_of_another_commit_is_noticed(three):
    shutil.copy(three / "10" / "MANIFEST.json", three / "20" / "MANIFEST.json")
    problems = []
    assert restore.newest_verified(str(three), problems.append).step == 30
    assert "do not match" in problems[0]


def test_sequences_continue_above_a_corrupt_commit(three):
    damage(str(three / "20" / "ckpt.index"))
    commit = save(open_directory(three, OwnContents(), max_to_keep=None), 40)
    assert commit.sequence == 4
    assert steps(three) == [40, 20, 30, 10]


def test_tokens_identify_commits(three):
    found = restore.find_candidates(str(three))
    assert len({c.token for c in found}) == 3
    loader = open_directory(three)
    for candidate in found:
        again = loader.find(candidate.token)
        assert (again.path, again.token) == (candidate.path, candidate.token)
    assert loader.find("4-00000000") is None


def test_an_empty_and_a_missing_directory(tmp_path):
    assert restore.newest_verified(str(tmp_path)) is None
    assert restore.newest_verified(str(tmp_path / "missing")) is None


def test_a_directory_that_cannot_be_read(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.CheckpointError, match="cannot be read"):
        restore.find_candidates(str(tmp_path / "file"))


def test_strangers_are_no_candidates(three):
    (three / "77").mkdir()
    (three / "77" / "notes.txt").write_text("mine")
    (three / "best").mkdir()
    (three / "x.tfpreempt").write_text("a file")
    os.symlink(three / "10", three / "99")
    assert steps(three) == [20, 30, 10]


def test_foreign_checkpoints_are_ranked_by_the_time_of_markers(three):
    for position, name in enumerate(["10", "30", "20"]):
        os.utime(three / name / "COMMITTED", (1000 * position, 1000 * position))
    for name, time in (("old", 500), ("middle", 1500), ("new", 2500)):
        (three / f"{name}.index").write_bytes(b"not looked into yet")
        os.utime(three / f"{name}.index", (time, time))
    names = [os.path.basename(c.path) for c in restore.find_candidates(str(three))]
    assert names == ["new", "20", "middle", "30", "old", "10"]
    problems = []
    assert restore.newest_verified(str(three), problems.append).step == 20
    assert "new" in problems[0]


def test_a_users_save_over_a_commit_counts_as_the_users(tmp_path):
    payload = FlatContents(str(tmp_path))
    save(open_directory(tmp_path, payload), 1)
    assert restore.find_candidates(str(tmp_path))[0].kind.value == "flat"
    marked = (tmp_path / "ckpt-1.tfpreempt" / "COMMITTED").stat().st_mtime
    (tmp_path / "ckpt-1.index").write_bytes(b"by the user's own manager.save()")
    os.utime(tmp_path / "ckpt-1.index", (marked + 10, marked + 10))
    (candidate,) = restore.find_candidates(str(tmp_path))
    assert candidate.kind.value == "external"


def test_a_copied_directory_still_has_its_commits(tmp_path):
    save(open_directory(tmp_path / "a", FlatContents(str(tmp_path / "a"))), 1)
    os.utime(tmp_path / "a" / "ckpt-1.index", (4e9, 4e9))
    (candidate,) = restore.find_candidates(str(tmp_path / "a"))
    assert (candidate.kind.value, candidate.step) == ("flat", 1)


def test_an_incomplete_flat_save_counts_after_a_save_of_the_user(tmp_path):
    def die(name):
        if name.endswith(".index"):
            (tmp_path / name).write_bytes(b"torn")
            raise KeyboardInterrupt

    saver = open_directory(tmp_path, FlatContents(str(tmp_path), die))
    with pytest.raises(KeyboardInterrupt):
        save(saver, 1)
    assert restore.find_candidates(str(tmp_path)) == []
    saver = open_directory(tmp_path, FlatContents(str(tmp_path)))
    saver.start()
    assert restore.find_candidates(str(tmp_path)) == []
    (tmp_path / "ckpt-1.index").write_bytes(b"anew")
    (candidate,) = restore.find_candidates(str(tmp_path))
    assert candidate.kind.value == "external"
    save(saver, 1)
    (candidate,) = restore.find_candidates(str(tmp_path))
    assert candidate.kind.value == "flat"


@pytest.mark.parametrize("is_settled", [True, False])
def test_files_of_two_incomplete_saves_are_no_checkpoint(tmp_path, is_settled):
    """The second save crashed before its first write, with the first save's index."""

    def die(name):
        if name.endswith(".index"):
            (tmp_path / name).write_bytes(b"torn")
            raise KeyboardInterrupt

    def die_at_once(name):
        raise KeyboardInterrupt

    for death in (die, die_at_once):
        saver = open_directory(tmp_path, FlatContents(str(tmp_path), death))
        if is_settled:
            saver.start()
        with pytest.raises(KeyboardInterrupt):
            save(saver, 1)
        assert restore.find_candidates(str(tmp_path)) == []
    open_directory(tmp_path, FlatContents(str(tmp_path))).start()
    assert restore.find_candidates(str(tmp_path)) == []


@pytest.mark.timeout(20)
def test_the_check_of_a_large_commit_is_logged_and_shows_a_bar(
    three, monkeypatch, caplog
):
    restore.verify(restore.find_candidates(str(three))[0])
    assert caplog.messages == []
    monkeypatch.setattr(restore, "MUCH", 1000)
    monkeypatch.setattr(progress_bar, "_QUIET_SECONDS", 0.0)
    terminal, shown = pty.openpty()
    with open(shown, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        found = restore.newest_verified(str(three))
        bar = b""
        while b"checking step %d" % found.step not in bar:
            bar += os.read(terminal, 1 << 16)  # a terminal returns its present input
    os.close(terminal)
    (said,) = caplog.messages
    assert f"GiB of {found.path} to verify the checksums" in said


RECORDS = [b"", b"[]", b"7", b"null", b'"half"', b"{", b"\xff", b"[" * 100_000]


@pytest.mark.parametrize("record", RECORDS)
def test_an_unreadable_intent_is_an_incomplete_save(tmp_path, record):
    (tmp_path / "ckpt-1.index").write_bytes(b"somebody's")
    assert len(restore.find_candidates(str(tmp_path))) == 1
    (tmp_path / "ckpt-1.tfpreempt-intent").write_bytes(record)
    assert restore.find_candidates(str(tmp_path)) == []
    open_directory(tmp_path, FlatContents(str(tmp_path))).start()
    assert restore.find_candidates(str(tmp_path)) == []


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["COMMITTED", "MANIFEST.json"])
def test_a_pipe_in_a_commit_is_damage(three, name):
    """Opening a pipe for reading waits for a writer."""
    (three / "20" / name).unlink()
    os.mkfifo(three / "20" / name)
    lost = []
    found = restore.newest_verified(str(three), pytest.fail, lost.append)
    assert found.step == 30
    assert len(lost) == 1
    save(open_directory(three, OwnContents()), 40)
    assert steps(three)[0] == 40


@pytest.mark.timeout(20)
def test_a_pipe_as_state_file_without_a_commit_is_an_error(tmp_path):
    os.mkfifo(tmp_path / "checkpoint")
    with pytest.raises(errors.CheckpointError, match="Not a regular file"):
        restore.find_candidates(str(tmp_path))
