"""SIGTERM to a random worker, a restart, and the same bytes as without it.

The matrix is that of TensorFlow's own tests for its handler: {checkpoint and directory,
CheckpointManager on every worker} x {OneDeviceStrategy, MirroredStrategy with two
devices, MultiWorkerMirroredStrategy alone, with 2 and with 4 processes} x {run,
save_checkpoint_if_preempted}; all of it for one process, pairwise for real clusters.
"""

from __future__ import annotations

import random

import pytest

from tests.conftest import SEED
from tests.multiprocess.conftest import Reference
from tests.multiprocess.harness import (
    RESTART,
    STEPS,
    Cluster,
    Place,
    payload_files,
    records,
)

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]


def interrupt_and_finish(
    here: Place, strategy: str, world: int, *more: object
) -> Cluster:
    """SIGTERM to a random worker in a random step; then a restart to the end."""
    rng = random.Random(f"{SEED} {strategy} {world} {more}")
    step, victim = rng.randrange(1, STEPS - 1), rng.randrange(world)
    print(f"SIGTERM to worker {victim} in step {step + 1}; seed {SEED}")
    here.hold()
    first = here.train(strategy, world, *more, "--hold-at", step)
    for worker in first:
        worker.wait_line("holding")
    first[victim].send(15)
    for worker in range(world):  # whose flags are up by then
        first.wait_record("decision", worker=worker)
    here.release()
    first.expect(*[RESTART] * world)
    [commit] = records(here.checkpoints, "commit")
    assert commit["step"] - step in ((1,) if world > 1 else (0, 1))
    for worker in first:
        assert not worker.lines("result")
    second = here.train(strategy, world, *more)
    second.expect(*[0] * world)
    for worker in second:
        assert worker.lines("restored") == [[str(commit["step"])] * 2]
    assert [r["code"] for r in records(here.checkpoints, "exit")] == (
        [RESTART] * world + [0] * world
    )
    return second


@pytest.mark.parametrize("style", ["run", "save"])
@pytest.mark.parametrize("form", ["checkpoint", "manager"])
@pytest.mark.parametrize("strategy", ["one_device", "mirrored", "mwms"])
def test_one_process(
    here: Place, reference: Reference, strategy: str, form: str, style: str
) -> None:
    """A.1: exact resume, all cells of the matrix for one process."""
    second = interrupt_and_finish(here, strategy, 1, "--form", form, "--style", style)
    assert second.results() == reference(strategy, 1)


@pytest.mark.parametrize(
    ("world", "form", "style", "in_scope"),
    [
        (2, "checkpoint", "run", "nothing"),
        (2, "manager", "save", "handler"),
        (4, "manager", "run", "handler"),
        (4, "checkpoint", "save", "loop"),
    ],
)
def test_real_clusters(
    here: Place, reference: Reference, world: int, form: str, style: str, in_scope: str
) -> None:
    """A.1, FACTS 2.11 and 2.15: exact resume on 2 and 4 workers, code 143, one copy.

    TensorFlow's examples make the handler inside the strategy's scope; so it may be,
    and the loop too.

    Weights, momentum, the parts of the ON_READ sum, every generator, the position in
    every worker's own data and the number of runs are those of the undisturbed run.
    E.1: started once more, the completed run finishes at once without training.
    """
    ways = ("--form", form, "--style", style, "--in-scope", in_scope)
    second = interrupt_and_finish(here, "mwms", world, *ways)
    assert second.results() == reference("mwms", world)
    assert all("worker" not in name for name in payload_files(here.checkpoints))
    assert len({r["total_parts"][0] for r in second.results()}) == world
    if world == 2:
        third = here.train("mwms", world, "--form", form, "--style", style)
        third.expect(0, 0)
        assert third.results() == reference("mwms", world)
        assert [worker.lines("step") for worker in third] == [[], []]


# --- asynchronous saves --------------------------------------------------------------


def train_while_a_save_is_written(here: Place) -> Cluster:
    """Returns workers in step 9, while the captured state of step 6 is not written yet.

    Every variable has changed since step 6.
    """
    here.hold("step", "write")
    cluster = here.train("mwms", 2, "--save-freq", 6, "--hold-in-write", "--hold-at", 8)
    for worker in cluster:
        worker.wait_line("holding", count=1 + (worker is cluster[0]))
    assert [worker.lines("holding") for worker in cluster] == [
        [["write"], ["step"]],
        [["step"]],
    ]
    assert records(here.checkpoints, "commit") == []
    return cluster


def test_sigterm_while_a_save_is_written(here: Place, reference: Reference) -> None:
    """There is time to finish the save; all exit with a newer commit after it."""
    cluster = train_while_a_save_is_written(here)
    cluster[1].send(15)
    cluster.wait_record("notice", worker=1)
    here.release()
    cluster.wait_record("decision", worker=0, boundary=9)
    here.release("write")
    cluster.expect(RESTART, RESTART)
    commits = records(here.checkpoints, "commit")
    assert [(r["step"], r["because"]) for r in commits] == [
        (6, "periodic"),
        (9, "preemption"),
    ]
    second = here.train("mwms", 2)
    second.expect(0, 0)
    assert [worker.lines("restored") for worker in second] == [[["9", "9"]]] * 2
    assert second.results() == reference("mwms", 2)


def test_a_commit_written_during_training_resumes_exactly(
    here: Place, reference: Reference
) -> None:
    """The machines end without a notice; the steps since step 6 are repeated."""
    cluster = train_while_a_save_is_written(here)
    here.release("write")
    cluster.wait_record("commit", step=6)
    for worker in cluster:
        worker.send(9)
    cluster.expect(-9, -9)
    second = here.train("mwms", 2)
    here.release()
    second.expect(0, 0)
    assert [worker.lines("restored") for worker in second] == [[["6", "6"]]] * 2
    assert second.results() == reference("mwms", 2)
