"""Each fault of the campaign `peers` once: its short form.

Several cases run at a time, because they mostly wait; a test waits for its case. Only
selected cases run: `-k` runs a single case.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from campaigns.campaign import Facts
from campaigns.peers import Case, has_networks, run_undisturbed, try_case
from tests.multiprocess.harness import FRAMEWORKS, Zygote, place

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

AT_ONCE = 4

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
OF_THREE = {
    "in-its-part": dataclasses.replace(case("killed", "done", 1), world=3),
    "after-its-part": dataclasses.replace(case("killed", "after done", 1), world=3),
}
CASES = UNDER_A_NOTICE | IN_CLOSE | OF_THREE

Name = tuple[str, str]
"""Of the framework, and of a case."""

Tried = dict[Name, Future[Facts]]


@pytest.fixture(scope="module")
def tried(
    zygote_of: Callable[[str], Zygote], request: pytest.FixtureRequest
) -> Iterator[Tried]:
    """Returns the results of the cases of the selected tests, by name."""
    of_module = [item for item in request.session.items if item.path == request.path]
    parameters = [item.callspec.params for item in of_module]
    names = [(each["framework"], each["name"]) for each in parameters]
    worlds = {(framework, CASES[name].world) for framework, name in names}
    undisturbed = {
        (framework, world): run_undisturbed(zygote_of(framework), world)
        for framework, world in worlds
    }

    def run(framework: str, of: Case) -> Facts:
        of = dataclasses.replace(of, framework=framework)
        with place(zygote_of(framework)) as here:
            return try_case(here, of, undisturbed[framework, of.world])

    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        yield {
            (framework, name): pool.submit(run, framework, CASES[name])
            for framework, name in names
            if CASES[name].fault != "cut off" or has_networks()
        }
    finally:
        pool.shutdown(cancel_futures=True)


on_both = pytest.mark.parametrize("framework", FRAMEWORKS)


@on_both
@pytest.mark.parametrize("name", UNDER_A_NOTICE)
def test_a_worker_ends_or_becomes_silent(
    tried: Tried, framework: str, name: str
) -> None:
    """During its exit, after a notice to this or another worker."""
    if (framework, name) not in tried:
        pytest.skip("no network namespaces can be made here")
    tried[framework, name].result()


@on_both
@pytest.mark.parametrize("name", IN_CLOSE)
def test_a_frozen_chief_does_not_block_a_worker_in_close(
    tried: Tried, framework: str, name: str
) -> None:
    """There is no notice, and no later step that could fail."""
    tried[framework, name].result()


@pytest.mark.thorough
@pytest.mark.parametrize("framework", ["jax"])
@pytest.mark.parametrize("name", OF_THREE)
def test_a_killed_worker_does_not_make_jax_abort_another_worker(
    tried: Tried, framework: str, name: str
) -> None:
    """Both other workers exit with the restart code, in time, and in an order in which
    the end of the chief does not abort the other process."""
    tried[framework, name].result()
