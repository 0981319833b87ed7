"""Every cell of `model.fit` on two workers, and 200 random interruptions."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.multiprocess.fits import DATA, LINES, POINTS, Fit, assert_exact
from tests.multiprocess.harness import Zygote, place
from tests.multiprocess.test_fit_random import weather

pytestmark = pytest.mark.campaign


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    """The process that forks workers."""
    process = Zygote()
    try:
        yield process
    finally:
        process.close()


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("steps_per_execution", [1, 4])
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("line", LINES)
def test_two_workers(
    zygote: Zygote, line: str, data: str, steps_per_execution: int, point: str
) -> None:
    """SIGTERM to one of them, in turns."""
    fit = Fit(line=line, data=data, world=2, steps_per_execution=steps_per_execution)
    with place(zygote) as here:
        assert_exact(here, zygote, fit, point)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("world", "cycles"), [(1, 150), (2, 50)])
def test_random_cycles(
    zygote: Zygote, rng: random.Random, world: int, cycles: int
) -> None:
    """The seed is in the header of the run."""
    weather(zygote, rng, world=world, cycles=cycles)
