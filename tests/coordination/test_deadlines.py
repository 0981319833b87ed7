"""The deadlines of a process, with time as a number."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tfpreempt.coordination.deadlines import Deadlines
from tfpreempt.core.deadline import LATE
from tfpreempt.testing.clock import FakeClock


class Alarms:
    """A runtime whose alarms never ring."""

    def at(self, when: float, call: Callable[[], None]) -> None:
        pass


def deadlines_on(clock: FakeClock) -> Deadlines:
    return Deadlines(
        Alarms(),  # type: ignore[arg-type]  # all that it uses
        clock,
        30.0,
        lambda: 0.0,
        lambda: None,
        lambda is_told: True,
    )


@pytest.mark.parametrize(("grace", "end"), [(60.0, 60.0), (None, 30.0)])
def test_a_machine_that_was_told_may_be_going_until_some_time_after_its_deadline(
    grace: float | None, end: float
) -> None:
    """Also where the notice was served, and training goes on."""
    clock = FakeClock()
    deadlines = deadlines_on(clock)
    assert not deadlines.may_go
    deadlines.shorten(clock.monotonic(), grace)
    deadlines.forget()
    clock.advance(end + LATE - 1)
    assert deadlines.may_go
    clock.advance(2)
    assert not deadlines.may_go


@pytest.mark.parametrize(("step", "left"), [(10.0, 18.8), (600.0, 29.8)])
def test_after_a_step_that_outlived_the_wait_the_copy_has_the_whole_time(
    step: float, left: float
) -> None:
    """Before that somebody may count from the notice."""
    clock = FakeClock()
    deadlines = deadlines_on(clock)
    deadlines.shorten(clock.monotonic(), None)
    clock.advance(step)
    deadlines.arrive()
    assert deadlines.left == pytest.approx(left)


@pytest.mark.parametrize(
    ("graces", "times", "end"),
    [
        ((30.0, 60.0), (0.0, 0.0), 30.0),
        ((60.0, 30.0), (0.0, 10.0), 40.0),  # a later notice shortens it
        ((30.0, 60.0), (0.0, 10.0), 30.0),  # and never extends it
        ((30.0, 30.0), (0.0, 29.0), 30.0),  # the same notice again changes nothing
        ((30.0, None), (0.0, 10.0), 30.0),
        ((60.0, None), (0.0, 10.0), 40.0),  # nobody says: a wait's length
        ((0.0, 60.0), (0.0, 10.0), 30.0),  # 0: the same
    ],
)
def test_the_earliest_deadline_wins(
    graces: tuple[float | None, ...], times: tuple[float, ...], end: float
) -> None:
    clock = FakeClock()
    deadlines, start = deadlines_on(clock), clock.monotonic()
    assert deadlines.at is None
    for grace, at in zip(graces, times, strict=True):
        deadlines.shorten(start + at, grace)
    assert deadlines.at == start + end


@pytest.mark.parametrize(
    ("save", "patience"), [(None, 30.0), (5.0, 30.0), (20.0, 60.0)]
)
def test_waiting_is_never_shorter_than_saves_take(
    save: float | None, patience: float
) -> None:
    clock = FakeClock()
    deadlines = deadlines_on(clock)
    deadlines.save_seconds = save
    deadlines.shorten(clock.monotonic(), None)
    assert deadlines.at == clock.monotonic() + patience
