"""Two workers write a share each of the common state: saves and restarts."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.multiprocess.conftest import Reference
from tests.multiprocess.harness import (
    RESTART,
    Cluster,
    Place,
    records,
)

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]


def hold_in_share(here: Place, worker: int) -> Cluster:
    """Sends a notice in step 5, with a worker that blocks in its share."""
    here.hold()
    here.hold("share")
    more = ("--shares", "--hold-in-share", worker, "--hold-at", 4)
    cluster = here.train("mwms", 2, *more)
    for each in cluster:
        each.wait_line("holding")
    cluster[0].send(signal.SIGTERM)
    for index in range(2):
        cluster.wait_record("decision", worker=index)
    here.release()
    cluster[worker].wait_line("holding", count=2)
    return cluster


def stock_weights(here: Place) -> str:
    """Returns the weights of the newest commit, as TensorFlow reads the commit.

    test_restarts.py restores in a process without tfpreempt.
    """
    import tensorflow as tf

    newest = tf.train.latest_checkpoint(str(here.checkpoints))
    reader = tf.train.load_checkpoint(newest)
    value = reader.get_tensor("weights/.ATTRIBUTES/VARIABLE_VALUE")
    return str(value.tobytes().hex())


def test_a_commit_of_both_resumes_exactly(here: Place, reference: Reference) -> None:
    cluster = hold_in_share(here, 1)
    here.release("share")
    cluster.expect(RESTART, RESTART)
    [commit] = records(here.checkpoints, "commit")
    assert "cannot be used" not in cluster.story()
    assert "has another value" not in cluster.story()
    data = sorted(Path(commit["path"]).glob("ckpt.data-*"))
    assert len(data) > 2
    weights = stock_weights(here)
    second = here.train("mwms", 2, "--shares")
    second.expect(0, 0)
    assert second[0].lines("weights") == second[1].lines("weights") == [[weights]]
    assert second.results() == reference("mwms", 2)
    assert not (here.checkpoints / ".tfpreempt-staging").exists()


def test_the_chief_writes_the_share_of_a_worker_that_is_killed(
    here: Place,
) -> None:
    cluster = hold_in_share(here, 1)
    cluster[1].send(signal.SIGKILL)
    cluster.expect(RESTART, -signal.SIGKILL)
    [commit] = records(here.checkpoints, "commit")
    assert commit["because"] == "preemption"
    weights = stock_weights(here)
    second = here.train("mwms", 2, "--steps", commit["step"])
    second.expect(0, 0)
    assert second[0].lines("weights") == [[weights]]
    assert not (here.checkpoints / ".tfpreempt-staging").exists()


def test_a_chief_killed_while_it_writes_its_share_commits_nothing(
    here: Place, reference: Reference
) -> None:
    cluster = hold_in_share(here, 0)
    cluster[0].send(signal.SIGKILL)
    cluster.expect(-signal.SIGKILL, RESTART)
    assert records(here.checkpoints, "commit") == []
    second = here.train("mwms", 2, "--shares")
    second.expect(0, 0)
    assert second.results() == reference("mwms", 2)
    assert not (here.checkpoints / ".tfpreempt-staging").exists()
