"""Each fault of the campaign `peers` once: its short form.

Some are tried at a time, because they wait more than they work; a test waits for its
own. What is tried is what was selected: `-k` tries a single one.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from campaigns.campaign import Facts
from campaigns.peers import Case, has_networks, run_undisturbed, try_case
from tests.multiprocess.harness import Zygote, place

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

AT_ONCE = 2

GRACE = 8
"""Seconds in which all leave, where only a deadline ends the wait."""

FOR_AN_END = 20
"""Seconds that leave time for an end of its own."""


def case(
    fault: str, phase: str, victim: int, grace: int | None = None, is_told: bool = True
) -> Case:
    return Case(
        fault=fault,
        phase=phase,
        victim=victim,
        world=2,
        told=1 - victim if is_told else None,
        grace=grace,
        is_async=False,
    )


UNDER_A_NOTICE = {
    "killed": case("killed", "save", 1),
    "stopped": case("stopped for good", "step", 1),
    "cut-off": case("cut off", "bye", 1, FOR_AN_END),
    "no-memory": case("no memory", "save", 1, GRACE),
    "hangs": case("hangs", "step", 1, GRACE),
    "stopped-for-5-s": case("stopped for 5 s", "decision", 0),
    "slow-by-10-s": case("slow by 10 s", "marker", 0),
}
IN_CLOSE = {"frozen": case("stopped for good", "finished", 0, is_told=False)}

Tried = dict[str, Future[Facts]]


@pytest.fixture(scope="module")
def tried(zygote: Zygote, request: pytest.FixtureRequest) -> Iterator[Tried]:
    """By name, what comes out of the cases of the tests that are going to run."""
    undisturbed = run_undisturbed(zygote, 2)

    def run(of: Case) -> Facts:
        with place(zygote) as here:
            return try_case(here, of, undisturbed)

    pool = ThreadPoolExecutor(AT_ONCE)
    of_module = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in of_module]
    cases = UNDER_A_NOTICE | IN_CLOSE
    try:
        yield {
            name: pool.submit(run, cases[name])
            for name in names
            if cases[name].fault != "cut off" or has_networks()
        }
    finally:
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", UNDER_A_NOTICE)
def test_a_worker_goes_or_falls_silent(tried: Tried, name: str) -> None:
    """It is told, or another one is, and is in this phase of the way out."""
    if name not in tried:
        pytest.skip("no network namespaces can be made here")
    tried[name].result()


@pytest.mark.parametrize("name", IN_CLOSE)
def test_who_waits_in_close_is_not_held_by_a_chief_that_is_frozen(
    tried: Tried, name: str
) -> None:
    """Nobody is told to go, and no step follows that would fail."""
    tried[name].result()
