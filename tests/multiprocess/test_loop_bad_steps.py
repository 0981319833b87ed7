"""Bad steps of custom loops, on TensorFlow and JAX, in real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.multiprocess.harness import (
    PROGRAMS,
    RESTART,
    Place,
    Zygote,
    place,
    records,
    worker_environment,
)

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(280)]
THOROUGH = pytest.mark.thorough


@pytest.mark.parametrize(
    ("framework", "words"),
    [
        # Step 0: before the first commit. Steps 4 and 5: just after a commit is due.
        ("tensorflow", "iterator 4 loss 4"),
        ("tensorflow", "number 5 variable"),
        ("jax", "iterator 5 variable"),
        ("jax", "number 0 loss"),
        pytest.param("tensorflow", "iterator 8 unclosed", marks=THOROUGH),
        *(
            pytest.param(framework, words, marks=THOROUGH)
            for framework in ("tensorflow", "jax")
            for words in (
                *("iterator 0 loss", "iterator 7 loss 7", "iterator 5 loss 6"),
                *("number 0 variable", "number 7 variable 7", "iterator 4 variable"),
            )
        ),
    ],
)
def test_the_result_is_that_of_data_without_the_batch(
    tmp_path: Path, zygote_of: Callable[[str], Zygote], framework: str, words: str
) -> None:
    """Also if a notice arrives in the bad step, or just after it."""
    program, directory = PROGRAMS / "loop_bad_steps.py", tmp_path / "run"
    env = worker_environment(tmp_path, {"JAX_PLATFORMS": "cpu"})
    feed, bad, kind, *notice = words.split()
    codes = []
    while RESTART in codes[-1:] or not codes:
        given = (framework, directory, feed, bad, kind, *notice)
        done = zygote_of(framework).run(
            program, *given, directory=tmp_path, env=dict(os.environ) | env
        )
        codes.append(done.returncode)
        notice = []
        assert len(codes) < 6, done.stderr
    assert "equal True\n" in done.stdout, done.stderr
    found = records(directory, "badstep")
    left_out = [each["batch"] for each in found if not each["is_sought"]]
    assert left_out == [int(bad)], found


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    "words",
    [
        "1 4 loss",
        *(
            pytest.param(words, marks=THOROUGH)
            for words in (
                *("0 5 loss", "1 4 variable", "1 8 close", "1 8 unclosed", "1 3 save"),
                *("0 3 save", "1 5 loss 5", "0 4 loss 4"),
            )
        ),
    ],
)
def test_two_workers(here: Place, zygote: Zygote, words: str) -> None:
    """The values of all workers are read in each save, by a collective operation."""
    program, (worker, bad, kind, *holds) = "loop_bad_steps_workers.py", words.split()
    given = (worker, bad, kind)
    if holds:
        here.hold()
    cluster = here.start(program, *given, *holds, world=2)
    if holds:
        for each in cluster:
            each.wait_line("holding")
        cluster[0].send(signal.SIGTERM)
        cluster.wait_record("notice", worker=0)
        here.release()
    cluster.expect(RESTART, RESTART)
    if kind == "variable":  # the next start finds the step
        here.start(program, *given, world=2).expect(RESTART, RESTART)
    cluster = here.start(program, *given, world=2)
    cluster.expect(0, 0)
    found = records(here.checkpoints, "badstep")[-1]
    assert (found["batch"], found["worker"]) == (int(bad), 0)
    with place(zygote) as other:
        undisturbed = other.start(program, worker, bad, "without", world=2)
        undisturbed.expect(0, 0)
        expected = [each.lines("final") for each in undisturbed]
    assert [each.lines("final") for each in cluster] == expected
