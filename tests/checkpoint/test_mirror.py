"""The mirror's thread: order of uploads, reports, and waits."""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
import threading
import types

import pytest

from tests.checkpoint.conftest import Journal
from tests.checkpoint.fakes import open_directory, save
from tests.checkpoint.uploads import (
    PATIENCE,
    Gate,
    commit,
    folders,
    newest,
    uploaded,
)
from tests.fakes.storage import FaultyObjectStore, SimulatedCrash, damage
from tfpreempt import errors
from tfpreempt.checkpoint.mirror import mirror_status as mirror_status
from tfpreempt.checkpoint.mirror.mirror_status import MirrorStatus
from tfpreempt.checkpoint.mirror.store_selection import Scratch


@pytest.fixture
def store():
    return FaultyObjectStore()


def test_a_mirror_uploads_in_order_and_names_the_newest(tmp_path, store, make_mirror):
    mirror = make_mirror()
    for step in (5, 6, 7):
        mirror.add(commit(tmp_path, step))
        assert mirror.wait(PATIENCE)
    assert [name.split(".")[0] for name in folders(store)] == ["7", "6"]
    target = io.BytesIO()
    store.get("checkpoint", target)
    assert target.getvalue().startswith(
        f'model_checkpoint_path: "{folders(store)[0]}/ckpt"'.encode()
    )
    status = mirror.status
    assert (status.latest_step, status.mirrored_step, status.is_complete) == (
        7,
        7,
        True,
    )
    assert (status.pending, status.last_error, status.error_count) == (0, None, 0)


class NoStateFile(FaultyObjectStore):
    """A store that refuses to write TensorFlow's state file until `is_open`."""

    is_open = False

    def replace(self, name, data, **kwargs):
        if name == "checkpoint" and not self.is_open:
            raise errors.SaveError("403: checkpoint may not be overwritten")
        return super().replace(name, data, **kwargs)


def state_file(store):
    """Returns the step in TensorFlow's state file; None without a state file."""
    if store.stat("checkpoint") is None:
        return None
    target = io.BytesIO()
    store.get("checkpoint", target)
    return int(target.getvalue().split(b'"')[1].split(b".")[0])


def test_a_commit_is_mirrored_without_the_state_file(
    tmp_path, make_mirror, monkeypatch, caplog
):
    monkeypatch.setattr(mirror_status, "FIRST_PAUSE", 0.01)
    store = NoStateFile()
    mirror = make_mirror(store, max_to_keep=1)
    for step in (5, 6):
        mirror.add(commit(tmp_path, step))
        assert mirror.wait(PATIENCE)
        assert mirror.finish(PATIENCE)
    status = mirror.status
    assert (status.mirrored_step, status.is_complete, status.error_count) == (
        6,
        True,
        0,
    )
    assert len(folders(store)) == 2  # the state file named neither
    assert caplog.text.count("cannot be written; the write is retried") == 1
    store.is_open = True
    while len(folders(store)) == 2:  # the retry, and retention behind it
        threading.Event().wait(0.01)
    assert state_file(store) == 6


def test_the_state_file_is_retried_before_the_process_exits(
    tmp_path, make_mirror, monkeypatch
):
    monkeypatch.setattr(mirror_status, "FIRST_PAUSE", 3600.0)
    store = NoStateFile()
    mirror = make_mirror(store)
    mirror.add(commit(tmp_path, 5))
    assert mirror.wait(PATIENCE)
    store.is_open = True
    assert mirror.finish(PATIENCE)
    assert state_file(store) == 5


def test_a_process_that_lost_the_lease_writes_no_state_file(tmp_path, make_mirror):
    lease = types.SimpleNamespace(
        token="1",
        head=types.SimpleNamespace(follow=lambda entries, lease: None),
        acquire=lambda place: None,
        check=lambda: None,
        release=lambda: None,
    )

    def lose():
        raise errors.LeaseLostError("another program holds the lease")

    class Lost(FaultyObjectStore):
        def put_if_absent(self, name, source, **kwargs):
            done = super().put_if_absent(name, source, **kwargs)
            if name.endswith("/COMMITTED"):
                lease.check = lose
            return done

    store = Lost()
    mirror = make_mirror(store, lease=lease)
    mirror._lease_backend = types.SimpleNamespace(
        record_pending_marker=lambda token, folder: None
    )
    mirror.add(commit(tmp_path, 5))
    assert mirror.wait(PATIENCE)
    assert len(folders(store)) == 1
    assert state_file(store) is None


