"""Random schedules of a simulated cluster that runs the real coordinator.

The profile sets the number (tests/conftest.py): 300 in `make test-fast`, 10,000 in
`make test`. A failure prints the smallest failing schedule; pass the schedule to
`SimulatedCluster` to repeat the run.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.cluster.schedules import draw, is_calm, smallest, wrong
from tests.cluster.simulation import (
    AskToSave,
    Ending,
    FailSave,
    Freeze,
    Kill,
    Preempt,
    Raise,
    RunReport,
    Schedule,
    SimulatedCluster,
)
from tfpreempt.coordination import state_machine
from tfpreempt.coordination.protocol_types import CommitKind
from tfpreempt.core.events import Outcome


@pytest.fixture(autouse=True, scope="module")
def silence():
    """Warnings are right here, and there are thousands of them."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def run(schedule: Schedule) -> RunReport:
    report = SimulatedCluster(schedule).run()
    problems = wrong(schedule, report)
    assert not problems, f"{problems} in {smallest(schedule)}"
    return report


def outcomes(report: RunReport) -> set[Outcome | None]:
    return {w.outcome for w in report.workers}


@example(14234823466)  # the chief raises an error in the round of a periodic save
@example(4066687)  # a save that is asked for three seconds before a machine goes
@given(st.integers(0, 2**64 - 1))
def test_no_schedule_breaks_a_promise(seed):
    """Hypothesis draws a seed instead of a schedule, which is twice as fast.

    `smallest` finds smaller examples than the shrinking of Hypothesis.
    """
    run(draw(random.Random(seed)))


@pytest.mark.slow  # hundreds of schedules
def test_random_schedules_reach_the_important_states():
    """Without these states the test above would prove little."""
    seen: collections.Counter[str] = collections.Counter()
    for seed in range(200):
        schedule = draw(random.Random(seed))
        report = SimulatedCluster(schedule).run()
        seen["calm"] += is_calm(schedule)
        seen["two rounds"] += len(report.markers) > 1
        seen["skew"] += max(schedule.lengths) - min(schedule.lengths) >= 50
        for w in report.workers:
            seen[w.ending.value] += 1
            seen[str(w.outcome)] += 1
    wanted = {"calm", "two rounds", "skew", *map(str, Outcome)} - {Outcome.FAILED}
    wanted |= {e.value for e in Ending if e is not Ending.HUNG}
    assert {name for name in wanted if seen[name] < 3} == set()


@pytest.mark.slow  # a search for each rule
@pytest.mark.parametrize("rule", ["max", "leave"])
def test_a_wrong_rule_is_found(monkeypatch, rule):
    wrong_rules = {
        "max": min,  # the smallest count decides
        "leave": lambda settings, state, outcome: state_machine.ended(
            state_machine.set_(state, outcome=outcome)  # the host waits for no bye
        ),
    }
    monkeypatch.setattr(state_machine, rule, wrong_rules[rule], raising=False)
    assert any(
        wrong(schedule, SimulatedCluster(schedule).run())
        for schedule in (draw(random.Random(seed)) for seed in range(500))
    )


# --- one schedule, one thing ---------------------------------------------------------


def test_equal_schedules_give_equal_runs():
    schedule = draw(random.Random(7))
    assert SimulatedCluster(schedule).run() == SimulatedCluster(schedule).run()


def test_without_a_notice_all_finish():
    report = run(Schedule(lengths=(5, 5, 5)))
    assert outcomes(report) == {Outcome.FINISHED}
    assert report.markers == ()


@pytest.mark.parametrize("grace", [None, 0, 1])
def test_a_notice_commits_one_step(grace):
    preempt = Preempt(worker=1, at_step=4, grace_seconds=grace)
    report = run(Schedule(lengths=(50, 50), faults=(preempt,)))
    assert outcomes(report) == {Outcome.COMMITTED}
    assert {save.boundary for w in report.workers for save in w.saves} <= {4, 5, 6}


def test_a_long_grace_period_is_used():
    preempt = Preempt(worker=0, at_step=4, grace_seconds=30)
    report = run(Schedule(lengths=(1000, 1000), faults=(preempt,)))
    first, last = report.markers
    assert outcomes(report) == {Outcome.COMMITTED}
    assert last.boundary > first.boundary + 150


