"""An upload, and order in the store: a death at any request shows nothing half."""

from __future__ import annotations

import io
import itertools
import os
import shutil

import pytest

from tests.checkpoint.fakes import FlatContents, open_directory, save
from tests.checkpoint.uploads import (
    IN_PARTS,
    commit,
    folders,
    newest,
    uploaded,
)
from tests.fakes.storage import FaultyObjectStore, SimulatedCrash, damage
from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog
from tfpreempt.checkpoint.directory.retention import RetentionPolicy
from tfpreempt.checkpoint.mirror import upload
from tfpreempt.checkpoint.mirror.mirror_retention import Retention
from tfpreempt.storage.open_store import open_store

PATIENCE = 20.0  # seconds after which a hanging test fails


def test_an_upload_is_the_commit_byte_for_byte(tmp_path):
    store, entry = FaultyObjectStore(), commit(tmp_path, 5)
    uploaded(store, entry)
    (found,) = catalog.commits(store, pytest.fail)
    assert found.token == entry.token
    assert found.manifest == entry.manifest
    for each in entry.manifest.files:
        target = io.BytesIO()
        store.get(f"{found.name}/{each.name}", target)
        assert target.getvalue() == (tmp_path / "5" / each.name).read_bytes()


def test_the_marker_is_put_last_and_if_absent(tmp_path):
    store = FaultyObjectStore()
    uploaded(store, commit(tmp_path, 5))
    puts = [name for what, name in store.operations if what == "put_if_absent"]
    assert puts[-1].endswith("/COMMITTED")
    assert puts[-2].endswith("/MANIFEST.json")


def test_a_flat_commit_is_uploaded_with_its_sidecar(tmp_path):
    store = FaultyObjectStore()
    save(open_directory(tmp_path, FlatContents(tmp_path)), 7)
    uploaded(store, newest(tmp_path))
    (folder,) = folders(store)
    assert f"{folder}/ckpt-7.index" in store.list()


whole_or_in_parts = pytest.mark.parametrize(
    "way", [{"threads": 1}, IN_PARTS], ids=["whole", "in parts"]
)


@whole_or_in_parts
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_uploader_killed_at_any_request_shows_nothing_incomplete(
    tmp_path, when, way
):
    entry = commit(tmp_path, 5)
    for number in itertools.count():
        store = FaultyObjectStore({number: SimulatedCrash("killed")}, when=when)
        try:
            uploaded(store, entry, **way)
        except SimulatedCrash:
            store.revive()
            assert len(folders(store)) <= 1, f"killed at request {number}"
            uploaded(store, entry, **way)  # the next run finishes it
            assert len(folders(store)) == 1
            Retention(store, RetentionPolicy(), 0).run()
            assert {name.split("/")[0] for name in store.list()} == set(folders(store))
            continue
        break
    assert number > 8


@whole_or_in_parts
@pytest.mark.parametrize("when", ["before", "after"])
def test_the_next_commit_deletes_files_of_a_killed_upload(tmp_path, when, way):
    old, new = commit(tmp_path, 5), commit(tmp_path, 6)
    for number in itertools.count():
        store = FaultyObjectStore({number: SimulatedCrash("killed")}, when=when)
        try:
            uploaded(store, old, **way)
        except SimulatedCrash:
            store.revive()
            uploaded(store, new, **way)
            Retention(store, RetentionPolicy(), 0).run()
            whole = folders(store)
            assert {name.split("/")[0] for name in store.list()} == set(whole)
            continue
        break


@pytest.mark.slow  # a deletion for each of its requests
@whole_or_in_parts
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_deletion_killed_at_any_request_shows_nothing_incomplete(tmp_path, when, way):
    entries = [commit(tmp_path, step) for step in (5, 6, 7)]
    for number in itertools.count():
        store = FaultyObjectStore(when=when)
        for entry in entries:
            uploaded(store, entry, **way)
        store.fail_from(len(store.operations) + number, SimulatedCrash("killed"))
        try:
            Retention(store, RetentionPolicy(max_to_keep=1), 0).run()
        except SimulatedCrash:
            store.revive()
            assert folders(store)[0].startswith("7.")
            Retention(store, RetentionPolicy(max_to_keep=1), 0).run()
            assert {name.split("/")[0] for name in store.list()} == set(folders(store))
            continue
        break
    assert number > 10
    store.revive()
    assert len(folders(store)) == 1


