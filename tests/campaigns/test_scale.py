"""A round of ten thousand workers, from the notice to the last bye."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest

from benchmarks import agreement_scale
from benchmarks.agreement_others import MESSAGES_A_MS, TRAVEL_MS
from tests.cluster.schedules import wrong
from tests.cluster.simulation import Kill, Preempt, Schedule, SimulatedCluster
from tfpreempt.core.events import Outcome

WORKERS = 10_000
SLOWEST_MS = 10_000


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    """Hides a warning for each crashed worker."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dead_share", [0.0, 0.01])
def test_ten_thousand_workers_commit_one_step_and_leave(
    dead_share: float, rng: random.Random
) -> None:
    """With collectives no worker may crash, because the steps would fail."""
    drawn = agreement_scale.draw(WORKERS, dead_share, rng.getrandbits(32))
    deaths = [Kill(worker=j, at_ms=agreement_scale.DIES_AT_MS) for j in drawn.dead]
    notice = Preempt(worker=drawn.noticed, at_ms=drawn.at_ms, grace_seconds=None)
    schedule = Schedule(
        lengths=(1000,) * WORKERS,
        collectives=not deaths,
        collective_save=not deaths,
        step_ms=((100, 300),),
        store_ms=(TRAVEL_MS, TRAVEL_MS),
        store_rate=MESSAGES_A_MS,
        heartbeat_ms=drawn.at_ms - agreement_scale.DIES_AT_MS,
        faults=(*deaths, notice),
        seed=drawn.seed,
    )
    report = SimulatedCluster(schedule).run()
    assert wrong(schedule, report) == []
    alive = [w for w in report.workers if w.worker not in drawn.dead]
    assert {w.outcome for w in alive} == {Outcome.COMMITTED}
    assert [len(marker.workers) for marker in report.markers] == [len(alive)]
    assert report.lasted_ms - drawn.at_ms < SLOWEST_MS