def test_a_commit_in_which_a_machine_has_its_last_call_is_the_last():
    """Another worker had just received a notice with more time.

    Before, a second round followed, which was too late for the first machine.
    """
    report = run(
        Schedule(
            lengths=(1000, 1000),
            save_ms=(2000, 2000),
            faults=(
                Preempt(worker=1, at_ms=1000, grace_seconds=15),
                Preempt(worker=0, at_ms=10_000, grace_seconds=120),
            ),
        )
    )
    assert outcomes(report) == {Outcome.COMMITTED}
    kinds = [marker.kind for marker in report.markers]
    assert kinds == [CommitKind.TRAIN_ON, CommitKind.EXIT]


def test_all_restart_if_a_worker_is_left_out_after_a_notice():
    """The worker exits as lost. Before, the others finished and were not restarted."""
    report = run(
        Schedule(
            lengths=(20, 20),
            collectives=False,
            collective_save=False,
            step_ms=((5, 5), (100, 100)),
            save_timeout_ms=5000,
            faults=(
                Preempt(worker=0, at_ms=300, grace_seconds=120),
                Freeze(worker=1, at_ms=300, lasts_ms=4000),
            ),
        )
    )
    assert [w.outcome for w in report.workers] == [Outcome.COMMITTED, Outcome.LOST]


def test_notices_at_all_workers_at_once_are_one():
    faults = tuple(Preempt(worker=i, at_ms=300, grace_seconds=0) for i in range(6))
    report = run(Schedule(lengths=(50,) * 6, faults=faults))
    assert outcomes(report) == {Outcome.COMMITTED}
    assert len(report.markers) == 1


def test_a_worker_far_from_a_dropped_save_answers_a_notice():
    """No worker waits for its count until it reaches the boundary of that save."""
    report = run(
        Schedule(
            lengths=(100, 100),
            collectives=False,
            collective_save=False,
            step_ms=((1, 1), (200, 200)),
            save_timeout_ms=5000,
            faults=(
                AskToSave(worker=0, at_step=99),
                FailSave(worker=0, at_step=99),
                Preempt(worker=1, at_ms=2000, grace_seconds=60),
            ),
        )
    )
    assert outcomes(report) == {Outcome.FINISHED}


def test_workers_a_hundred_steps_apart_save_at_one_boundary():
    preempt = Preempt(worker=0, at_step=150, grace_seconds=0)
    schedule = Schedule(
        lengths=(300, 300),
        collectives=False,
        collective_save=False,
        step_ms=((5, 5), (15, 15)),
        faults=(preempt,),
    )
    report = run(schedule)
    assert outcomes(report) == {Outcome.COMMITTED}
    assert len({save.boundary for w in report.workers for save in w.saves}) == 1


def test_after_a_death_under_a_notice_the_chief_saves_alone():
    faults = (
        Preempt(worker=0, at_step=4, grace_seconds=25),
        Kill(worker=1, at_step=4),
    )
    schedule = Schedule(
        lengths=(50, 50, 50), collective_save=False, failure_ms=(2, 5), faults=faults
    )
    report = run(schedule)
    assert outcomes(report) <= {Outcome.LOST, Outcome.COMMITTED, None}
    assert report.workers[2].outcome is Outcome.LOST


def test_a_long_freeze_costs_the_commit_but_no_deadline():
    faults = (
        Freeze(worker=2, at_step=4, lasts_ms=60_000),
        Preempt(worker=0, at_ms=900, grace_seconds=20),
    )
    report = run(Schedule(lengths=(50, 50, 50), faults=faults))
    assert Outcome.FINISHED not in outcomes(report)
    assert all(w.in_time for w in report.workers[:2])


def test_an_error_ends_all_workers():
    report = run(Schedule(lengths=(50, 50), faults=(Raise(worker=1, at_step=4),)))
    assert {w.ending for w in report.workers} == {Ending.RAISED}


def test_a_failed_save_is_lost_on_all_workers():
    preempt = Preempt(worker=0, at_step=4, grace_seconds=0)
    failure = FailSave(worker=0, at_step=1)
    report = run(Schedule(lengths=(50, 50), faults=(preempt, failure)))
    assert outcomes(report) == {Outcome.LOST}
    assert report.markers == ()