def test_a_deletion_does_not_overwrite_the_name_of_a_newer_commit(
    tmp_path, make_mirror
):
    listed, named = threading.Event(), threading.Event()

    class Slow(FaultyObjectStore):
        def replace(self, name, data, **kwargs):
            is_of_newer = b'"7.' in data
            if threading.current_thread() is deleting:
                listed.set()
                named.wait(0.2)  # the mirror's thread waits for this write
            super().replace(name, data, **kwargs)
            if is_of_newer:
                named.set()

    store = Slow()
    deleting = None
    mirror = make_mirror(store, max_to_keep=None)
    for step in (5, 6):
        mirror.add(commit(tmp_path, step))
        assert mirror.wait(PATIENCE)
    entry = newest(tmp_path)
    deleting = threading.Thread(target=mirror.delete, args=(entry.path, entry))
    deleting.start()
    assert listed.wait(PATIENCE)
    mirror.add(commit(tmp_path, 7))
    deleting.join(PATIENCE)
    assert mirror.wait(PATIENCE)
    assert state_file(store) == 7


def test_the_state_file_names_no_commit_of_states_alone(tmp_path, store, make_mirror):
    mirror = make_mirror(max_to_keep=1)
    mirror.add(commit(tmp_path, 5))
    assert mirror.wait(PATIENCE)
    assert state_file(store) == 5
    save(open_directory(tmp_path, None, max_to_keep=None), 6)
    mirror.add(newest(tmp_path))
    assert mirror.wait(PATIENCE)
    assert [name.split(".")[0] for name in folders(store)] == ["6"]
    assert state_file(store) is None


@pytest.mark.slow  # waits in real time
def test_a_failed_upload_is_logged_once_and_retried(tmp_path, make_mirror, caplog):
    faults = {0: errors.SaveError("503"), 1: errors.SaveError("503 again")}
    told = Journal()
    store = FaultyObjectStore(faults)
    mirror = make_mirror(store, told)
    mirror.add(commit(tmp_path, 5))
    assert mirror.finish(PATIENCE)  # which shortens the pauses
    assert folders(store) != []
    assert [each.where for each in told] == ["mirror"]
    assert "503" in told[0].error
    assert [r.message for r in caplog.records if "Training continues" in r.message]
    assert any("succeed again" in r.message for r in caplog.records)
    assert mirror.status.error_count == 2
    assert mirror.status.last_error is None


@pytest.mark.slow  # waits in real time
def test_only_damage_of_the_local_file_makes_it_give_up(tmp_path, make_mirror, caplog):
    fault = errors.CheckpointCorruptedError("crc32c differs on the way")
    mirror = make_mirror(FaultyObjectStore({1: fault}))
    mirror.add(commit(tmp_path, 5))
    assert mirror.finish(PATIENCE)  # which shortens the pauses
    assert (mirror.status.error_count, mirror.status.skipped) == (1, 0)
    newer = commit(tmp_path, 6)
    damage(os.path.join(newer.path, "ckpt.index"))
    mirror.add(newer)
    assert not mirror.wait(PATIENCE)
    assert mirror.status.skipped == 1
    assert "and this commit is not uploaded" in caplog.text


def test_a_manifest_that_once_arrives_changed_is_read_again(tmp_path):
    """Without a second read, an older commit was restored."""
    fault = errors.CheckpointCorruptedError("arrived with another crc32c")
    store = FaultyObjectStore()
    uploaded(store, commit(tmp_path, 5))
    asked = len(store.operations)
    assert folders(store) != []
    gets = [i for i, each in enumerate(store.operations) if each.name == "get"]
    for at in gets:
        again = FaultyObjectStore({at: fault})
        uploaded(again, newest(tmp_path))
        assert len(again.operations) == asked
        assert folders(again) == folders(store)


def test_progress_in_words():
    status = MirrorStatus(uri="memory://")
    assert status.progress == "not started"
    half = {"uploading": 5, "sent_bytes": 1 << 20, "total_bytes": 3 << 20}
    assert dataclasses.replace(status, **half).progress == "1.0 of 3.0 MiB"


