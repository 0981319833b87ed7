"""Each fault of the campaign `peers` once: its short form."""

from __future__ import annotations

from typing import Any

import pytest

from tests.campaigns.peers import Case, has_networks, run_undisturbed, try_case
from tests.multiprocess.harness import Place, Zygote

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

GRACE = 8
"""Seconds in which all leave, where only a deadline ends the wait."""


@pytest.fixture(scope="module")
def undisturbed(zygote: Zygote) -> list[dict[str, Any]]:
    """What two workers yield where nothing happens."""
    return run_undisturbed(zygote, 2)


@pytest.mark.parametrize(
    ("fault", "phase", "victim", "grace"),
    [
        pytest.param("killed", "save", 1, None, id="killed"),
        pytest.param("stopped for good", "step", 1, None, id="stopped"),
        pytest.param("cut off", "bye", 1, 20, id="cut-off"),  # time is left for an end
        pytest.param("no memory", "save", 1, GRACE, id="no-memory"),
        pytest.param("hangs", "step", 1, GRACE, id="hangs"),
        pytest.param("stopped for 5 s", "decision", 0, None, id="stopped-for-5-s"),
        pytest.param("slow by 10 s", "marker", 0, None, id="slow-by-10-s"),
    ],
)
def test_a_worker_goes_or_falls_silent(
    here: Place,
    undisturbed: list[dict[str, Any]],
    fault: str,
    phase: str,
    victim: int,
    grace: int | None,
) -> None:
    """It is told, or another one is, and is in this phase of the way out."""
    if fault == "cut off" and not has_networks():
        pytest.skip("no network namespaces can be made here")
    case = Case(
        fault=fault,
        phase=phase,
        victim=victim,
        world=2,
        told=1 - victim,
        grace=grace,
        is_async=False,
    )
    try_case(here, case, undisturbed)


def test_who_waits_in_close_is_not_held_by_a_chief_that_is_frozen(
    here: Place, undisturbed: list[dict[str, Any]]
) -> None:
    """Nobody is told to go, and no step follows that would fail."""
    case = Case(
        fault="stopped for good",
        phase="finished",
        victim=0,
        world=2,
        told=None,
        grace=None,
        is_async=False,
    )
    try_case(here, case, undisturbed)
