"""Many workers: the cost of a decision grows linearly with their number.

Operations and messages are counted; the bench `agreement_scale` measures the time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import agreement_scale
from benchmarks.agreement_others import Agreed, Scenario
from tests.cluster.simulation import Preempt, RunReport, Schedule, SimulatedCluster
from tfpreempt.core.events import Outcome

WORKERS = 300


@pytest.mark.parametrize("dead_share", [0.0, 0.01])
def test_a_decision_costs_six_messages_a_worker(dead_share: float) -> None:
    agreed = agreement_scale.agree(agreement_scale.draw(WORKERS, dead_share, seed=1))
    assert agreed.known is not None
    assert agreed.messages <= 6


@pytest.mark.slow  # thousands of workers
@pytest.mark.parametrize("collectives", [False, True])
def test_operations_grow_with_the_number_of_workers(collectives: bool) -> None:
    """Operations of the whole round: notice, decision, save, commit, goodbyes."""
    few = count_operations(lambda: preempt(WORKERS // 4, collectives))
    many = count_operations(lambda: preempt(WORKERS, collectives))
    assert many < 4.1 * few


def test_the_last_worker_hears_of_the_decision_soon_after_the_last_count() -> None:
    """The host's reads are spread: a few dozen travel times, not one for each key."""
    scenario = Scenario(workers=WORKERS, noticed=1, at_ms=300)
    agreed: Agreed = agreement_scale.agree(scenario)
    assert agreed.known is not None
    served_in = agreed.messages * WORKERS / agreement_scale.MESSAGES_A_MS / 1000
    assert agreed.known < served_in + 0.1


def preempt(workers: int, collectives: bool) -> RunReport:
    """Runs a cluster that is preempted, to its end."""
    report = SimulatedCluster(
        Schedule(
            lengths=(50,) * workers,
            collectives=collectives,
            collective_save=collectives,
            step_ms=((20, 40),),
            faults=(Preempt(worker=1, at_ms=150, grace_seconds=None),),
        )
    ).run()
    assert {w.outcome for w in report.workers} == {Outcome.COMMITTED}
    return report


def count_operations(call: Callable[[], Any]) -> int:
    """How many functions, of Python or of C, a call enters."""
    count = 0

    def hook(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(hook)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count
