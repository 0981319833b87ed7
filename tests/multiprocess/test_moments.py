"""A notice at every moment of a program's life: a commit and 143, or a normal end."""

from __future__ import annotations

import shutil
import signal

import pytest

from tests.multiprocess.conftest import Reference
from tests.multiprocess.harness import (
    FRAMEWORKS,
    RESTART,
    STEPS,
    Cluster,
    Place,
    records,
)

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]

on_both = pytest.mark.parametrize("framework", FRAMEWORKS)
SEEN = 1.0
"""Seconds in which a signal is seen: it didn't wait for the op that is running."""


def terminate(here: Place, *arguments: object, tf_config: bool = False) -> Cluster:
    """Starts moments.py and sends SIGTERM while it holds."""
    here.hold("start")
    cluster = here.start("moments.py", *arguments, tf_config=tf_config)
    cluster[0].wait_line("holding")
    cluster[0].send(signal.SIGTERM)
    return cluster


@on_both
@pytest.mark.parametrize(
    ("moment", "step"),
    [
        ("before the first step", 0),
        ("between two loops", 6),
        ("before close", STEPS),
    ],
)
def test_outside_of_run(
    here: Place, reference: Reference, moment: str, step: int
) -> None:
    """FACTS 2.5: a signal outside of `run()` commits at the next boundary, exactly."""
    first = terminate(here, moment)
    first.wait_record("decision")  # the notice is recorded before the flag is raised
    here.release("start")
    first.expect(RESTART)
    assert [r["step"] for r in records(here.checkpoints, "commit")] == [step]
    assert not first[0].lines("result")
    second = here.start("moments.py", moment)
    second.expect(0)
    assert second[0].lines("restored") == [[str(step)] * 2]
    assert len(second[0].lines("step")) == STEPS - step
    assert second.results() == reference("none", 1)


@on_both
@pytest.mark.parametrize("tf_config", [False, True])
def test_after_close(here: Place, tf_config: bool) -> None:
    """FACTS 2.5, 2.8: after `close()` a signal ends the process, as without tfpreempt.

    No step is lost: the final state was committed, and a restart trains no step.
    """
    first = terminate(here, "after close", tf_config=tf_config)
    first.expect(-signal.SIGTERM)
    here.release("start")
    second = here.start("moments.py", "after close", tf_config=tf_config)
    second.expect(0)
    assert second[0].lines("restored") == [[str(STEPS)] * 2]
    assert second[0].lines("step") == []


@on_both
def test_in_the_last_step_of_two_workers(here: Place, reference: Reference) -> None:
    """FACTS 2.5: a signal in the last step of two workers commits it; none is lost."""
    here.hold()
    first = here.train("mwms", 2, "--hold-at", STEPS - 1)
    for worker in first:
        worker.wait_line("holding")
    first[1].send(signal.SIGTERM)
    first.wait_record("decision", worker=1)
    here.release()
    first.expect(RESTART, RESTART)
    assert [r["outcome"] for r in records(here.checkpoints, "exit")] == [
        "committed"
    ] * 2
    second = here.train("mwms", 2)
    second.expect(0, 0)
    assert [worker.lines("step") for worker in second] == [[], []]
    assert second.results() == reference("mwms", 2)


@on_both
@pytest.mark.parametrize("moment", ["no close", "no close, in a function"])
def test_a_program_that_never_closes(here: Place, moment: str) -> None:
    """FACTS 2.5: the end of the program is a boundary, notice or not."""
    first = terminate(here, moment)
    first.wait_record("decision")
    here.release("start")
    first.expect(RESTART)
    second = here.start("moments.py", moment)
    second.expect(0)
    assert second[0].lines("step") == []
    shutil.rmtree(here.checkpoints)
    third = here.start("moments.py", moment)
    third.expect(0)
    for cluster in (first, second, third):
        assert cluster[0].lines("leaving")
    [commit] = records(here.checkpoints, "commit")
    assert (commit["step"], commit["because"]) == (6, "finished")


