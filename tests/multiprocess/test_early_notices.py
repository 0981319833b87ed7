"""Notices outside of training: the restart code, never a failure, and nothing lost."""

from __future__ import annotations

import signal
import time

import pytest

from tests.multiprocess.harness import FRAMEWORKS, RESTART, Cluster, Place, records
from tfpreempt.checkpoint.directory import layout

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.timeout(240),
    pytest.mark.parametrize("framework", FRAMEWORKS),
]

STEPS = 6
LONG = 600.0  # seconds of grace that no test waits for
UNKNOWN = 0.0


def terminate(
    here: Place, moment: str, grace: float = UNKNOWN, world: int = 1
) -> Cluster:
    """Starts the program and sends SIGTERM to its last worker where it holds."""
    here.hold("start")
    cluster = here.start("protected.py", moment, grace, world=world)
    for worker in cluster:
        worker.wait_line("holding")
    cluster[world - 1].send(signal.SIGTERM)
    return cluster


def committed(here: Place) -> list[int]:
    return [r["step"] for r in records(here.checkpoints, "commit")]


def test_a_process_alone_leaves_at_once_before_it_has_trained(here: Place) -> None:
    cluster = terminate(here, "before the strategy")
    cluster.expect(RESTART)
    assert "no training is running" in cluster[0].output
    assert not here.checkpoints.exists()


def test_a_notice_within_the_restore_leaves_the_commit_alone(here: Place) -> None:
    """Also where nothing was protected: the handler's own start is."""
    here.start("protected.py", "in the restore", UNKNOWN).expect(0)
    cluster = terminate(here, "in the restore")
    cluster.expect(RESTART)
    assert committed(here) == [STEPS]
    assert list(here.checkpoints.joinpath(layout.LEASE).glob("*")) == []
    here.release("start")
    again = here.start("protected.py", "in the restore", UNKNOWN)
    again.expect(0)
    assert again[0].lines("restored") == [[str(STEPS)]]


def test_a_worker_of_a_cluster_keeps_the_notice_for_the_handler(here: Place) -> None:
    """An early exit would block the others, so all exit at the first boundary."""
    cluster = terminate(here, "before the strategy", world=2)
    cluster[1].wait_text("the next handler of this process will handle the notice")
    here.release("start")
    cluster.expect(RESTART, RESTART)
    assert committed(here)[0] <= 1  # of the steps at most the first was begun
    [notice] = records(here.checkpoints, "notice")
    assert (notice["source"], notice["worker"]) == ("signal:SIGTERM", 1)
    again = here.start("protected.py", "", UNKNOWN, world=2)
    again.expect(0, 0)
    assert committed(here)[-1] == STEPS


def test_a_worker_of_a_cluster_exits_before_its_machine_ends(here: Place) -> None:
    cluster = terminate(here, "before the strategy", grace=1.0, world=2)
    began = time.monotonic()
    cluster[0].send(signal.SIGTERM)
    cluster.expect(RESTART, RESTART)
    assert time.monotonic() - began > 0.5
    assert "the machine will be terminated" in cluster[1].output


def test_a_start_that_fails_under_a_notice_is_no_failure(here: Place) -> None:
    moment = "in a restore that fails"
    here.start("protected.py", moment, UNKNOWN, world=2).expect(0, 0)
    here.hold("start")
    cluster = here.start("protected.py", moment, UNKNOWN, world=2)
    for worker in cluster:
        worker.wait_line("holding")
        worker.send(signal.SIGTERM)
    for worker in cluster:
        worker.wait_text("the next handler of this process will handle the notice")
    here.release("start")
    cluster.expect(RESTART, RESTART)
    assert "OSError: the disk has gone" in cluster[1].output


def test_code_after_the_loop_may_end_within_the_grace_period(here: Place) -> None:
    cluster = terminate(here, "after the loop", LONG)
    cluster[0].wait_text("without a handler, the process exits in")
    here.release("start")
    cluster.expect(0)
    assert cluster[0].lines("ended")


@pytest.mark.parametrize("grace", [UNKNOWN, 1.0])
def test_code_after_the_loop_is_ended_before_the_machine_is(
    here: Place, grace: float
) -> None:
    """Without a grace at once. The final state is committed by then."""
    cluster = terminate(here, "after the loop", grace)
    cluster.expect(RESTART)
    assert not cluster[0].lines("ended")
    assert committed(here) == [STEPS]


@pytest.mark.parametrize("told", [0, 1])
def test_after_the_loop_no_worker_ends_another(here: Place, told: int) -> None:
    """On JAX, the end of process 0 would end process 1; both end together."""
    here.hold("start")
    cluster = here.start("protected.py", "after the loop", UNKNOWN, world=2)
    for worker in cluster:
        worker.wait_line("holding")
    cluster[told].send(signal.SIGTERM)
    cluster[told].wait_text("Exiting to be restarted")
    here.release("start")
    codes = {told: RESTART, 1 - told: 0}
    cluster.expect(codes[0], codes[1])
    assert cluster[1 - told].lines("ended")


def test_the_next_handler_handles_a_notice_between_two_handlers(here: Place) -> None:
    cluster = terminate(here, "between two handlers", grace=5.0)
    cluster[0].wait_text("the next handler of this process will handle the notice")
    here.release("start")
    cluster.expect(RESTART)
    second = here.checkpoints / "second"
    assert records(second, "commit")[-1]["because"] == "preemption"
    assert [r["outcome"] for r in records(second, "exit")] == ["committed"]


def test_a_check_within_an_evaluation_saves_and_leaves(here: Place) -> None:
    cluster = terminate(here, "in an evaluation")
    cluster.wait_record("notice")
    here.release("start")
    cluster.expect(RESTART)
    assert not cluster[0].lines("evaluated")
    assert committed(here) == [STEPS]
    again = here.start("protected.py", "in an evaluation", UNKNOWN)
    again.expect(0)
    assert again[0].lines("restored") == [[str(STEPS)]]
    assert again[0].lines("evaluated")
