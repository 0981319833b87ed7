"""docs/recipes/orbit: `orbit.Controller` on two workers, preempted and started again."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.tensorflow, pytest.mark.multiprocess]
pytest.importorskip("orbit", reason="pip install --no-deps tf-models-official")

from tests.multiprocess.harness import (  # noqa: E402
    RESTART,
    Cluster,
    Place,
    Zygote,
    place,
    records,
)

PROGRAM = str(Path(__file__).with_name("orbit_program.py"))
STEPS_PER_LOOP, LOOPS = 4, 5


def started(cluster: Cluster) -> list[str]:
    """The step at which each Controller began."""
    return [worker.lines("train")[0][2] for worker in cluster]


def samples(cluster: Cluster) -> list[list[list[str]]]:
    """What each worker trained on, step by step."""
    return [worker.lines("samples") for worker in cluster]


@pytest.fixture(scope="module")
def undisturbed(zygote: Zygote) -> Cluster:
    with place(zygote) as made:
        cluster = made.start(PROGRAM, world=2)
        cluster.expect(0, 0)
        yield cluster


@pytest.mark.parametrize("loop", [0, 2, LOOPS - 1])
def test_a_controller_goes_on_at_the_next_loop(
    here: Place, undisturbed: Cluster, loop: int
) -> None:
    """Also from its very first loop, and from its last one, to the same bytes."""
    here.hold()
    first = here.start(PROGRAM, loop, world=2)
    for worker in first:
        worker.wait_line("holding")
    first[1].send(15)
    for worker in range(2):
        first.wait_record("decision", worker=worker)
    here.release()
    first.expect(RESTART, RESTART)
    [commit] = records(here.checkpoints, "commit")
    assert commit["step"] == loop + 1
    second = here.start(PROGRAM, world=2)
    second.expect(0, 0)
    assert started(second) == [str((loop + 1) * STEPS_PER_LOOP)] * 2
    assert second.results() == undisturbed.results()
    parts = zip(samples(first), samples(second), strict=True)
    assert [one + two for one, two in parts] == samples(undisturbed)
