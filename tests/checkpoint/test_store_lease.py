"""The lease of an object store: one run uploads, and marks commits."""

from __future__ import annotations

import dataclasses
import io
import threading

import pytest

from tests.checkpoint.fakes import OwnContents, open_directory, save
from tests.checkpoint.test_lease import ELSEWHERE, Waiting
from tests.fakes.storage import FaultyObjectStore
from tests.multiprocess.harness import wait_until
from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog, layout
from tfpreempt.checkpoint.directory.retention import RetentionPolicy
from tfpreempt.checkpoint.lease.lease import Lease
from tfpreempt.checkpoint.lease.object_store_lease import PACE, ObjectStoreLease
from tfpreempt.checkpoint.mirror.mirror import Mirror
from tfpreempt.checkpoint.mirror.upload import Upload
from tfpreempt.storage.local import LocalStore


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path):
    if request.param == "memory":
        return FaultyObjectStore(uri=f"memory://{tmp_path}")
    return LocalStore(str(tmp_path / "mirror"))


class Other:
    """The lease of another machine."""

    def __init__(self, store):
        self.place = ObjectStoreLease(store)
        self.place.read_owner()
        self.token = self.place.take(dataclasses.replace(ELSEWHERE))
        assert self.token
        self.renewals = 0

    def renew(self):
        self.renewals += 1
        self.place.renew(self.token, self.renewals)


def acquired(store, pause=None):
    lease = Lease(pause=pause or Waiting())
    lease.acquire(ObjectStoreLease(store))
    return lease


def steal(store):
    place = ObjectStoreLease(store)
    place.end(place.read_owner().token)
    assert place.take(ELSEWHERE)
    return place


def test_a_free_mirror_lease_is_acquired_at_once(store):
    pause = Waiting()
    first = acquired(store, pause)
    assert first.token == "1"
    first.release()
    assert ObjectStoreLease(store).read_owner() is None
    assert acquired(store, pause).token == "2"  # no number comes twice
    assert pause.waited == 0


def test_one_of_two_processes_acquires_the_mirror_lease(store):
    one, other = ObjectStoreLease(store), ObjectStoreLease(store)
    assert one.read_owner() is other.read_owner() is None
    assert one.take(ELSEWHERE) == "1"
    assert other.take(ELSEWHERE) is None


def test_a_start_waits_for_another_machine_and_names_it(store):
    other = Other(store)
    with pytest.raises(errors.DirectoryLockedError, match="process 4711 on node-7"):
        acquired(store, Waiting(lambda waited: other.renew()))


def test_a_lease_without_renewals_is_taken_over(store):
    Other(store)
    pause = Waiting()
    assert acquired(store, pause).token == "2"
    assert pause.waited >= PACE.expiry


def test_a_leftover_of_an_earlier_version_is_taken_over_and_removed(store):
    """Earlier versions counted the renewals in an object called `.beat`."""
    Other(store)
    store.replace("lease/0000000001.beat", b"7")
    acquired(store)
    assert not [name for name in store.list("lease/") if "0000000001" in name]


def test_a_holder_that_lost_its_lease_detects_the_loss(store):
    lease, heard = acquired(store), []
    lease.on_loss(heard.append)
    steal(store)
    with pytest.raises(errors.LeaseLostError, match="node-7"):
        lease.check()
    assert len(heard) == 1
    lease.release()
    assert ObjectStoreLease(store).read_owner().token == "2"  # the other one's stays


def expired(store):
    """Starts another process, which sees only that the lease is not renewed."""
    pause = Waiting()
    lease = acquired(store, pause)
    assert pause.waited >= PACE.expiry
    return lease


def test_a_rule_that_deletes_old_objects_ends_no_run(store):
    """The record is as old as the run, and its renewals are young."""
    lease, backend = acquired(store), ObjectStoreLease(store)
    backend.renew(lease.token, 1)
    store.delete("lease/0000000001")
    lease.check()
    backend.renew(lease.token, 2)
    for name in list(store.list("lease/")):
        store.delete(name)
    lease.check()
    backend.renew(lease.token, 3)
    lease.check()
    assert expired(store).token == "2"
    with pytest.raises(errors.LeaseLostError):
        lease.check()


def test_a_bucket_without_deletions_ends_no_run(store, caplog):
    acquired(store).release()
    store.delete = refuse
    lease = acquired(store)
    lease.check()
    lease.release()
    acquired(store).check()
    assert (
        caplog.text.count("could not delete records of older leases") == 2
    )  # once for each that was taken


def refuse(name, *, timeout=None):
    raise errors.SaveError("403: no permission to delete")


class Journal:
    def record(self, fault):
        pass


