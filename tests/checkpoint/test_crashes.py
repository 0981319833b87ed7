"""A crash or an error at every file operation: the old commit or the new one, whole."""

from __future__ import annotations

import errno
import shutil

import pytest

from tests.checkpoint.fakes import (
    FlatContents,
    OwnContents,
    Words,
    content,
    open_directory,
    save,
)
from tests.fakes.storage import FaultyFiles, SimulatedCrash
from tfpreempt import errors
from tfpreempt.checkpoint.state.state import StateRegistry

pytestmark = pytest.mark.slow  # searches long


def with_state(directory, payload, files=None, text="old"):
    registry = StateRegistry()
    word = Words("word", text, registry=registry)
    saver = open_directory(
        directory, payload, files=files, registry=registry, max_to_keep=1
    )
    return saver, word


def make_payload(form, directory):
    return OwnContents() if form == "own" else FlatContents(str(directory))


def save_new(form, directory, files):
    """Step 2 over step 1, with a fault somewhere."""
    payload = make_payload(form, directory)
    payload.kept = [str(directory / "ckpt-1")]
    saver, word = with_state(directory, payload, files, "new")
    saver.start()
    return save(saver, 2), word


def look(form, directory):
    """The step that a restarted run restores, checked to be all of a piece."""
    payload = make_payload(form, directory)
    saver, word = with_state(directory, payload, text="nothing")
    candidate = saver.newest()
    assert candidate is not None
    restored = saver.restore(candidate)
    assert payload.restored_from == content(restored.step)
    assert word.text == {1: "old", 2: "new"}[restored.step]
    return restored.step, payload


def count_operations(form, base):
    files = FaultyFiles()
    save_new(form, base, files)
    return files.operations


@pytest.fixture
def base(tmp_path, form):
    directory = tmp_path / "base"
    saver, word = with_state(directory, make_payload(form, directory))
    save(saver, 1)
    assert word.text == "old"
    return directory


@pytest.mark.parametrize("form", ["own", pytest.param("flat", marks=pytest.mark.slow)])
# A crash before an operation equals a crash after the operation before it.
@pytest.mark.parametrize(
    "when", [pytest.param("before", marks=pytest.mark.slow), "after", "torn"]
)
def test_after_a_crash_anywhere_there_is_one_intact_commit(tmp_path, base, form, when):
    shutil.copytree(base, tmp_path / "dry")
    operations = count_operations(form, tmp_path / "dry")
    marker = next(
        i
        for i, operation in enumerate(operations)
        if operation.name == "rename" and operation.path.endswith("COMMITTED")
    )
    assert len(operations) > 12
    for index, operation in enumerate(operations):
        if when == "torn" and operation.name != "write":
            continue  # all but writes are done or not
        directory = tmp_path / f"{when}-{index}"
        shutil.copytree(base, directory)
        files = FaultyFiles(fail_at=index, when=when)
        with pytest.raises(SimulatedCrash):
            save_new(form, directory, files)
        step, payload = look(form, directory)
        is_marked = index > marker or (index == marker and when == "after")
        assert step == (2 if is_marked else 1), operation
        # The next run cleans up, saves, and then there is no doubt left.
        payload.kept = []
        saver, _ = with_state(directory, payload, text="new")
        saver.start()
        assert look(form, directory)[0] == step
        save(saver, 2, attempt="again")
        assert look(form, directory)[0] == 2
        assert not (directory / ".tfpreempt-staging").exists()
        shutil.rmtree(directory)


@pytest.mark.parametrize("form", ["own", pytest.param("flat", marks=pytest.mark.slow)])
def test_a_full_disk_anywhere_is_a_clear_error_or_a_commit(tmp_path, base, form):
    shutil.copytree(base, tmp_path / "dry")
    operations = count_operations(form, tmp_path / "dry")
    for index, operation in enumerate(operations):
        directory = tmp_path / f"full-{index}"
        shutil.copytree(base, directory)
        full = OSError(errno.ENOSPC, "No space left on device", operation.path)
        files = FaultyFiles(fail_at=index, error=full)
        try:
            commit, _ = save_new(form, directory, files)
        except errors.SaveError as error:
            commit, text = None, str(error)
        if commit is not None:
            assert look(form, directory)[0] == 2
        else:
            assert "disk is full" in text
            assert "max_to_keep" in text
            assert look(form, directory)[0] in (1, 2)
        shutil.rmtree(directory)


@pytest.mark.parametrize("form", ["flat"])
def test_a_crash_while_the_manager_writes_leaves_the_old_one(tmp_path, base, form):
    for position in range(3):
        directory = tmp_path / f"position-{position}"
        shutil.copytree(base, directory)
        left = [position]

        def die(name, left=left):
            if left[0] == 0:
                raise SimulatedCrash(name)
            left[0] -= 1

        saver, _ = with_state(directory, FlatContents(str(directory), die), text="new")
        with pytest.raises(SimulatedCrash):
            save(saver, 2)
        assert look(form, directory)[0] == 1
        saver.start()
        assert look(form, directory)[0] == 1


@pytest.mark.parametrize("form", ["own", "flat"])
def test_everything_is_synced_before_the_marker_gets_its_name(tmp_path, base, form):
    operations = count_operations(form, base)
    marker = next(
        i
        for i, operation in enumerate(operations)
        if operation.name == "rename" and operation.path.endswith("COMMITTED")
    )
    assert operations[marker - 1].name == "sync_file"
    assert operations[marker + 1].name == "sync_dir"
    synced = {o.path.rsplit("/", 1)[1] for o in operations[:marker] if "sync" in o.name}
    stem = "ckpt" if form == "own" else "ckpt-2"
    assert {f"{stem}.index", f"{stem}.data-00000-of-00002"} <= synced
    assert {"word.state", "MANIFEST.json.tmp", "states", base.name} <= synced
    removed = [i for i, o in enumerate(operations) if o.name == "remove"]
    assert min(removed) > marker  # first the new commit, then deletions