def test_the_end_does_not_wait_for_a_pause_to_be_over(
    tmp_path, make_mirror, monkeypatch
):
    monkeypatch.setattr(mirror_status, "FIRST_PAUSE", 3600.0)
    store = FaultyObjectStore({0: errors.SaveError("503")})
    mirror = make_mirror(store)
    mirror.add(commit(tmp_path, 5))
    while not mirror.status.error_count:
        threading.Event().wait(0.01)
    assert mirror.wait()
    assert folders(store) != []


def test_at_a_preemption_the_newest_commit_is_uploaded_first(
    tmp_path, store, make_mirror
):
    gate = Gate(store)
    mirror = make_mirror(gate)
    mirror.add(commit(tmp_path, 5))
    assert gate.entered.acquire(timeout=PATIENCE)
    mirror.add(commit(tmp_path, 6))
    assert mirror.status.uploading == 5
    done = []
    going = threading.Thread(target=lambda: done.append(mirror.finish(PATIENCE)))
    going.start()
    while mirror.status.uploading != 6:
        assert gate.entered.acquire(timeout=PATIENCE)
    gate.open.set()
    going.join(PATIENCE)
    assert done == [True]
    markers = [n for w, n in store.operations if w == "put_if_absent" and "COMM" in n]
    assert markers[0].startswith("6.")


def test_a_wait_ends_at_its_timeout(tmp_path, store, make_mirror):
    mirror = make_mirror(Gate(store))
    mirror.add(commit(tmp_path, 5))
    assert not mirror.finish(0.05)
    assert not mirror.wait(0.05)
    assert folders(store) == []
    assert mirror.status.uploading == 5


def test_a_commit_that_retention_took_is_dropped(tmp_path, store, make_mirror):
    gate = Gate(store)
    mirror = make_mirror(gate)
    mirror.add(commit(tmp_path, 5))
    assert gate.entered.acquire(timeout=PATIENCE)
    old = commit(tmp_path, 6)
    mirror.add(old)
    mirror.add(commit(tmp_path, 7))
    assert mirror.is_pinned(str(tmp_path / "5"))
    for entry in old.manifest.files:
        os.remove(os.path.join(old.path, entry.name))
    os.remove(os.path.join(old.path, "COMMITTED"))
    gate.open.set()
    assert mirror.wait(PATIENCE)
    assert [name.split(".")[0] for name in folders(store)] == ["7", "5"]
    assert mirror.status.skipped == 1


def test_older_commits_give_way_if_the_disk_has_no_room(
    tmp_path, store, make_mirror, monkeypatch, caplog
):
    mirror = make_mirror(
        Gate(store), max_to_keep=None, scratch=Scratch("gs://b/run", str(tmp_path))
    )
    entries = [commit(tmp_path, step) for step in (5, 6, 7, 8)]
    mirror.add(entries[0])
    assert mirror.store.entered.acquire(timeout=PATIENCE)  # 5 is under upload
    for entry in entries[1:]:
        mirror.add(entry)
    largest = max(entry.size for entry in entries)

    def pinned(free):
        usage = shutil.disk_usage("/")._replace(free=free)
        monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
        return [e.step for e in entries if mirror.is_pinned(e.path)]

    assert pinned(2 * largest) == [5, 6, 7, 8]
    assert "no space for two more commits" not in caplog.text
    assert pinned(2 * largest - 1) == [5, 7, 8]  # the room of 6 is enough for 7
    assert caplog.text.count("no space for two more commits") == 1
    assert pinned(0) == [5, 8]


def test_the_newest_commit_of_a_backlog_is_uploaded_first(tmp_path, store, make_mirror):
    gate = Gate(store)
    mirror = make_mirror(gate, max_to_keep=None)
    mirror.add(commit(tmp_path, 5))
    assert gate.entered.acquire(timeout=PATIENCE)
    for step in (6, 7):
        mirror.add(commit(tmp_path, step))
    gate.open.set()
    assert mirror.wait(PATIENCE)
    markers = [n for w, n in store.operations if w == "put_if_absent" and "COMM" in n]
    assert [name.split(".")[0] for name in markers] == ["5", "7", "6"]


def test_an_incomplete_upload_of_the_last_run_is_completed(tmp_path, make_mirror):
    entry = commit(tmp_path, 5)
    store = FaultyObjectStore({6: SimulatedCrash("killed")})
    with pytest.raises(SimulatedCrash):
        uploaded(store, entry, threads=1)
    store.revive()
    mirror = make_mirror(store)
    mirror.add(entry)
    assert mirror.wait(PATIENCE)
    assert len(folders(store)) == 1
