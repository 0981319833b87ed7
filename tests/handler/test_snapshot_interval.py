"""The interval of snapshots, computed from their cost."""

from __future__ import annotations

import pytest

from tfpreempt.handler.activity import SHARE, SHORTEST, WARM_UP, IntervalPolicy


def warm() -> IntervalPolicy:
    """Returns the policy after a first snapshot, for steps of 0.1 s."""
    interval = IntervalPolicy()
    interval.undisturbed(10.0, 100)
    interval.after(stood=3.0, beside=1.0, steps=0)
    return interval


def test_snapshots_stop_training_for_one_percent_of_the_time() -> None:
    period = warm().after(stood=0.2, beside=0.5, steps=5)
    assert period == pytest.approx(0.2 / SHARE)


def test_slower_steps_count_as_cost_of_a_snapshot() -> None:
    """Ten steps of 0.1 s took 1.5 s while it was written."""
    period = warm().after(stood=0.2, beside=1.5, steps=10)
    assert period == pytest.approx(0.7 / SHARE)


def test_steps_that_were_quicker_than_usual_earn_nothing() -> None:
    period = warm().after(stood=0.2, beside=0.1, steps=10)
    assert period == pytest.approx(0.2 / SHARE)


def test_the_cost_of_the_first_snapshot_is_limited() -> None:
    interval = IntervalPolicy()
    assert interval.after(stood=3.0, beside=1.0, steps=1) == WARM_UP
    assert interval.after(stood=0.2, beside=0.0, steps=0) == pytest.approx(0.2 / SHARE)


def test_one_that_met_a_busy_machine_does_not_count() -> None:
    interval = warm()
    for stood in (0.1, 0.1, 5.0):
        period = interval.after(stood=stood, beside=0.1, steps=1)
    assert period == pytest.approx(0.1 / SHARE)
    interval.after(stood=5.0, beside=0.1, steps=1)
    period = interval.after(stood=5.0, beside=0.1, steps=1)
    assert period == pytest.approx(5.0 / SHARE)


def test_there_is_a_shortest_interval() -> None:
    assert warm().after(stood=0.0, beside=0.0, steps=0) == SHORTEST


def test_no_snapshot_begins_before_the_previous_snapshot_ends() -> None:
    assert warm().after(stood=0.0, beside=40.0, steps=400) == 40.0


def test_without_a_measured_step_the_complete_time_counts() -> None:
    interval = IntervalPolicy(_is_first=False)
    assert interval.step_seconds is None
    assert interval.after(stood=0.1, beside=0.9, steps=3) == pytest.approx(1 / SHARE)


def test_a_span_without_steps_is_ignored() -> None:
    interval = warm()
    interval.undisturbed(60.0, 0)
    assert interval.step_seconds == pytest.approx(0.1)


def test_a_pause_between_steps_is_no_slow_step() -> None:
    interval = warm()
    interval.undisturbed(10.0, 100)
    interval.undisturbed(500.0, 100)  # an evaluation of minutes
    assert interval.step_seconds == pytest.approx(0.1)
