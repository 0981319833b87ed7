"""How long a step takes, as deadlines and warnings reckon with it."""

from __future__ import annotations

import pytest

from tests.fakes.clock import FakeClock
from tfpreempt.coordination import step_flag
from tfpreempt.coordination.step_flag import StepFlag


class Loop:
    """A loop with a finished step, on a clock that the test advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = FakeClock()
        monkeypatch.setattr(step_flag, "monotonic", self.clock.monotonic)
        self.flag = StepFlag()
        self.steps(1, seconds=5.0)
        self.begin()

    def begin(self) -> None:
        """The first step has ended, and work before the second step takes a second."""
        self.clock.advance(1.0)
        self.flag.leave_out_first(1.0)

    def steps(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.clock.advance(seconds)
            self.flag.ends.append(self.clock.monotonic())

    def evaluate(self, batches: int, seconds: float) -> None:
        """A check at each batch."""
        for _ in range(batches):
            self.flag.measure_from_now()
            self.clock.advance(seconds)
        self.flag.measure_from_now()


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    return Loop(monkeypatch)


def test_before_the_first_step_nothing_is_known(loop: Loop) -> None:
    assert StepFlag().step_seconds == 0.0
    assert loop.flag.step_seconds == 0.0


def test_it_is_the_mean_without_the_first_which_traces(loop: Loop) -> None:
    loop.steps(2, seconds=1.0)
    loop.steps(2, seconds=3.0)
    assert loop.flag.step_seconds == pytest.approx(2.0)


@pytest.mark.parametrize("seconds", [0.0, 100.0])
def test_an_evaluation_between_steps_is_not_step_time(
    loop: Loop, seconds: float
) -> None:
    """Its batches are not counted as steps, and its time is not step time."""
    for _ in range(3):
        loop.steps(4, seconds=2.0)
        loop.evaluate(50, seconds)
    assert loop.flag.step_times() == pytest.approx([2.0] * 12)


def test_a_new_loop_is_measured_by_itself(loop: Loop) -> None:
    loop.steps(4, seconds=9.0)
    loop.evaluate(3, seconds=1.0)
    loop.begin()
    loop.steps(4, seconds=1.0)
    assert loop.flag.step_seconds == pytest.approx(1.0)
