"""How long a step takes, as deadlines and warnings reckon with it."""

from __future__ import annotations

import pytest

from tests.fakes.clock import FakeClock
from tfpreempt.handler.activity import StepTimer


class Loop:
    """A loop with a finished step, on a clock that the test advances."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.timer = StepTimer(self.clock)
        self.started = 1
        self.step(5.0)
        self.started += 1
        self.timer.begin(self.started)

    def step(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def steps(self, count: int, seconds: float) -> None:
        """Trains the steps of this interval and of the following intervals."""
        for _ in range(count):
            self.step(seconds)
            self.started += 1

    def evaluate(self, batches: int, seconds: float) -> None:
        """A check at each batch."""
        for _ in range(batches):
            self.timer.check(self.started)
            self.clock.advance(seconds)
            self.started += 1
        self.timer.check(self.started)
        self.started += 1

    @property
    def step_seconds(self) -> float:
        return self.timer.step_seconds(self.started)


def test_before_the_first_step_nothing_is_known() -> None:
    assert StepTimer(FakeClock()).step_seconds(1) == 0.0


def test_it_is_the_mean_without_the_first_which_traces() -> None:
    loop = Loop()
    loop.steps(2, seconds=1.0)
    loop.steps(2, seconds=3.0)
    assert loop.step_seconds == pytest.approx(2.0)


@pytest.mark.parametrize("seconds", [0.0, 100.0])
def test_an_evaluation_between_steps_is_not_step_time(seconds: float) -> None:
    """Its batches are not counted as steps, and its time is not step time."""
    loop = Loop()
    for _ in range(3):
        loop.steps(4, seconds=2.0)
        loop.evaluate(50, seconds)
    assert loop.step_seconds == pytest.approx(2.0)


def test_a_new_loop_is_measured_by_itself() -> None:
    loop = Loop()
    loop.steps(4, seconds=9.0)
    loop.evaluate(3, seconds=1.0)
    loop.timer.begin(loop.started)
    loop.steps(4, seconds=1.0)
    assert loop.step_seconds == pytest.approx(1.0)
