"""A bad step on one of several workers: all workers stop, and leave the step out."""

from __future__ import annotations

import functools
import signal
from typing import Any

import pytest

from tests.multiprocess.harness import (
    RESTART,
    Place,
    Zygote,
    place,
    records,
)

pytestmark = [pytest.mark.multiprocess, pytest.mark.tensorflow]
THOROUGH = pytest.mark.thorough
BAD = 4
FIT = ("--data=ordered", "--strategy=mwms", "--epochs=1")


@pytest.mark.parametrize(
    ("line", "more", "starts"),
    [
        ("keras", ["--save-freq=3"], 1),
        pytest.param("tf_keras", ["--check-every=1"], 1, marks=THOROUGH),
        # The loss is finite: the variables are checked after each step.
        pytest.param("keras", ["--save-freq=6", "--in-x"], 2, marks=THOROUGH),
    ],
)
def test_two_workers(
    here: Place, zygote: Zygote, line: str, more: list[str], starts: int
) -> None:
    words = (*FIT, f"--line={line}", f"--bad={BAD}", *more)
    for _ in range(starts):
        here.start("fit.py", *words, world=2).expect(RESTART, RESTART)
    assert_exact(here, zygote, line, words)


@pytest.mark.parametrize(
    ("check_every", "victim"), [(1, 0), pytest.param(16, 1, marks=THOROUGH)]
)
def test_a_notice_while_the_bad_step_is_pending(
    here: Place, zygote: Zygote, check_every: int, victim: int
) -> None:
    """The loss was read, and all workers stop; or the loss was not read yet."""
    here.hold()
    words = (*FIT, f"--bad={BAD}", f"--check-every={check_every}", "--save-freq=3")
    cluster = here.start("fit.py", *words, f"--hold-at=end:0:{BAD}", world=2)
    for worker in cluster:
        worker.wait_line("holding")
    cluster[victim].send(signal.SIGTERM)
    cluster.wait_record("notice", worker=victim)
    here.release()
    cluster.expect(RESTART, RESTART)
    assert_exact(here, zygote, "keras", words)


def assert_exact(
    here: Place, zygote: Zygote, line: str, words: tuple[str, ...]
) -> None:
    """Checks that the next start leaves out the step, as if the data lacked it."""
    found = records(here.checkpoints, "badstep")[-1]
    assert (found["epoch"], found["batch"], found["worker"]) == (0, BAD, 0)
    assert all(each["step"] <= BAD for each in records(here.checkpoints, "commit"))
    again = here.start("fit.py", *words, world=2)
    again.expect(0, 0)
    assert all(["0", f"{BAD}"] not in each.lines("trained") for each in again)
    assert again.results() == undisturbed(zygote, line)


@functools.cache
def undisturbed(zygote: Zygote, line: str) -> list[dict[str, Any]]:
    """Returns the results on data without the batch, without tfpreempt."""
    with place(zygote) as made:
        words = (f"--line={line}", f"--without={BAD}", "--plain")
        cluster = made.start("fit.py", *FIT, *words, world=2)
        cluster.expect(0, 0)
        return cluster.results()