def test_only_objects_of_tfpreempt_are_deleted(tmp_path):
    store = FaultyObjectStore()
    for step in (5, 6):
        uploaded(store, commit(tmp_path, step))
    old = folders(store)[-1]
    for name in (f"{old}/notes.txt", "other/MANIFEST.json", "7.x/file", "readme"):
        store.put_if_absent(name, io.BytesIO(b"mine"))
    Retention(store, RetentionPolicy(max_to_keep=1), 0).run()
    assert [name for name in store.list() if name.startswith(old)] == [
        f"{old}/notes.txt"
    ]
    assert {"other/MANIFEST.json", "7.x/file", "readme"} <= set(store.list())


@pytest.mark.parametrize("name", ["", "/x", "../../x", "a\nb", "a\0b", "x" * 2000])
def test_an_object_with_an_unsafe_name_does_not_stop_the_cleanup(tmp_path, name):
    """The web pages of clouds create an object "<folder>/" for a folder."""
    store = FaultyObjectStore()
    dead = "1.1-00000000"
    store._objects |= {f"{dead}/{name}": b"", f"{dead}/ckpt.index": b""}
    uploaded(store, commit(tmp_path, 5))
    uploaded(store, commit(tmp_path, 6))
    Retention(store, RetentionPolicy(max_to_keep=1), 0).run()
    assert len(folders(store)) == 1
    assert list(store.list(dead)) == [f"{dead}/{name}"]


def test_a_temporarily_unreadable_commit_is_not_deleted(tmp_path, broken):
    """Without its manifest, all files of the commit were deleted."""
    store = open_store(str(tmp_path / "mirror"))
    retention = Retention(store, RetentionPolicy(), 0)
    for step in (5, 6):
        uploaded(store, commit(tmp_path / "run", step))
        retention.run()
    assert len(catalog.copies(store)) == 2
    uploaded(store, commit(tmp_path / "run", 7))
    old = catalog.copies(store)[-1].name
    store.put_if_absent(f"{old}/notes.txt", io.BytesIO(b"mine"))
    there = list(store.list(old))
    broken(tmp_path / "mirror" / old / "MANIFEST.json")
    with pytest.raises(errors.CheckpointError, match="Input/output error"):
        retention.run()
    assert list(store.list(old)) == there


def folder_of(entry):
    return catalog.folder_name(entry.step, entry.token)


def test_a_broken_transfer_is_sent_again(tmp_path):
    store, entry = FaultyObjectStore(), commit(tmp_path, 5)
    name = f"{folder_of(entry)}/{entry.manifest.files[0].name}"
    put, broken = store.put_if_absent, []

    def put_badly(given, file, **kwargs):
        created = put(given, file, **kwargs)
        if given == name and not broken:
            broken.append(given)
            store.damage(given)
        return created

    store.put_if_absent = put_badly
    with pytest.raises(errors.SaveError, match="a wrong checksum"):
        upload.Upload(store, entry).run()
    assert folders(store) == []
    upload.Upload(store, entry).run()
    assert folders(store) == [folder_of(entry)]


def test_a_corrupt_local_commit_is_not_uploaded(tmp_path):
    store, entry = FaultyObjectStore(), commit(tmp_path, 5)
    damage(str(tmp_path / "5" / "ckpt.index"))
    with pytest.raises(errors.CheckpointCorruptedError, match=r"ckpt\.index"):
        uploaded(store, entry)
    assert folders(store) == []


@pytest.mark.parametrize("kind", ["link", "link above", "pipe"])
def test_files_outside_of_the_directory_are_not_uploaded(tmp_path, kind):
    """Another user has replaced a file of the commit by a link."""
    store, entry = FaultyObjectStore(), commit(tmp_path / "run", 5)
    secret = shutil.copytree(tmp_path / "run" / "5", tmp_path / "secret")
    name = entry.manifest.files[0].name
    path = tmp_path / "run" / "5" / name
    if kind == "link above":
        shutil.rmtree(tmp_path / "run" / "5")
        (tmp_path / "run" / "5").symlink_to(secret)
    else:
        path.unlink()
        os.mkfifo(path) if kind == "pipe" else path.symlink_to(secret / name)
    with pytest.raises((errors.TfpreemptError, OSError)):
        uploaded(store, entry)
    assert not any(each.endswith(f"/{name}") for each in store.list())
