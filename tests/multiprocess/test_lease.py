"""One run per directory: a frozen chief whose lease was taken over."""

from __future__ import annotations

import dataclasses
import signal

import pytest

from tests.multiprocess.harness import RESTART, Place, records
from tfpreempt.checkpoint.directory import layout
from tfpreempt.checkpoint.lease.directory_lease import DirectoryLease
from tfpreempt.checkpoint.lease.lease_record import this_process

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]


@pytest.mark.parametrize(("strategy", "world"), [("none", 1), ("mwms", 2)])
def test_a_cluster_that_lost_its_lease_commits_nothing_and_leaves_as_lost(
    here: Place, strategy: str, world: int
) -> None:
    here.hold()
    cluster = here.train(
        strategy, world, "--hold-at", 4, "--save-freq", 2, "--sync-saves"
    )
    for worker in cluster:
        worker.wait_line("holding")
    cluster[0].send(signal.SIGSTOP)
    place = DirectoryLease(str(here.checkpoints))
    place.end(place.read_owner().token)
    assert place.take(dataclasses.replace(this_process(30.0), host="node-7"))
    before = commits(here)
    cluster[0].send(signal.SIGCONT)
    cluster[0].wait_text("is lost: the lease is now held by process")
    here.release()
    cluster.expect(*[RESTART] * world)
    assert commits(here) == before == ["2", "4"]
    assert [r["outcome"] for r in records(here.checkpoints, "exit")] == ["lost"] * world
    assert "on node-7" in cluster[0].output
    assert place.read_owner() is not None


def test_a_killed_chief_is_followed_at_once(here: Place) -> None:
    here.hold()
    first = here.train("none", 1, "--hold-at", 4, "--save-freq", 2, "--sync-saves")
    first[0].wait_line("holding")
    first[0].send(signal.SIGKILL)
    first.wait()
    here.release()
    second = here.train("none", 1)
    second.expect(0)
    assert second[0].lines("restored") == [["4", "4"]]
    assert "waiting up to" not in second[0].output
    assert "which has terminated" in second[0].output
    assert not (here.checkpoints / layout.LEASE).exists()


def commits(here: Place) -> list[str]:
    return sorted(marker.parent.name for marker in here.checkpoints.glob("*/COMMITTED"))
