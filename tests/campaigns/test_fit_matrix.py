"""Every cell of `model.fit` on two workers."""

from __future__ import annotations

import pytest

from tests.multiprocess.fits import DATA, LINES, POINTS, Fit, assert_exact
from tests.multiprocess.harness import Zygote, place

pytestmark = pytest.mark.campaign


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("steps_per_execution", [1, 4])
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("line", LINES)
def test_two_workers(
    zygote: Zygote, line: str, data: str, steps_per_execution: int, point: str
) -> None:
    """SIGTERM to one of the workers, in turns."""
    fit = Fit(line=line, data=data, world=2, steps_per_execution=steps_per_execution)
    with place(zygote) as here:
        assert_exact(here, zygote, fit, point)
