"""The mirror's backlog: order of uploads if commits are faster than uploads."""

from __future__ import annotations

import io
import os
import threading
import time

import pytest

from tests.checkpoint.uploads import PATIENCE, Gate, commit, folders, uploaded
from tests.fakes.clock import FakeClock
from tests.fakes.storage import FaultyObjectStore, damage
from tfpreempt.checkpoint.directory.retention import RetentionPolicy
from tfpreempt.checkpoint.mirror.mirror_retention import Retention
from tfpreempt.checkpoint.mirror.mirror_status import RetryState


@pytest.fixture
def store():
    return FaultyObjectStore()


def test_commits_faster_than_uploads_are_queued_in_order(tmp_path, store, make_mirror):
    gate = Gate(store)
    mirror = make_mirror(gate, max_to_keep=1)
    mirror.add(commit(tmp_path, 5))
    assert gate.entered.acquire(timeout=PATIENCE)
    for step in (6, 7, 8):
        mirror.add(commit(tmp_path, step))
    gate.open.set()
    assert mirror.wait(PATIENCE)
    order = [n for w, n in store.operations if n == "checkpoint" or "put" in w]
    first = order.index("checkpoint")  # not after all that waited
    assert sum(n.endswith("COMMITTED") for n in order[first:]) == 3
    assert [name.split(".")[0] for name in folders(store)] == ["8"]


def test_a_hurried_mirror_uploads_the_backlog_later(tmp_path, store, make_mirror):
    gate = Gate(store)
    mirror = make_mirror(gate, max_to_keep=None)
    mirror.add(commit(tmp_path, 5))
    assert gate.entered.acquire(timeout=PATIENCE)
    for step in (6, 7):
        mirror.add(commit(tmp_path, step))
    mirror.shorten_waits()
    gate.open.set()
    assert mirror.finish(PATIENCE)
    mirror.shorten_waits()
    end = time.monotonic() + PATIENCE
    while mirror.status.pending and time.monotonic() < end:
        threading.Event().wait(0.01)
    assert len(folders(store)) == 3


def test_no_wait_for_commits_that_will_not_be_uploaded(tmp_path, store, make_mirror):
    mirror = make_mirror()
    entry = commit(tmp_path, 5)
    damage(os.path.join(entry.path, "ckpt.index"))
    mirror.add(entry)
    began = time.monotonic()
    assert not mirror.finish(PATIENCE)
    assert time.monotonic() - began < PATIENCE / 2


def test_a_deleted_commit_leaves_the_older_one_to_be_copied(
    tmp_path, store, make_mirror
):
    gate = Gate(store)
    mirror = make_mirror(gate)
    old = commit(tmp_path, 5)
    mirror.add(old)
    assert gate.entered.acquire(timeout=PATIENCE)
    new = commit(tmp_path, 6)
    mirror.add(new)
    mirror.forget(new.path)
    status = mirror.status
    assert (status.latest_step, status.is_complete) == (5, False)
    gate.open.set()
    assert mirror.finish(PATIENCE)
    assert [name.split(".")[0] for name in folders(store)] == ["5"]
    mirror.forget(old.path)
    assert (mirror.status.latest_step, mirror.status.is_complete) == (None, True)


def test_another_commit_gets_on_although_the_last_one_got_further(
    tmp_path,
):
    clock = FakeClock()
    tries = RetryState(clock)
    tries.sent(commit(tmp_path, 5), 1 << 40)
    other = commit(tmp_path, 6)
    before = tries.stall_deadline
    clock.advance(1.0)
    tries.sent(other, 1)
    assert tries.stall_deadline == before + 1.0
    tries.sent(other, 1)
    assert tries.stall_deadline == before + 1.0


@pytest.mark.parametrize("is_told_first", [True, False])
def test_the_newest_makes_its_way_before_anybody_waits_for_it(
    tmp_path, store, make_mirror, is_told_first
):
    gate = Gate(store)
    mirror = make_mirror(gate)
    mirror.add(commit(tmp_path, 5))
    assert gate.entered.acquire(timeout=PATIENCE)
    for tell in (lambda: mirror.add(commit(tmp_path, 6)), mirror.shorten_waits)[
        :: -1 if is_told_first else 1
    ]:
        tell()
    while mirror.status.uploading != 6:
        assert gate.entered.acquire(timeout=PATIENCE)
    gate.open.set()
    assert mirror.finish(PATIENCE)


def test_the_state_file_names_the_newest_not_the_last_uploaded(
    tmp_path, store, make_mirror
):
    gate = Gate(store)
    mirror = make_mirror(gate, max_to_keep=None)
    mirror.add(commit(tmp_path, 5))
    assert gate.entered.acquire(timeout=PATIENCE)
    for step in (6, 7):
        mirror.add(commit(tmp_path, step))
    gate.open.set()
    assert mirror.wait(PATIENCE)  # 6 comes last
    target = io.BytesIO()
    store.get("checkpoint", target)
    assert target.getvalue().startswith(b'model_checkpoint_path: "7.')


def test_a_commit_older_than_the_stores_newest_is_not_uploaded(
    tmp_path, store, make_mirror, caplog
):
    """The start could not read the store; retention would delete the upload at once."""
    others = tmp_path / "others"
    for step in (50, 60, 70):
        uploaded(store, commit(others, step))
    entry = commit(tmp_path / "ours", 5)
    mirror = make_mirror()
    mirror.add(entry)
    assert not mirror.wait(PATIENCE)
    assert mirror.status.skipped == 1
    assert "the next commit is uploaded" in caplog.text
    assert mirror.highest_sequence == 3  # what the next one is made to rank above
    assert [name.split(".")[0] for name in folders(store)] == ["70", "60", "50"]


def test_a_marker_alone_is_nothing_to_keep(tmp_path, store):
    """A newer run cleared the folder just before this upload wrote its marker."""
    for step in (5, 6, 7):
        uploaded(store, commit(tmp_path, step))
    robbed = folders(store)[0]
    for name in list(store.list(f"{robbed}/")):
        if not name.endswith("/COMMITTED"):
            store.delete(name)
    uploaded(store, commit(tmp_path, 8))
    Retention(store, RetentionPolicy(), 0).run()
    assert [name.split(".")[0] for name in folders(store)] == ["8", "6"]
    assert not list(store.list(f"{robbed}/"))