def test_a_mirror_copies_under_its_lease_and_marks_nothing_once_it_is_lost(
    store, tmp_path
):
    directory, journal = tmp_path / "run", Journal()
    saver = open_directory(directory, OwnContents())
    mirror = Mirror(
        store, RetentionPolicy(max_to_keep=None), lease=Lease(pause=Waiting())
    )
    mirror.look()
    mirror.begin(str(directory), catalog.read_at(save(saver, 1).path), journal.record)
    assert mirror.wait(20)
    assert len(markers(store)) == 1
    steal(store)
    mirror.add(catalog.read_at(save(saver, 2).path))
    wait_until(lambda: mirror.status.last_error, "the mirror finds out")
    assert "is lost" in mirror.status.last_error
    mirror.close()
    assert len(markers(store)) == 1
    assert ObjectStoreLease(store).read_owner().token == "2"


def test_a_released_mirror_lease_is_acquired_again_by_training_only(store, tmp_path):
    """An upload was in progress when the machine was taken away."""
    directory, journal = tmp_path / "run", Journal()
    saver = open_directory(directory, OwnContents())
    mirror = Mirror(
        store, RetentionPolicy(max_to_keep=None), lease=Lease(pause=Waiting())
    )
    mirror.look()
    put_if_absent, let_go = store.put_if_absent, []

    def put_last_before_the_marker(name, source, **more):
        done = put_if_absent(name, source, **more)
        if name.endswith(layout.MANIFEST) and not let_go:
            let_go.append(name)
            mirror.release()
        return done

    store.put_if_absent = put_last_before_the_marker
    mirror.begin(str(directory), catalog.read_at(save(saver, 1).path), journal.record)
    wait_until(lambda: let_go and mirror.status.uploading is None, "it has let go")
    assert ObjectStoreLease(store).read_owner() is None
    assert markers(store) == []
    assert mirror.wait(20)
    assert len(markers(store)) == 1
    mirror.close()


def test_a_released_mirror_does_not_mix_commits_of_two_runs(
    store, tmp_path, monkeypatch
):
    directory, journal = tmp_path / "run", Journal()
    saver = open_directory(directory, OwnContents())
    mirror = Mirror(
        store, RetentionPolicy(max_to_keep=None), lease=Lease(pause=Waiting())
    )
    mirror.look()
    mirror.begin(str(directory), catalog.read_at(save(saver, 1).path), journal.record)
    assert mirror.wait(20)
    mirror.release()
    with monkeypatch.context() as patch:
        patch.setattr("tfpreempt.checkpoint.directory.head._PROCESS", "another")
        other = Other(store)
        others = open_directory(tmp_path / "other", OwnContents())
        others.highest_sequence = mirror.highest_sequence
        Upload(
            store, catalog.read_at(save(others, 2).path)
        ).run()  # above all that is there
        other.place.end(other.token)
    mirror.add(catalog.read_at(save(saver, 3).path))
    wait_until(lambda: mirror.status.last_error, "the mirror finds out")
    assert (
        "another run has acquired the lease and committed" in mirror.status.last_error
    )
    mirror.close()
    assert len(markers(store)) == 2


@pytest.mark.parametrize("can_look", [True, False])
def test_an_upload_of_the_previous_runs_commit_is_no_foreign_commit(
    store, tmp_path, monkeypatch, can_look
):
    directory, journal = tmp_path / "run", Journal()
    saver = open_directory(directory, OwnContents())
    with monkeypatch.context() as patch:
        patch.setattr("tfpreempt.checkpoint.directory.head._PROCESS", "the run before")
        before = save(saver, 1)
    mirror = Mirror(
        store, RetentionPolicy(max_to_keep=None), lease=Lease(pause=Waiting())
    )
    if can_look:
        mirror.look()
    mirror.begin(str(directory), catalog.read_at(before.path), journal.record)
    assert mirror.wait(20)
    mirror.release()
    mirror.add(catalog.read_at(save(saver, 2).path))
    assert mirror.wait(20)
    mirror.close()
    assert len(markers(store)) == 2


def test_an_unlisted_mirror_acquires_its_lease_at_the_first_upload(store, tmp_path):
    directory, journal = tmp_path / "run", Journal()
    saver = open_directory(directory, OwnContents())
    mirror = Mirror(
        store, RetentionPolicy(max_to_keep=None), lease=Lease(pause=Waiting())
    )
    mirror.begin(str(directory), catalog.read_at(save(saver, 1).path), journal.record)
    assert mirror.wait(20)
    assert mirror.lease.token == "1"
    mirror.close()
    assert ObjectStoreLease(store).read_owner() is None


