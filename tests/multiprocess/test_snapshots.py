"""Kills without a notice under `tfpreempt run`: the run resumes from memory."""

from __future__ import annotations

import pytest

from tests.multiprocess.conftest import Reference
from tests.multiprocess.fits import Fit, undisturbed
from tests.multiprocess.harness import FRAMEWORKS, STEPS, Place, Zygote, records
from tests.multiprocess.supervised import STRATEGIES, run

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(280)]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("world", [1, 2])
def test_a_killed_worker_loses_the_steps_after_the_snapshot(
    here: Place, reference: Reference, world: int
) -> None:
    with run(here, world) as made:
        died = made.kill(world - 1)
        made.wait()
    for worker in range(world):
        restored = made.restored(worker)
        assert restored["tier"] == "memory"
        assert 0 < int(str(restored["step"])) < died
    results = [worker.result() for worker in made.workers]
    assert results == reference(STRATEGIES[world], world)
    [commit] = records(here.checkpoints, "commit")
    assert (commit["step"], commit["because"]) == (STEPS, "finished")


@pytest.mark.parametrize("line", ["keras", "tf_keras"])
def test_so_does_a_killed_fit(here: Place, zygote: Zygote, line: str) -> None:
    program = ("fit.py", f"--line={line}", "--pause=0.3")
    with run(here, 1, program=program) as made:
        died = made.kill(0, "trained")
        made.wait()
    restored = made.restored(0)
    assert restored["tier"] == "memory"
    assert 0 < int(str(restored["step"])) < died
    assert [made.workers[0].result()] == undisturbed(
        zygote, Fit(line=line, data="tfdata")
    )
