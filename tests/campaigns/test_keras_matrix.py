"""Every cell of the matrix of exact resumes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.keras.matrix import Cell, cells
from tests.keras.test_matrix import Runner, check, runners, selected
from tests.multiprocess.harness import Zygote

LIMIT = 5400.0

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.campaign,
    pytest.mark.timeout(LIMIT + 60),
]


@pytest.fixture(scope="module")
def lines(
    request: pytest.FixtureRequest, zygote_of: Callable[[str], Zygote]
) -> Iterator[dict[str, Runner]]:
    with runners(zygote_of, selected(request)) as made:
        yield made


@pytest.mark.parametrize("cell", [pytest.param(c, id=c.id) for c in cells()])
def test_equals_a_run_without_interruption(
    lines: dict[str, Runner], cell: Cell
) -> None:
    check(lines[cell.line].result(cell.id, LIMIT), cell)