def test_a_store_that_refuses_writes_does_not_prevent_a_start(
    store, monkeypatch, caplog
):
    monkeypatch.setattr(
        "tfpreempt.checkpoint.lease.object_store_lease._PUT_SECONDS", 0.05
    )
    is_open = threading.Event()
    put_if_absent = store.put_if_absent
    store.put_if_absent = lambda *a, **k: is_open.wait(20) and put_if_absent(*a, **k)
    mirror = Mirror(
        store, RetentionPolicy(max_to_keep=None), lease=Lease(pause=Waiting())
    )
    mirror.look()
    assert "the first upload retries this" in caplog.text
    is_open.set()


def markers(store):
    return [name for name in store.list() if name.endswith(layout.MARKER)]


def put(store, name, data):
    assert store.put_if_absent(name, io.BytesIO(data))


MANIFEST = b"""{"format": 1, "step": 3, "sequence": 7, "world_size": 1, "workers": [0],
 "files": [], "prefix": null, "because": "save", "save_seconds": 0.0,
 "versions": {}, "metadata": {}}"""


def folder_of(manifest):
    token = catalog.token_of(catalog.marker_bytes(manifest, 7), 7)
    return catalog.folder_name(3, token)


def test_a_takeover_writes_the_pending_marker(store):
    """So the old process cannot make a commit later, whenever it wakes."""
    old = Other(store)
    folder = folder_of(MANIFEST)
    put(store, f"{folder}/{layout.MANIFEST}", MANIFEST)
    old.place.record_pending_marker(old.token, folder)
    steal(store)
    target = io.BytesIO()
    store.get(f"{folder}/{layout.MARKER}", target)
    assert target.getvalue() == catalog.marker_bytes(MANIFEST, 7)
    assert list(store.list("lease/")) == ["lease/0000000002"]


CORRUPT = "3.7-0123abcd"


@pytest.mark.parametrize(
    "folder", ["../outside", "4.8-0123abcd", CORRUPT, ELSEWHERE.to_json().decode()]
)
def test_no_marker_is_written_for_an_invalid_folder(store, folder):
    """The last name is the record of a lease: a name too long for a file system."""
    old = Other(store)
    put(store, f"{CORRUPT}/{layout.MANIFEST}", b"{")
    old.place.record_pending_marker(old.token, folder)
    steal(store)
    assert markers(store) == []


class Changing(FaultyObjectStore):
    """A store that changes the bytes of a manifest on the way."""

    def get(self, name, target, **kwargs):
        if not name.endswith(layout.MANIFEST):
            return super().get(name, target, **kwargs)
        arrived = io.BytesIO()
        count = super().get(name, arrived, **kwargs)
        target.write(arrived.getvalue().replace(b'"save"', b'"rave"'))
        return count


def test_no_marker_is_made_of_a_manifest_that_arrives_changed():
    """No request could replace that marker, and the commit would be lost."""
    store = Changing()
    folder = folder_of(MANIFEST)
    old = Other(store)
    put(store, f"{folder}/{layout.MANIFEST}", MANIFEST)
    old.place.record_pending_marker(old.token, folder)
    steal(store)
    assert store.stat(f"{folder}/{layout.MARKER}") is None


@pytest.mark.parametrize("number", [10**10 - 1, 10**18 - 1])
def test_a_planted_record_with_many_digits_does_not_hide_the_lease(store, number):
    """The next number has one more digit; every process then found the lease free."""
    store.put_if_absent(f"lease/{number}", io.BytesIO(b"planted"))
    store.put_if_absent(f"lease/{number}.over", io.BytesIO(b""))
    place = ObjectStoreLease(store)
    assert place.read_owner() is None
    token = place.take(ELSEWHERE)
    found = ObjectStoreLease(store).read_owner()
    assert found is not None
    assert found.token == token
    assert place.has(token)


def test_no_lease_follows_the_highest_number(store):
    """The record of the next lease would not be recognized."""
    number = 10**19 - 1
    store.put_if_absent(f"lease/{number}", io.BytesIO(b"planted"))
    store.put_if_absent(f"lease/{number}.over", io.BytesIO(b""))
    before = list(store.list("lease/"))
    with pytest.raises(errors.CheckpointError, match=f"lease/{number}'.* Delete all"):
        acquired(store)
    assert list(store.list("lease/")) == before


@pytest.mark.parametrize("name", ["9" * 200, "9" * 20, "00000000012"])
def test_an_object_whose_name_is_no_number_of_a_lease_is_ignored(store, name):
    """A name of 1018 digits made the name of the next record too long."""
    store.put_if_absent(f"lease/{name}", io.BytesIO(b"planted"))
    lease = acquired(store)
    assert lease.token == ObjectStoreLease(store).read_owner().token == "1"
    assert f"lease/{name}" in store.list("lease/")
