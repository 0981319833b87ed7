"""Imported commits: the choice of the newer commit, and existing files."""

from __future__ import annotations

import errno
import os
import pathlib
import shutil

import pytest

from tests.checkpoint.fakes import OwnContents, open_directory, save
from tests.fakes.clock import FakeClock
from tests.fakes.storage import (
    FaultyFiles,
    FaultyObjectStore,
    SimulatedCrash,
    damage,
)
from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog
from tfpreempt.checkpoint.mirror import import_commit, upload
from tfpreempt.checkpoint.restore import restore
from tfpreempt.storage.open_store import open_store


def commit(directory, step, wall=0.0):
    """A commit at a time of its own."""
    clock = FakeClock(wall=wall)
    save(open_directory(directory, OwnContents(), clock=clock), step)
    return catalog.scan(str(directory))[0]


def mirrored(store, entry):
    upload.Upload(store, entry).run()


def start(directory, store):
    """Returns the step that a start on this disk restores."""
    saver = open_directory(directory, OwnContents())
    saver.start()
    local = saver.newest(print, print)
    if saver.fetch_newer(local, pytest.fail, pytest.fail, catalog.copies(store)):
        local = saver.newest(print, print)
    return None if local is None else local.step


@pytest.mark.parametrize(("here", "there"), [(30, 20), (20, 30), (20, 20)])
def test_of_two_machines_commits_of_one_sequence_the_later_is_restored(
    tmp_path, here, there
):
    """The first machine crashed before the upload of its last commit."""
    store, first, second = FaultyObjectStore(), tmp_path / "first", tmp_path / "second"
    commit(first, 10, wall=100.0)
    shutil.copytree(first, second)
    commit(first, here, wall=200.0)
    later = commit(second, there, wall=300.0)
    mirrored(store, later)
    for _ in range(3):
        assert start(first, store) == there
        assert catalog.scan(str(first))[0].token == later.token
    mirrored(store, commit(first, 40, wall=400.0))
    assert start(second, store) == 40


def test_an_old_download_is_deleted_at_the_next_import(tmp_path):
    store, here, there = FaultyObjectStore(), tmp_path / "here", tmp_path / "there"
    part = here / ".tfpreempt-staging" / "fetch-3-00000000" / "ckpt.index"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"half")
    assert start(here, store) is None
    assert part.exists()  # the next start reuses the download of a killed start
    mirrored(store, commit(there, 20))
    assert start(here, store) == 20
    assert not (here / ".tfpreempt-staging").exists()


def test_a_directory_of_the_user_with_the_name_of_downloads_stays(tmp_path):
    """Another user has renamed the directory above to that of staged downloads."""
    store, here, there = FaultyObjectStore(), tmp_path / "here", tmp_path / "there"
    notes = here / ".tfpreempt-staging" / "fetch-notes" / "one.tex"
    notes.parent.mkdir(parents=True)
    notes.write_text("years of work")
    mirrored(store, commit(there, 20))
    assert start(here, store) == 20
    assert notes.read_text() == "years of work"


def test_a_full_disk_does_not_lead_to_an_older_commit(tmp_path, monkeypatch):
    """As with an unreachable store: otherwise newer commits would be lost silently."""
    store, first, second = FaultyObjectStore(), tmp_path / "first", tmp_path / "second"
    commit(first, 10)
    shutil.copytree(first, second)
    mirrored(store, commit(second, 20))
    room = os.statvfs_result((4096, 4096, 9, 1, 1, 9, 9, 9, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: room)
    with pytest.raises(errors.SaveError, match="Free space"):
        start(first, store)


@pytest.mark.parametrize("name", ["COMMITTED", "MANIFEST.json", "ckpt.index"])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_copy_that_cannot_be_read_now_is_not_skipped(tmp_path, broken, name, number):
    """A start from scratch would overwrite the copy."""
    store, entry = open_store(f"file://{tmp_path}/mirror"), commit(tmp_path / "a", 10)
    mirrored(store, entry)
    copy = catalog.folder_name(entry.step, entry.token)
    broken(tmp_path / "mirror" / copy / name, number)
    with pytest.raises(errors.CheckpointError, match=os.strerror(number)) as caught:
        start(tmp_path / "b", store)
    assert not isinstance(caught.value, errors.CheckpointCorruptedError)
    if name != "ckpt.index":
        with pytest.raises(errors.CheckpointError, match=os.strerror(number)):
            import_commit.find(store, entry.token)


def test_a_newer_local_commit_is_kept(tmp_path):
    store, first, second = FaultyObjectStore(), tmp_path / "first", tmp_path / "second"
    commit(first, 10, wall=100.0)
    shutil.copytree(first, second)
    mirrored(store, commit(second, 30, wall=200.0))
    commit(first, 20, wall=300.0)
    assert start(first, store) == 20


def test_a_mirrored_copy_replaces_a_corrupt_commit_every_time(tmp_path):
    store = FaultyObjectStore()
    commit(tmp_path, 10)
    mirrored(store, commit(tmp_path, 20))
    for _ in range(3):
        for path in pathlib.Path(tmp_path).glob("20*/ckpt.index"):
            damage(str(path))
        assert start(tmp_path, store) == 20


def test_a_crash_while_a_corrupt_commit_is_replaced_loses_nothing(tmp_path):
    """TensorFlow's state file names the commit all the time."""
    store, files = FaultyObjectStore(), FaultyFiles()
    mirrored(store, commit(tmp_path / "base", 10))
    damage(str(tmp_path / "base" / "10" / "ckpt.index"))
    shutil.copytree(tmp_path / "base", tmp_path / "dry")
    (copy,) = catalog.contents(store)
    import_commit.bring(files, copy, str(tmp_path / "dry"))
    for index in range(len(files.operations)):
        directory = tmp_path / str(index)
        shutil.copytree(tmp_path / "base", directory)
        dying = FaultyFiles(fail_at=index, when="after")
        with pytest.raises(SimulatedCrash):
            import_commit.bring(dying, copy, str(directory))
        open_directory(directory, OwnContents()).start()
        restore.find_candidates(str(directory), pytest.fail)
        shutil.rmtree(directory)
