"""The promises of every clock, and additional promises of the fake clock."""

from __future__ import annotations

import threading

import pytest

from tests.fakes.clock import FakeClock
from tfpreempt.core.clock import Clock, SystemClock


@pytest.fixture(params=[SystemClock, FakeClock])
def clock(request: pytest.FixtureRequest) -> Clock:
    made: Clock = request.param()
    return made


def test_monotonic_never_goes_back(clock: Clock) -> None:
    times = [clock.monotonic() for _ in range(100)]
    assert times == sorted(times)
    assert all(isinstance(time, float) for time in times)


def test_wall_is_seconds_of_this_century(clock: Clock) -> None:
    assert isinstance(clock.wall(), float)
    assert 1.5e9 < clock.wall() < 4e9


def test_fake_moves_only_by_hand() -> None:
    clock = FakeClock(start=10.0, wall=2e9)
    assert (clock.monotonic(), clock.wall()) == (10.0, 2e9)
    clock.advance(2.5)
    assert (clock.monotonic(), clock.wall()) == (12.5, 2e9 + 2.5)
    with pytest.raises(ValueError, match="never goes back"):
        clock.advance(-1.0)


def test_fake_wait_ends_by_time_or_event() -> None:
    clock = FakeClock()
    answers: list[bool] = []
    event = threading.Event()

    def wait_twice() -> None:
        answers.append(clock.wait(event, 5.0))
        answers.append(clock.wait(event, 5.0))

    thread = threading.Thread(target=wait_twice, daemon=True)
    thread.start()
    clock.wait_for_waiters()
    clock.advance(4.0)
    assert answers == []
    clock.advance(1.0)
    clock.wait_for_waiters()
    assert answers == [False]
    event.set()
    thread.join(10.0)
    assert answers == [False, True]


def test_fake_waits_for_a_function() -> None:
    assert FakeClock().wait(lambda: True, 1.0)
    assert not FakeClock().wait(lambda: False, 0.0)
