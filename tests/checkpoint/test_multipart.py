"""Multipart uploads of large files: parts, reuse of parts, and cleanup."""

from __future__ import annotations

import functools
import io
import itertools
import logging

import pytest

from tests.checkpoint.uploads import (
    IN_PARTS,
    commit,
    folders,
    left_parts,
    uploaded,
)
from tests.fakes.gcs import GcsServer
from tests.fakes.storage import FaultyObjectStore, SimulatedCrash, damage
from tfpreempt import errors
from tfpreempt.checkpoint.directory.retention import RetentionPolicy
from tfpreempt.checkpoint.mirror import upload
from tfpreempt.checkpoint.mirror.download_target import Range
from tfpreempt.checkpoint.mirror.mirror_retention import Retention
from tfpreempt.storage.object_store import MAX_PARTS
from tfpreempt.storage.open_store import open_store

MIB = 1 << 20
GIB = 1 << 30
FILES = 3  # of a commit
PARTS = 4  # of each


def kept_in_order(store, max_to_keep=2):
    Retention(store, RetentionPolicy(max_to_keep=max_to_keep), 0).run()


def done(store, name):
    return [each for what, each in store.operations if what == name]


# --- which files, and how many parts -------------------------------------------------


@pytest.mark.parametrize(
    ("size", "total", "count"),
    [
        (0, 0, 1),
        (64 * MIB, 64 * MIB, 1),
        (64 * MIB + 1, 64 * MIB + 1, 2),
        (512 * MIB, 512 * MIB, 8),
        (2 * GIB, 2 * GIB + 5, 32),
        (2 * GIB + 1, 2 * GIB + 1, 32),
        (500 * GIB, 500 * GIB, 32),
        (GIB, 8 * GIB, 1),  # eight equal files keep eight threads busy as they are
        (GIB + 1, 8 * GIB, 17),
    ],
)
def test_how_many_parts_a_file_has(size, total, count):
    found = upload.parts_of(size, total, threads=8, smallest=64 * MIB)
    assert len(found) == count <= MAX_PARTS
    assert found[0].offset == 0
    for one, other in itertools.pairwise(found):
        assert other.offset == one.offset + one.length
        assert one.length >= 64 * MIB
    assert found[-1] == Range(found[-1].offset, size - found[-1].offset)


def test_a_large_file_is_uploaded_in_parts_and_composed(tmp_path):
    store, entry = FaultyObjectStore(), commit(tmp_path, 5)
    uploaded(store, entry, **IN_PARTS)
    (folder,) = folders(store)
    names = [each.name for each in entry.manifest.files]
    assert sorted(done(store, "compose")) == sorted(f"{folder}/{n}" for n in names)
    assert len(left_parts(store)) == FILES * PARTS
    kept_in_order(store)
    assert left_parts(store) == []
    assert folders(store) == [folder]


def test_the_marker_waits_for_no_deletion(tmp_path):
    store = FaultyObjectStore()
    uploaded(store, commit(tmp_path, 5), **IN_PARTS)
    assert done(store, "delete") == []


def test_a_small_file_is_uploaded_in_one_piece(tmp_path):
    store = FaultyObjectStore()
    uploaded(store, commit(tmp_path, 5))
    assert done(store, "compose") == []
    assert not any(name.startswith("parts/") for _, name in store.operations)


def test_a_store_that_cannot_compose_gets_whole_files(tmp_path):
    store = open_store(str(tmp_path / "mirror"))
    uploaded(store, commit(tmp_path / "run", 5), **IN_PARTS)
    kept_in_order(store)
    (folder,) = store.folders()
    found = sorted(name.removeprefix(f"{folder}/") for name in store.list())
    assert found == sorted(
        str(each.relative_to(tmp_path / "run" / "5"))
        for each in (tmp_path / "run" / "5").iterdir()
    )


@pytest.mark.parametrize("killed_at", [None, 9])
def test_each_byte_counts_once(tmp_path, killed_at):
    store, entry, counts = FaultyObjectStore(), commit(tmp_path, 5), []
    if killed_at is not None:
        store.fail_from(killed_at, SimulatedCrash("killed"))
        with pytest.raises(SimulatedCrash):
            uploaded(store, entry, **IN_PARTS)
        store.revive()
    uploaded(store, entry, on_bytes=counts.append, **IN_PARTS)
    assert sum(counts) == entry.manifest.bytes


