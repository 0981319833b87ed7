"""Workers without a shared disk: the state of each worker's disk at a start."""

from __future__ import annotations

import dataclasses
import io
import os
import threading
import types
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.fakes import Words, write_part
from tests.fakes.storage import FaultyObjectStore, damage
from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog, layout
from tfpreempt.checkpoint.directory.retention import RetentionPolicy
from tfpreempt.checkpoint.lease.directory_lease import PACE
from tfpreempt.checkpoint.lease.lease import Lease
from tfpreempt.checkpoint.lease.lease_record import ObservedLease, this_process
from tfpreempt.checkpoint.lease.lease_timeouts import LONGEST_GRACE, LeaseWait
from tfpreempt.checkpoint.mirror.mirror import Mirror
from tfpreempt.checkpoint.mirror.shard_transfer import ShardTransfer, clear_others
from tfpreempt.checkpoint.restore.save import Save
from tfpreempt.coordination.in_memory_store import InMemoryStore
from tfpreempt.core.cluster import Cluster
from tfpreempt.handler import restore_agreement
from tfpreempt.handler.restore_agreement import (
    LEASE_TIMEOUT,
    Agreed,
    RestoreAgreement,
    agree,
)
from tfpreempt.handler.run import Run
from tfpreempt.platforms.config import TerminationConfig
from tfpreempt.storage.files import LocalFiles
from tfpreempt.storage.object_store import ObjectStore

pytestmark = pytest.mark.tensorflow
LIMIT = 60.0


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other worker's machine does not see the chief's disk."""
    monkeypatch.setattr(
        restore_agreement, "is_leased_by", lambda directory, token: False
    )


def begin(
    disk: Path,
    cluster: Cluster,
    *,
    store: ObjectStore | None = None,
    in_use: Sequence[str] = (),
) -> RestoreAgreement:
    """The start of a worker without a checkpoint, as its handler makes it."""
    return RestoreAgreement(
        directory=disk,
        cluster=cluster,
        store=store,
        mirror=Mirror(store, RetentionPolicy()) if store and cluster.is_chief else None,
        lease=Lease() if cluster.is_chief else None,
        in_use=in_use,
    )


def on_both_workers(do: Callable[[int], None]) -> None:
    """Runs a function for both workers at once, each in a thread."""
    threads = [threading.Thread(target=do, args=(worker,)) for worker in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)


def write(start: Agreed, step: int) -> Save:
    """A worker's part of a save."""
    return write_part(start.directory, step, f"{start.token}-{step}")


class Machines:
    """The starts of two workers with separate directories, without handlers."""

    def __init__(self, folder: Path) -> None:
        self.disks = [folder / f"disk-{worker}" for worker in range(2)]
        self.store = FaultyObjectStore(uri=f"memory://{uuid.uuid4()}")

    def start(self) -> list[Agreed]:
        """Starts all workers."""
        keys, starts = InMemoryStore(), []
        agreed: dict[int, Agreed] = {}
        for worker, disk in enumerate(self.disks):
            cluster = Cluster(worker=worker, jobs=(("worker", 2),))
            starts.append(begin(disk, cluster, store=self.store))

        def start(worker: int) -> None:
            agreed[worker] = agree(starts[worker], keys, "start", LIMIT)

        on_both_workers(start)
        return [agreed[0], agreed[1]]

    def save(self, starts: list[Agreed], step: int) -> None:
        """Makes one commit of both workers."""
        parts = [write(start, step) for start in starts]
        parts[0].publish("save", [0, 1])
        assert self.workers_of_the_newest() == (0, 1)

    def workers_of_the_newest(self) -> tuple[int, ...]:
        """Whose parts the newest commit of the chief has."""
        newest = catalog.scan(str(self.disks[0]))[0]
        assert newest.manifest is not None
        return newest.manifest.workers

    def steps(self, worker: int) -> list[int]:
        found = catalog.scan(str(self.disks[worker]))
        return [entry.step or 0 for entry in found]


@pytest.fixture
def machines(tmp_path: Path, elsewhere: None) -> Iterator[Machines]:
    kept = Words("kept", "text")
    yield Machines(tmp_path)
    kept.unregister()


def test_commits_downloaded_at_each_start_do_not_fill_the_disk(
    machines: Machines,
) -> None:
    for step in range(1, 6):
        starts = machines.start()
        candidates = [start.candidate for start in starts]
        if step > 1:
            assert [each and each.step for each in candidates] == [step - 1] * 2
        machines.save(starts, step)
    assert machines.steps(0) == [5, 4]
    assert machines.steps(1) == [4, 3]


def test_a_corrupt_commit_on_a_workers_own_disk_is_downloaded_again(
    machines: Machines,
) -> None:
    machines.save(machines.start(), 1)
    machines.start()
    path = machines.disks[1] / "1" / "states" / "kept.state"
    damage(str(path))
    broken = path.read_bytes()
    found = machines.start()[1].candidate
    assert found is not None
    assert path.read_bytes() != broken


def test_a_part_that_was_not_uploaded_is_deleted(machines: Machines) -> None:
    starts = machines.start()
    machines.store.fail_from(len(machines.store.operations), OSError("no route"))
    with pytest.raises(errors.SaveError, match="no route"):
        write(starts[1], 1)
    assert not os.path.exists(machines.disks[1] / layout.STAGING)


