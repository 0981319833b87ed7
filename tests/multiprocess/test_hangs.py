"""Workers that hang, under `tfpreempt run --hang-timeout`: the run resumes exactly."""

from __future__ import annotations

import signal

import pytest

from tests.multiprocess.conftest import Reference
from tests.multiprocess.harness import (
    FRAMEWORKS,
    STEPS,
    Place,
    records,
    wait_until,
)
from tests.multiprocess.supervised import TRAIN, Run, run

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(280)]

WAITING = {"tensorflow": "quick_execute", "jax": "block_until_ready"}
"""In the stack of a worker that waits in a collective."""

OPTIONS = ("--hang-timeout", "5", "--kill-after", "1")


def stacks(made: Run) -> list[str]:
    """Returns the stacks of both workers."""
    return [each["stacks"] for each in records(made.here.checkpoints, "stacks")]


def is_exact(made: Run, reference: Reference) -> bool:
    """Checks that the run resumes from memory with undisturbed results."""
    made.wait()
    assert {made.restored(worker)["tier"] for worker in range(2)} == {"memory"}
    [exited] = records(made.here.checkpoints, "exited")
    assert (exited["failures"], exited["preemptions"]) == (1, 0)
    return [each.result() for each in made.workers] == reference("mwms", 2)


def test_a_stuck_reader_and_the_collective_that_waits_for_it(
    here: Place, reference: Reference
) -> None:
    holds = ["--hold-worker", "1", "--hold-at", *map(str, range(2, STEPS))]
    with run(here, 2, *OPTIONS, program=("train.py", *TRAIN, "mwms", *holds)) as made:
        made.wait_snapshot()
        here.hold()
        wait_until(lambda: records(here.checkpoints, "restarted"), "a restart")
        here.release()
        assert is_exact(made, reference)
    waiting, reading = stacks(made)
    assert "in _distributed" not in reading
    assert "in hold" in reading
    assert "in step" in waiting  # the collective that the other never entered
    assert WAITING["tensorflow"] in waiting


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_stopped_peer(here: Place, reference: Reference) -> None:
    with run(here, 2, *OPTIONS) as made:
        made.kill(1, number=signal.SIGSTOP)
        assert is_exact(made, reference)
    [hang] = records(here.checkpoints, "hang")
    assert [each["state"][0] for each in hang["workers"]] == ["S", "T"]
    assert WAITING[here.framework] in stacks(made)[0]
    assert stacks(made)[1] == ""