# --- what a dead upload has left -----------------------------------------------------


def killed(store, entry, at):
    """Makes an upload crash at an operation; then the next process runs."""
    store.fail_from(len(store.operations) + at, SimulatedCrash("killed"))
    with pytest.raises(SimulatedCrash):
        uploaded(store, entry, **IN_PARTS)
    store.revive()


def test_parts_of_a_killed_upload_are_used_again(tmp_path):
    store, entry = FaultyObjectStore(), commit(tmp_path, 5)
    killed(store, entry, at=9)
    there, before = left_parts(store), len(store.operations)
    assert len(there) >= 4
    uploaded(store, entry, **IN_PARTS)
    again = {name for what, name in store.operations[before:] if "put" in what}
    assert not again & set(there)
    assert len(folders(store)) == 1


def test_a_corrupt_part_of_a_killed_upload_is_sent_again(tmp_path):
    store, entry = FaultyObjectStore(), commit(tmp_path, 5)
    killed(store, entry, at=9)
    broken = left_parts(store)[0]
    store.damage(broken)
    uploaded(store, entry, **IN_PARTS)
    assert done(store, "delete") == [broken]
    assert len(folders(store)) == 1


def test_parts_of_another_size_are_sent_again(tmp_path):
    """Another version may divide files differently."""
    store, entry = FaultyObjectStore(), commit(tmp_path, 5)
    killed(store, entry, at=9)
    uploaded(store, entry, **{**IN_PARTS, "smallest_part": 700})
    assert len(folders(store)) == 1
    kept_in_order(store)
    assert left_parts(store) == []


def test_a_composed_file_needs_no_parts(tmp_path):
    store, entry = FaultyObjectStore(), commit(tmp_path, 5)
    compose = next(
        number
        for number, (what, _) in enumerate(operations_of(entry))
        if what == "compose"
    )
    killed(store, entry, at=compose + FILES)
    for name in left_parts(store):
        store.delete(name)
    before = len(store.operations)
    uploaded(store, entry, **IN_PARTS)
    puts = [name for what, name in store.operations[before:] if "put" in what]
    assert len(folders(store)) == 1
    assert len(puts) < FILES * PARTS


def operations_of(entry):
    """Returns the operations of an undisturbed upload."""
    store = FaultyObjectStore()
    uploaded(store, entry, **IN_PARTS)
    return store.operations


# --- what arrives broken -------------------------------------------------------------


class Breaking(FaultyObjectStore):
    """A store in which one upload of an object has a flipped bit."""

    def __init__(self, is_meant):
        super().__init__()
        self.is_meant, self.broken = is_meant, []

    def put_if_absent(self, name, source, **kwargs):
        created = super().put_if_absent(name, source, **kwargs)
        if self.is_meant(name) and not self.broken:
            self.broken.append(name)
            self.damage(name)
        return created


def test_a_part_that_arrives_broken_is_sent_again(tmp_path):
    store, entry = Breaking(lambda name: name.startswith("parts/")), commit(tmp_path, 5)
    with pytest.raises(errors.SaveError, match="a wrong checksum"):
        uploaded(store, entry, **IN_PARTS)
    assert folders(store) == []
    assert store.broken[0] not in store.list()
    uploaded(store, entry, **IN_PARTS)
    assert len(folders(store)) == 1


@pytest.mark.parametrize("make", [damage, lambda path: open(path, "w").close()])
def test_a_corrupt_local_file_is_not_composed(tmp_path, make):
    store, entry = FaultyObjectStore(), commit(tmp_path, 5)
    make(str(tmp_path / "5" / "ckpt.index"))
    with pytest.raises(errors.CheckpointCorruptedError, match=r"ckpt\.index"):
        uploaded(store, entry, **IN_PARTS)
    assert folders(store) == []
    assert not any("ckpt.index" in name for name in store.list())


def test_deleted_parts_end_the_upload(tmp_path):
    """A later run deletes the parts of a running upload of an older run."""
    store, entry = FaultyObjectStore(), commit(tmp_path, 5)
    compose = store.compose

    def robbed(name, sources, **kwargs):
        store.delete(sources[0])
        return compose(name, sources, **kwargs)

    store.compose = robbed
    with pytest.raises(errors.CheckpointError, match="does not exist"):
        uploaded(store, entry, **IN_PARTS)
    assert folders(store) == []