@pytest.mark.parametrize("world", [1, 2])
def test_a_long_save_may_finish_without_a_known_deadline(world):
    """Before, all workers exited as lost after a finished save: the wait had ended."""
    schedule = Schedule(
        lengths=(50,) * world,
        save_ms=(20_000, 20_000),
        save_timeout_ms=5000,
        faults=(Preempt(at_step=4, grace_seconds=None),),
    )
    assert outcomes(run(schedule)) == {Outcome.COMMITTED}


TEN_MINUTES = (600_000, 600_000)
SECOND = (1000, 1000)


@pytest.mark.parametrize("world", [1, 3])
def test_a_step_of_ten_minutes_may_finish_without_a_deadline(world: int):
    schedule = Schedule(
        lengths=(5,) * world,
        step_ms=(TEN_MINUTES,),
        faults=(Preempt(at_step=2, grace_seconds=None),),
    )
    report = run(schedule)
    assert {w.ending for w in report.workers} == {Ending.LEFT}
    assert outcomes(report) == {Outcome.COMMITTED}
    assert [m.workers for m in report.markers] == [tuple(range(world))]


def test_a_save_of_ten_minutes_may_finish_if_no_worker_waits():
    preempt = Preempt(at_step=2, grace_seconds=None)
    schedule = Schedule(lengths=(5,), save_ms=TEN_MINUTES, faults=(preempt,))
    assert outcomes(run(schedule)) == {Outcome.COMMITTED}


def test_a_step_of_ten_minutes_ends_before_a_known_deadline():
    schedule = Schedule(
        lengths=(5,), step_ms=(TEN_MINUTES,), faults=(Preempt(grace_seconds=20),)
    )
    (worker,) = run(schedule).workers
    assert worker.ending is Ending.OVERRUN


@pytest.mark.parametrize("slow", [0, 1])
def test_a_wait_for_a_long_step_ends_at_the_peer_timeout(slow: int):
    """The others exit, then the worker in the step; no worker stays for ever."""
    steps = [SECOND, SECOND]
    steps[slow] = TEN_MINUTES
    schedule = Schedule(
        lengths=(5, 5),
        collectives=False,
        collective_save=False,
        step_ms=tuple(steps),
        faults=(Preempt(worker=0, at_step=1, grace_seconds=None),),
    )
    cluster = SimulatedCluster(schedule)
    report = cluster.run()
    assert wrong(schedule, report) == []
    waiting = report.workers[1 - slow]
    assert waiting.ending is Ending.LEFT
    assert waiting.ended_at_ms < 70_000


def test_a_known_deadline_replaces_an_unknown_deadline():
    faults = (
        Preempt(at_step=4, grace_seconds=0),
        Preempt(at_step=4, grace_seconds=7),
    )
    schedule = Schedule(
        lengths=(50,), save_ms=(20_000, 20_000), save_timeout_ms=5000, faults=faults
    )
    (worker,) = run(schedule).workers
    assert worker.ending is Ending.OVERRUN
    assert worker.ended_at_ms > 5000


def test_the_chief_that_committed_does_not_leave_as_lost():
    """The chief waits for missing goodbyes, but not beyond its own deadline."""
    faults = (
        Freeze(worker=2, at_step=4, lasts_ms=30_000),
        Preempt(worker=0, at_step=9, grace_seconds=3),
    )
    schedule = Schedule(
        lengths=(130, 30, 30), collectives=False, collective_save=False, faults=faults
    )
    report = run(schedule)
    assert [w.outcome for w in report.workers[:2]] == [Outcome.COMMITTED] * 2


def test_a_deadline_applies_to_the_fit_after_a_finished_fit():
    """The chief freezes at the end of the fit, while another worker says goodbye."""
    freeze = Freeze(at_ms=90, lasts_ms=5000)
    for grace in (1, 2, 3, 5):
        preempt = Preempt(worker=1, at_ms=529, grace_seconds=grace)
        schedule = Schedule(
            lengths=(6, 6),
            fits=2,
            step_ms=((1, 5),),
            start_ms=(0, 0),
            faults=(freeze, preempt),
        )
        run(schedule)


