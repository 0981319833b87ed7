"""Bad steps of custom loops, on TensorFlow and JAX, in real processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.multiprocess.harness import (
    PROGRAMS,
    RESTART,
    Zygote,
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