@pytest.mark.parametrize("because", ["save", "periodic", "preemption", "finished"])
def test_only_a_worker_that_must_exit_commits_without_a_part(
    machines: Machines, because: str
) -> None:
    chief, other = machines.start()
    parts = [write(start, 1) for start in (chief, other)]
    for name in machines.store.list("shards/"):
        machines.store.damage(name)
    if because in ("save", "periodic"):
        with pytest.raises(errors.SaveError, match=r"worker\(s\) \[1\]"):
            parts[0].publish(because, [0, 1])
    else:
        parts[0].publish(because, [0, 1])
        assert machines.workers_of_the_newest() == (0,)


def test_an_incomplete_part_is_not_committed(machines: Machines) -> None:
    chief, other = machines.start()
    parts = [write(start, 1) for start in (chief, other)]
    files = [
        name
        for name in machines.store.list("shards/")
        if not name.endswith(layout.MANIFEST)
    ]
    machines.store.damage(files[-1])
    parts[0].publish("preemption", [0, 1])
    (entry,) = catalog.scan(str(machines.disks[0]))
    assert entry.manifest is not None
    assert not [f for f in entry.manifest.files if f.name.startswith("worker-0001")]


def test_a_part_uploaded_before_the_cleanup_is_kept(
    machines: Machines,
) -> None:
    """The cleanup is a task, which runs late if the store is slow."""
    for _ in range(2):  # what the first start sends is left of a dead save
        chief, other = machines.start()
        parts = [write(each, 1) for each in (chief, other)]
        sent = {name for name in machines.store.list("shards/") if chief.token in name}
        assert sent
    watcher: Any = types.SimpleNamespace(close=lambda: None)
    no_deadlines: Any = None
    run = Run(TerminationConfig(), chief, no_deadlines, watcher)
    run.start_mirror()
    assert chief.directory.wait_for_mirror(LIMIT)
    assert set(machines.store.list("shards/")) == sent
    parts[0].publish("save", [0, 1])
    assert machines.workers_of_the_newest() == (0, 1)
    run.close()


_A_START = "0123456789ab"
_OF_OTHERS = (
    "shards/train-00001.tfrecord",
    "shards/run/worker-0001/kept.state",
    f"shards/{_A_START}/worker-0001/kept.state",
    f"shards/{_A_START}-1/train.tfrecord",
    f"shards/{_A_START}-1/worker-data/train.tfrecord",
    f"shards/{_A_START}-1/worker-0001/data/train.tfrecord",
    f"backup/shards/{_A_START}-1/worker-0001/kept.state",
)


@pytest.mark.parametrize("is_over", [True, False], ids=["save is over", "start"])
def test_objects_of_other_programs_below_shards_are_not_deleted(is_over: bool) -> None:
    store = FaultyObjectStore()
    ours = f"shards/{_A_START}-1/worker-0001"
    for name in (*_OF_OTHERS, f"{ours}/kept.state", f"{ours}/{layout.MANIFEST}"):
        store.put_if_absent(name, io.BytesIO(b"bytes"))
    if is_over:
        exchange = ShardTransfer(store, 0, [1], LocalFiles("/"))
        exchange.clear(f"{_A_START}-1")
    else:
        clear_others(store, "ba9876543210")
    assert sorted(store.list()) == sorted(_OF_OTHERS)


def test_a_missing_worker_is_not_waited_for_as_long_as_a_download(
    machines: Machines,
) -> None:
    chief = Cluster(worker=0, jobs=(("worker", 2),))
    start = begin(machines.disks[0], chief, store=machines.store)
    with pytest.raises(errors.PeerTimeoutError, match="worker 1 is missing"):
        agree(start, InMemoryStore(), "start", 0.2)


def test_a_chief_that_waits_for_a_lease_is_waited_for_as_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All workers wait: if a worker gave up, it would fail, and then the chief too."""
    waits = LeaseWait(this_process(0.0), PACE)
    holder = dataclasses.replace(this_process(LONGEST_GRACE), boot="another")
    waits.expiry_reason(ObservedLease(token=holder.token, holder=holder, renewals=b""))
    assert waits.limit == LEASE_TIMEOUT
    worker = Cluster(worker=1, jobs=(("worker", 2),))
    monkeypatch.setattr(restore_agreement, "LEASE_TIMEOUT", 0.2)
    with pytest.raises(errors.PeerTimeoutError, match=r"plan took longer than 0\.3 s"):
        agree(begin(tmp_path, worker), InMemoryStore(), "start", 0.1)


@pytest.mark.parametrize("which", [0, 1])
def test_a_directory_that_a_worker_has_open_is_refused_by_all(
    tmp_path: Path, which: int
) -> None:
    """Also if the other workers no longer have a handler for the directory."""
    keys, refused = InMemoryStore(), []

    def refuse(worker: int) -> None:
        cluster = Cluster(worker=worker, jobs=(("worker", 2),))
        open_here = [str(tmp_path)] if worker == which else []
        start = begin(tmp_path, cluster, in_use=open_here)
        with pytest.raises(errors.ConfigurationError, match="is open in"):
            agree(start, keys, "start", LIMIT)
        refused.append(worker)

    on_both_workers(refuse)
    assert sorted(refused) == [0, 1]


def test_an_error_on_a_separate_disk_is_raised_by_all_workers(
    machines: Machines,
) -> None:
    keys, raised = InMemoryStore(), []

    def disagree(worker: int) -> None:
        cluster = Cluster(worker=worker, jobs=(("worker", 2 + worker),))
        start = begin(machines.disks[worker], cluster, store=machines.store)
        with pytest.raises(errors.WorkerMismatchError, match="worker 0 counts 2"):
            agree(start, keys, "start", LIMIT)
        raised.append(worker)

    on_both_workers(disagree)
    assert sorted(raised) == [0, 1]