# --- sweeping ------------------------------------------------------------------------


def test_parts_of_a_running_upload_are_kept(tmp_path):
    store, old, new = FaultyObjectStore(), commit(tmp_path, 5), commit(tmp_path, 6)
    uploaded(store, old)
    killed(store, new, at=9)
    there = left_parts(store)
    kept_in_order(store)
    assert left_parts(store) == there != []
    uploaded(store, commit(tmp_path, 7))
    kept_in_order(store)
    assert left_parts(store) == []


def test_late_parts_are_deleted_at_the_next_cleanup(tmp_path):
    """Parts of an older run that wakes after the commit of a newer run."""
    store = FaultyObjectStore()
    uploaded(store, commit(tmp_path, 5))
    retention = Retention(store, RetentionPolicy(), 0)
    retention.run()
    late = upload.part_name(folders(store)[0], "ckpt.index", Range(0, 5))
    store.put_if_absent(late, io.BytesIO(b"late"))
    retention.run()
    assert left_parts(store) == []


def test_only_our_parts_are_deleted(tmp_path):
    store = FaultyObjectStore()
    theirs = ["parts/readme", "parts/5/x", "parts/7.x/file/000", "parts.txt"]
    for name in theirs:
        store.put_if_absent(name, io.BytesIO(b"mine"))
    uploaded(store, commit(tmp_path, 5), **IN_PARTS)
    kept_in_order(store)
    assert set(theirs) <= set(store.list())
    assert set(left_parts(store)) <= set(theirs)


class Keeping(FaultyObjectStore):
    """A store whose account may not delete, for now."""

    may_delete = False

    def delete(self, name, **kwargs):
        if self.may_delete:
            return super().delete(name, **kwargs)
        error = errors.SaveError(f"Could not delete {name!r}: Forbidden")
        error.is_permanent = True
        raise error


def test_parts_stay_with_one_warning_if_nothing_may_be_deleted(tmp_path, caplog):
    store, entry = Keeping(), commit(tmp_path, 5)
    uploaded(store, entry, **IN_PARTS)
    retention = Retention(store, RetentionPolicy(), 0)
    with caplog.at_level(logging.WARNING):
        retention.run()
        retention.run()
    said = [each.message for each in caplog.records if "parts" in each.message]
    assert len(said) == 1
    assert "12 objects" in said[0]
    assert "Forbidden" in said[0]
    assert len(folders(store)) == 1
    store.may_delete = True
    retention.run()
    assert left_parts(store) == []


def test_a_sweep_that_fails_for_a_moment_is_a_fault_like_others(tmp_path):
    store = FaultyObjectStore()
    uploaded(store, commit(tmp_path, 5), **IN_PARTS)
    retention = Retention(store, RetentionPolicy(), 0)
    store.fail_from(len(store.operations) + 6, errors.SaveError("503"))
    with pytest.raises(errors.SaveError, match="503"):
        retention.run()
    store.revive()
    retention.run()
    assert left_parts(store) == []


# --- the mirror, and the real requests -----------------------------------------------


@pytest.fixture
def store():
    return FaultyObjectStore()


def test_a_mirror_leaves_no_parts(tmp_path, store, make_mirror, monkeypatch):
    in_parts = functools.partial(upload.Upload, **IN_PARTS)
    monkeypatch.setattr(upload, "Upload", in_parts)
    mirror = make_mirror()
    for step in (5, 6, 7):
        mirror.add(commit(tmp_path, step))
        assert mirror.wait(20.0)
    assert len(done(store, "compose")) == 3 * FILES
    assert len(folders(store)) == 2
    assert left_parts(store) == []


@pytest.fixture
def bucket(monkeypatch):
    with GcsServer() as server:
        for name, text in server.environment().items():
            monkeypatch.setenv(name, text)
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_any_request_may_get_lost(tmp_path, bucket, when):
    entry = commit(tmp_path, 5)
    for number in itertools.count():
        store = open_store(f"gs://bucket/run-{number}")
        dropped = bucket.drop_request(number, when=when)
        uploaded(store, entry, **IN_PARTS)
        assert len(folders(store)) == 1
        assert len(left_parts(store)) == FILES * PARTS
        if bucket.request_count <= dropped:
            break
        bucket.clear_faults()
    assert number > FILES * PARTS