def test_periodic_saves_and_a_second_fit():
    faults = (AskToSave(at_step=4), AskToSave(at_step=12), AskToSave(at_step=25))
    report = run(Schedule(lengths=(20, 20), fits=2, faults=faults))
    assert outcomes(report) == {Outcome.FINISHED}
    assert len(report.markers) == 3


def test_a_periodic_save_without_a_worker_that_is_needed_ends():
    """One worker was at the boundary before the step of the others.

    Before, the worker waited for a commit without end.
    """
    faults = (AskToSave(at_ms=14), Freeze(worker=2, at_ms=81, lasts_ms=60_000))
    schedule = Schedule(
        lengths=(4, 4, 4),
        fits=2,
        step_ms=((1, 5),),
        store_ms=(1, 100),
        gap_ms=(0, 5),
        save_timeout_ms=5000,
        faults=faults,
        seed=3427751076,
    )
    report = run(schedule)
    assert Ending.HUNG not in {w.ending for w in report.workers}


def test_a_cluster_moves_one_event_at_a_time():
    cluster = SimulatedCluster(Schedule(lengths=(50, 50)))
    while cluster.workers[1].step_flag.started < 7:
        assert cluster.step()
    cluster.apply(Preempt(worker=1, grace_seconds=0))
    while cluster.step():
        pass
    assert outcomes(cluster.report()) == {Outcome.COMMITTED}
    assert not cluster.step()


def test_the_chief_writes_the_share_of_a_crashed_worker() -> None:
    schedule = Schedule(
        lengths=(50, 50, 50),
        collective_save=False,
        shares=True,
        save_ms=(1000, 1000),
        step_ms=((50, 50),),
        heartbeat_ms=2000,
        faults=(Preempt(at_ms=400, grace_seconds=30), Kill(worker=1, at_ms=1100)),
    )
    report = run(schedule)
    first = report.markers[0]
    assert first.workers == (0, 2)
    assert len(first.shares) == 3


def test_before_a_deadline_the_chief_waits_no_longer_than_it_can_make_up_for() -> None:
    """After seven tenths of the time, too little is left to write another share."""
    schedule = Schedule(
        lengths=(50, 50),
        collective_save=False,
        shares=True,
        save_ms=(8000, 8000),
        step_ms=((50, 50),),
        faults=(
            Preempt(at_ms=400, grace_seconds=27),
            Freeze(worker=1, at_ms=1500, lasts_ms=60_000),
        ),
    )
    report = run(schedule)
    assert report.workers[0].outcome is Outcome.COMMITTED
    assert [m.workers for m in report.markers] == [(0,)]


def test_a_slow_worker_is_waited_for_if_the_chief_has_no_time() -> None:
    """Given up at once, its share could not have been written in time either."""
    schedule = Schedule(
        lengths=(50, 50),
        collective_save=False,
        shares=True,
        save_ms=(16_000, 16_000),
        save_more_ms=(0, 2000),
        step_ms=((50, 50),),
        faults=(Preempt(at_ms=400, grace_seconds=30),),
    )
    report = run(schedule)
    assert outcomes(report) == {Outcome.COMMITTED}
    assert [m.workers for m in report.markers] == [(0, 1)]


def test_the_chief_writes_the_shares_of_many_lost_workers() -> None:
    """There is time for more than one share, if the chief does not wait too long."""
    schedule = Schedule(
        lengths=(50,) * 8,
        collective_save=False,
        shares=True,
        save_ms=(2000, 2000),
        step_ms=((50, 50),),
        heartbeat_ms=60_000,
        faults=(
            Preempt(at_ms=400, grace_seconds=30),
            *(Freeze(worker=j, at_ms=1500, lasts_ms=60_000) for j in range(4, 8)),
        ),
    )
    report = run(schedule)
    assert report.workers[0].outcome is Outcome.COMMITTED
    assert [m.workers for m in report.markers] == [(0, 1, 2, 3)]


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("seed", [780, 9727, 215063, 503899, 617758])
def test_schedules_that_broke_a_promise_once(seed: int, shares: bool) -> None:
    run(dataclasses.replace(draw(random.Random(seed)), shares=shares))
