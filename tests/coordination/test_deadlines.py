"""The deadlines of a process, with time as a number."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tfpreempt.coordination.deadlines import Deadlines
from tfpreempt.deadline import LATE
from tfpreempt.testing.clock import FakeClock


class Alarms:
    """A runtime whose alarms never ring."""

    def at(self, when: float, call: Callable[[], None]) -> None:
        pass


@pytest.mark.parametrize(("grace", "end"), [(60.0, 60.0), (None, 30.0)])
def test_a_machine_that_was_told_may_be_going_until_some_time_after_its_deadline(
    grace: float | None, end: float
) -> None:
    """Also where the notice was served, and training goes on."""
    clock = FakeClock()
    deadlines = Deadlines(
        Alarms(),  # type: ignore[arg-type]  # all that it uses
        clock,
        30.0,
        lambda: None,
        lambda is_told: True,
    )
    assert not deadlines.may_go
    deadlines.shorten(clock.monotonic(), grace, None)
    deadlines.forget()
    clock.advance(end + LATE - 1)
    assert deadlines.may_go
    clock.advance(2)
    assert not deadlines.may_go
