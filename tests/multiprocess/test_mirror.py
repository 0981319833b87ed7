"""Real workers and a bucket: lost disks, and disks that are not shared."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.gcs import GcsServer
from tests.multiprocess.conftest import Reference
from tests.multiprocess.harness import RESTART, Cluster, Place, wait_until
from tfpreempt.checkpoint.directory import catalog
from tfpreempt.storage.open_store import open_store

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]


@pytest.fixture
def server() -> Iterator[GcsServer]:
    with GcsServer() as server:
        yield server


def start(here: Place, server: GcsServer, *more: object) -> Cluster:
    remote = {"TFPREEMPT_MIRROR_DIR": "gs://bucket/run"}
    arguments = ("--strategy", "mwms", *more)
    environment = server.environment() | remote
    return here.start("train.py", *arguments, world=2, env=environment)


def preempt(
    here: Place, server: GcsServer, step: int, victim: int, *more: object
) -> None:
    """Sends SIGTERM to one worker in a step; both workers commit and exit."""
    here.hold()
    cluster = start(here, server, *more, "--hold-at", step)
    for worker in cluster:
        wait_until(lambda w=worker: w.lines("holding") or w.code == 77, "both hold")
    if cluster[0].code == 77:
        cluster.wait()
        pytest.skip(f"no mounts here: {cluster[0].lines('unmountable')}")
    cluster[victim].send(signal.SIGTERM)
    for worker in cluster:
        worker.wait_line("noticed")  # so both workers save the step of the notice
    here.release()
    cluster.expect(RESTART, RESTART)


def markers(server: GcsServer) -> list[str]:
    return [name for name in server.names() if name.endswith("/COMMITTED")]


def test_machines_without_a_shared_disk(
    here: Place,
    server: GcsServer,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each worker has its files on its own disk, or gets them from the bucket.

    A chief that ended before its upload was complete completes it before the others
    restore.
    """
    disks = [Path(f"{here.checkpoints}-{worker}") for worker in range(2)]
    preempt(here, server, 2, 1, "--own-disk")
    assert len(markers(server)) == 1
    assert not (disks[1] / "3").exists()  # its part is in the chief's commit
    shutil.rmtree(disks[1])  # another machine in its place
    preempt(here, server, 5, 0, "--own-disk")
    for disk in disks:  # now both
        shutil.rmtree(disk)
    preempt(here, server, 8, 1, "--own-disk")
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    store = open_store("gs://bucket/run")
    newest = catalog.copies(store)[0]
    assert newest.step == 9
    store.delete(f"{newest.name}/COMMITTED")  # as if the time had not been enough
    last = start(here, server, "--own-disk")
    last.expect(0, 0)
    assert [worker.lines("restored") for worker in last] == [[["9", "9"]]] * 2
    assert last.results() == reference("mwms", 2)
    assert len(list(disks[1].glob("*/COMMITTED"))) <= 2  # max_to_keep acts there too
    assert not [name for name in server.names() if name.startswith("run/shards/")]


def test_a_shared_disk_that_is_lost(
    here: Place, server: GcsServer, reference: Reference
) -> None:
    """Requests fail all the time."""
    server.fail(3)
    preempt(here, server, 4, 0)
    shutil.rmtree(here.checkpoints)
    server.fail(3)
    last = start(here, server)
    last.expect(0, 0)
    assert [worker.lines("restored") for worker in last] == [[["5", "5"]]] * 2
    assert last.results() == reference("mwms", 2)
