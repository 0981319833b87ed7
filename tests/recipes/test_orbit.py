"""docs/recipes/orbit: two workers are preempted, and resume to equal bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.tensorflow, pytest.mark.multiprocess]
pytest.importorskip("orbit.actions")  # PyPI has other packages of that name

from tests.journals import read_journal  # noqa: E402
from tests.multiprocess.harness import (  # noqa: E402
    RESTART,
    Cluster,
    Place,
    Zygote,
    place,
    wait_until,
)

HERE = Path(__file__).parent
ORBIT = str(HERE / "orbit_program.py")
OFFICIAL_MODELS = str(HERE / "official_models_program.py")
STEPS_PER_LOOP, LOOPS = 4, 5


def decisions(here: Place) -> int:
    """Returns the number of workers that know the boundary of the exit."""
    journals = here.checkpoints.rglob("journal")
    records = [record for each in journals for record in read_journal(each)]
    return sum(record["event"] == "decision" for record in records)


def samples(cluster: Cluster) -> list[list[list[str]]]:
    """Returns the trained samples of each worker, step by step."""
    return [worker.lines("samples") for worker in cluster]


def preempt_and_finish(
    here: Place, undisturbed: Cluster, loop: int, *argv: str
) -> None:
    """Preempts one worker in a loop, and checks the results of a complete run."""
    here.hold()
    first = here.start(*argv, loop, world=2)
    for worker in first:
        worker.wait_line("holding")
    first[1].send(15)
    wait_until(lambda: decisions(here) == 2, "both know where to leave")
    here.release()
    first.expect(RESTART, RESTART)
    second = here.start(*argv, world=2)
    second.expect(0, 0)
    begins = [worker.lines("train")[0][2] for worker in second]
    assert begins == [str((loop + 1) * STEPS_PER_LOOP)] * 2
    assert second.results() == undisturbed.results()
    parts = zip(samples(first), samples(second), strict=True)
    assert [one + two for one, two in parts] == samples(undisturbed)


@pytest.fixture(scope="module")
def undisturbed(zygote: Zygote) -> Cluster:
    with place(zygote) as made:
        cluster = made.start(ORBIT, "train.py", world=2)
        cluster.expect(0, 0)
        yield cluster


@pytest.mark.parametrize("loop", [0, 2, LOOPS - 1])
def test_a_controller_resumes_at_the_next_loop(
    here: Place, undisturbed: Cluster, loop: int
) -> None:
    preempt_and_finish(here, undisturbed, loop, ORBIT, "train.py")


def test_a_controller_with_a_manager_resumes_too(
    here: Place, undisturbed: Cluster
) -> None:
    preempt_and_finish(here, undisturbed, 2, ORBIT, "with_manager.py")


def test_a_task_of_the_official_models_resumes(here: Place, zygote: Zygote) -> None:
    pytest.importorskip("official.core.train_lib", exc_type=ImportError)
    with place(zygote) as other:
        undisturbed = other.start(OFFICIAL_MODELS, world=2)
        undisturbed.expect(0, 0)
        preempt_and_finish(here, undisturbed, 2, OFFICIAL_MODELS)