@on_both
def test_before_the_handler(here: Place) -> None:
    """C.2: a signal after the strategy, before the handler: TensorFlow's key."""
    cluster = terminate(here, "before the handler", tf_config=True)
    here.release("start")
    cluster.expect(RESTART)
    [notice] = records(here.checkpoints, "notice")
    assert notice["source"] == f"{here.framework}:preemption-notice"
    assert len(records(here.checkpoints, "commit")) == 1


def test_a_strategy_made_after_the_handler(here: Place) -> None:
    """C.3: the first `run()` arms the signals again that the strategy disarmed."""
    here.hold()
    cluster = here.start("moments.py", "second strategy", tf_config=True)
    cluster[0].wait_line("holding")
    sent = cluster[0].send(signal.SIGTERM)
    notice = cluster.wait_record("notice", source="signal:SIGTERM")
    assert notice["wall"] - sent < SEEN
    cluster.wait_record("decision")
    here.release()
    cluster.expect(RESTART)
    assert records(here.checkpoints, "commit")[-1]["step"] == 4


@pytest.mark.parametrize("tf_config", [False, True])
def test_inside_a_long_op(here: Place, tf_config: bool) -> None:
    """C.1: a signal is seen at once while the main thread is inside one long op."""
    here.hold()
    cluster = here.start("moments.py", "long op", tf_config=tf_config)
    cluster[0].wait_line("holding")
    sent = cluster[0].send(signal.SIGTERM)
    notice = cluster.wait_record("notice", source="signal:SIGTERM")
    assert notice["wall"] - sent < SEEN
    cluster.wait_record("decision")
    here.release()
    cluster.expect(RESTART)
    assert not cluster[0].lines("passed")
    assert [r["step"] for r in records(here.checkpoints, "commit")] == [2]


@on_both
def test_a_watcher_that_fails_is_asked_again(here: Place) -> None:
    """FACTS 2.6: a watcher's exception is logged, and polling continues."""
    cluster = here.start("moments.py", "faulty watcher")
    cluster.expect(RESTART)
    assert "the metadata server does not answer" in cluster[0].output
    assert records(here.checkpoints, "notice")[0]["source"].startswith("callable:")
    assert [r["outcome"] for r in records(here.checkpoints, "exit")] == ["committed"]


@on_both
@pytest.mark.parametrize("longer", [0, 1])
@pytest.mark.parametrize("is_notified", [False, True])
def test_workers_of_uneven_length(here: Place, longer: int, is_notified: bool) -> None:
    """FACTS 2.5: one worker has finished, one still trains: all finish, or all commit.

    The finished worker waits in `close()`, and exits when the outcome is known.
    """
    here.hold()
    cluster = here.start(
        "uneven.py", world=2, each=lambda worker: [8 if worker == longer else 3]
    )
    cluster[longer].wait_line("holding")
    cluster[1 - longer].wait_line("trained")
    if is_notified:
        cluster[1 - longer].send(signal.SIGTERM)
        cluster.wait_record("decision")
    assert [worker.code for worker in cluster] == [None, None]
    assert [worker.lines("closed") for worker in cluster] == [[], []]
    here.release()
    cluster.expect(*[RESTART if is_notified else 0] * 2)
    [commit] = records(here.checkpoints, "commit")
    assert commit["because"] == ("preemption" if is_notified else "finished")
    ends = {r["outcome"] for r in records(here.checkpoints, "exit")}
    assert ends == {"committed" if is_notified else "finished"}
    again = here.start(
        "uneven.py", world=2, each=lambda worker: [8 if worker == longer else 3]
    )
    again.expect(0, 0)
    restored = [worker.lines("restored") for worker in again]
    assert restored[longer] == [["7" if is_notified else "8"]]
    assert restored[1 - longer] == [["3"]]  # once, all workers had the chief's number
    # The worker continues with the chief's value of a State, which the log says.
    is_other = is_notified and longer == 1
    assert ("another value of shared than the chief" in again[1].output) == is_other
