"""Errors, deaths and hangs: every end is bounded, named, and restarts from a commit."""

from __future__ import annotations

import contextlib
import signal

import pytest

from tests.multiprocess.conftest import Reference
from tests.multiprocess.harness import (
    FRAMEWORKS,
    LIMIT,
    RESTART,
    WITHOUT_HOST,
    Cluster,
    Place,
    records,
    wait_until,
)

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]

KILLED = -signal.SIGKILL
on_both = pytest.mark.parametrize("framework", FRAMEWORKS)
LOST = {"tensorflow": "UnavailableError", "jax": "Gloo"}
"""In the error of a step whose peer is gone."""


def hold_in_step(here: Place, step: int, *more: object) -> Cluster:
    """Two workers, both inside the same step."""
    here.hold()
    cluster = here.train("mwms", 2, "--hold-at", step, *more)
    for worker in cluster:
        worker.wait_line("holding")
    return cluster


def kill(cluster: Cluster, victim: int) -> None:
    """Sends SIGKILL; returns when the process has ended."""
    cluster[victim].send(signal.SIGKILL)
    wait_until(lambda: cluster[victim].code is not None, "the killed worker is gone")


def outcomes(here: Place) -> list[tuple[int, str, int]]:
    """Worker, outcome and code of every exit in the journal, in order of workers."""
    return sorted(
        (r["worker"], r["outcome"], r["code"])
        for r in records(here.checkpoints, "exit")
    )


# --- errors raised in a step ---------------------------------------------------------


def test_a_tensorflow_error_is_raised_on_every_worker(here: Place) -> None:
    """A.2: an error of TensorFlow on one worker has the same type on the other."""
    cluster = here.train("mwms", 2, "--fail-at", 3, "--fail-with", "tensorflow")
    cluster.expect(1, 1)
    assert [each[:2] for each in outcomes(here)] == [(0, "failed"), (1, "failed")]
    for worker in cluster:
        assert "errors_impl.ResourceExhaustedError: " in worker.output, cluster.story()
        assert "no room for the batch" in worker.output
        assert not worker.lines("result")


def test_a_python_error_names_its_worker_to_the_others(here: Place) -> None:
    """A.2: a plain exception on one worker ends the other worker, which names it."""
    cluster = here.train("mwms", 2, "--fail-at", 3, "--fail-with", "python")
    cluster.expect(1, 1)
    assert "ValueError: a bad batch" in cluster[1].output
    assert "worker 1 raised ValueError: a bad batch" in cluster[0].output
    assert records(here.checkpoints, "notice") == []


# --- workers that die ----------------------------------------------------------------


@on_both
def test_a_worker_killed_without_notice_costs_the_steps_since_the_last_commit(
    here: Place, reference: Reference
) -> None:
    """D.2: the survivor raises; with `save_freq` a restart loses that many at most."""
    cluster = hold_in_step(here, 10, "--save-freq", 4, "--sync-saves")
    kill(cluster, 1)
    here.release()
    cluster.expect(1, KILLED)
    assert LOST[here.framework] in cluster[0].output
    second = here.train("mwms", 2, "--save-freq", 4, "--sync-saves")
    second.expect(0, 0)
    assert [worker.lines("restored") for worker in second] == [[["8", "8"]]] * 2
    assert second.results() == reference("mwms", 2)


@on_both
def test_a_worker_killed_in_a_periodic_save(here: Place, reference: Reference) -> None:
    """D.2: its part is missing, so the older commit stays the newest.

    A commit without its generators and data position would not resume exactly.
    """
    here.train("mwms", 2, "--steps", 4).expect(0, 0)
    here.hold("save")
    more = ("--steps", 1 << 40, "--save-each", 0.2, "--hold-in-save", 1)
    cluster = here.train("mwms", 2, *more)
    cluster[1].wait_line("holding")
    kill(cluster, 1)
    cluster.expect(1, KILLED)
    assert [r["step"] for r in records(here.checkpoints, "commit")] == [4]
    faults = records(here.checkpoints, "fault", worker=0)
    assert any("no part" in fault["error"] for fault in faults)
    second = here.train("mwms", 2)
    second.expect(0, 0)
    assert second.results() == reference("mwms", 2)


@on_both
@pytest.mark.parametrize("moment", ["before the notice", "after the decision"])
def test_a_peer_that_crashes_after_a_notice(here: Place, moment: str) -> None:
    """FACTS 2.4: a crashed worker does not block the others: outcome lost, exit 143."""
    cluster = hold_in_step(here, 4, "--peer-timeout", 25)
    if moment == "before the notice":
        kill(cluster, 1)
    cluster[0].send(signal.SIGTERM)
    cluster.wait_record("notice", worker=0)
    if moment == "after the decision":
        cluster.wait_record("decision", worker=0, boundary=5)
        kill(cluster, 1)
    here.release()
    cluster.expect(RESTART, KILLED)
    assert outcomes(here) == [(0, "lost", RESTART)]
    assert "without a checkpoint: " in cluster[0].output
    assert records(here.checkpoints, "commit") == []


@on_both
def test_the_chief_killed_after_a_notice(here: Place) -> None:
    """D.3: the store ends with the chief, and the others exit with the restart code."""
    cluster = hold_in_step(here, 4, "--peer-timeout", 25)
    cluster[1].send(signal.SIGTERM)
    cluster.wait_record("decision", worker=1, boundary=5)
    kill(cluster, 0)
    here.release()
    cluster.expect(KILLED, WITHOUT_HOST[here.framework])
    is_aborted = cluster[1].code != RESTART
    assert outcomes(here) == [(1, "lost", RESTART)] or is_aborted


@on_both
@pytest.mark.parametrize("victim", [1, 0])
def test_a_machine_that_ends_after_the_first_commit_in_its_grace_period(
    here: Place, victim: int
) -> None:
    """It had announced its end, so its loss is no failure."""
    cluster = here.train("mwms", 2, "--steps", 1 << 40, "--grace", 120)
    cluster[victim].wait_line("step", 3)
    cluster[victim].send(signal.SIGTERM)
    cluster.wait_record("commit", because="preemption")
    cluster[1 - victim].wait_line("step", len(cluster[1 - victim].lines("step")) + 3)
    kill(cluster, victim)
    others = {RESTART} if victim else WITHOUT_HOST[here.framework]
    codes = {victim: {KILLED}, 1 - victim: others}
    cluster.expect(codes[0], codes[1])
    is_aborted = cluster[1 - victim].code != RESTART
    assert outcomes(here) == [(1 - victim, "lost", RESTART)] or is_aborted


# --- no boundary before the deadline -------------------------------------------------


@on_both
def test_a_step_that_hangs_through_the_grace_period(
    here: Place, reference: Reference
) -> None:
    """D.1: no boundary before the deadline: restart code, and "lost" in the journal.

    The last commit stays. FACTS 2.9: more SIGTERMs do not delay the deadline.
    """
    here.hold()
    more = (
        "--hold-at",
        10,
        "--hold-worker",
        1,
        "--save-freq",
        4,
        "--sync-saves",
        "--grace",
        3,
    )
    cluster = here.train("mwms", 2, *more)
    cluster[1].wait_line("holding")
    cluster[1].send(signal.SIGTERM)
    cluster.wait_record("notice", worker=1)

    def ended_under_more_signals() -> bool:
        with contextlib.suppress(ProcessLookupError):
            cluster[1].send(signal.SIGTERM)
        return cluster[1].code is not None

    wait_until(ended_under_more_signals, "the hung worker ends itself", LIMIT)
    cluster.expect(RESTART, RESTART)
    assert outcomes(here) == [(0, "lost", RESTART), (1, "lost", RESTART)]
    assert "no step ended" in records(here.checkpoints, "exit", worker=1)[0]["detail"]
    assert [r["step"] for r in records(here.checkpoints, "commit")] == [4, 8]
    here.release()
    second = here.train("mwms", 2)
    second.expect(0, 0)
    assert [worker.lines("restored") for worker in second] == [[["8", "8"]]] * 2
    assert second.results() == reference("mwms", 2)
