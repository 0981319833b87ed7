"""The deadlines of a process, with time as a number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.clock import FakeClock
from tfpreempt.coordination.deadlines import Deadlines
from tfpreempt.coordination.protocol_types import Key
from tfpreempt.core.deadline import LATEST_SHUTDOWN_SECONDS


class Alarms:
    """An executor whose alarms never ring."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        self.times.append(when)


def deadlines_on(
    clock: FakeClock, step: float = 0.0, alarms: Alarms | None = None, world: int = 2
) -> Deadlines:
    return Deadlines(
        alarms or Alarms(),  # type: ignore[arg-type]  # all that it uses
        clock,
        30.0,
        lambda: step,
        lambda: None,
        lambda is_told: True,
        world,
    )


@pytest.mark.parametrize(
    ("grace", "end"), [(60.0, 60.0), (3600.0, 3600.0), (None, 30.0)]
)
def test_a_shutdown_stays_pending_for_a_while_after_the_deadline(
    grace: float | None, end: float
) -> None:
    """Also after a served notice, while training continues."""
    clock = FakeClock()
    deadlines = deadlines_on(clock)
    assert not deadlines.shutdown_pending
    deadlines.shorten(clock.monotonic(), grace)
    deadlines.forget()
    clock.advance(end + LATEST_SHUTDOWN_SECONDS - 1)
    assert deadlines.shutdown_pending
    clock.advance(2)
    assert not deadlines.shutdown_pending


@pytest.mark.parametrize(("step", "left"), [(10.0, 18.8), (600.0, 29.8)])
def test_after_a_step_that_outlived_the_wait_the_copy_has_the_whole_time(
    step: float, left: float
) -> None:
    """Before, another worker may count from the notice."""
    clock = FakeClock()
    deadlines = deadlines_on(clock)
    deadlines.shorten(clock.monotonic(), None)
    clock.advance(step)
    deadlines.extend(at_boundary=True)
    assert deadlines.left == pytest.approx(left)


@pytest.mark.parametrize(
    ("graces", "times", "end"),
    [
        ((30.0, 60.0), (0.0, 0.0), 30.0),
        ((60.0, 30.0), (0.0, 10.0), 40.0),  # a later notice shortens it
        ((30.0, 60.0), (0.0, 10.0), 30.0),  # and never extends it
        ((30.0, 30.0), (0.0, 29.0), 30.0),  # the same notice again changes nothing
        ((30.0, None), (0.0, 10.0), 30.0),
        ((60.0, None), (0.0, 10.0), 40.0),  # unknown: the timeout
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


@pytest.mark.parametrize(
    ("grace", "save", "step", "pays"),
    [
        (None, 1.0, 1.0, False),
        (0, None, 0.0, False),
        (30.0, None, 1.0, True),
        (9.0, 1.0, 1.0, True),
        (8.9, 1.0, 1.0, False),
    ],
)
def test_a_second_commit_pays_from_three_saves_and_six_steps(
    grace: float | None, save: float | None, step: float, pays: bool
) -> None:
    deadlines = deadlines_on(FakeClock(), step)
    deadlines.save_seconds = save
    assert deadlines.second_commit_is_worthwhile(grace) is pays


seconds = st.floats(0.01, 10_000)


@settings(max_examples=100)  # it is arithmetic
@given(seconds, seconds, seconds)
def test_the_final_round_leaves_time_for_the_save(
    grace: float, save: float, step: float
) -> None:
    clock, alarms = FakeClock(), Alarms()
    deadlines = deadlines_on(clock, step, alarms)
    deadlines.save_seconds = save
    deadlines.shorten(clock.monotonic(), grace)
    deadlines.schedule_final_round()
    assert alarms.times[-1] < clock.monotonic() + grace - save - 2 * step


def test_training_continues_after_a_commit_until_the_final_round() -> None:
    clock = FakeClock()
    deadlines = deadlines_on(clock, 1.0)
    deadlines.save_seconds = 10.0
    assert not deadlines.limits().may_train_on
    deadlines.shorten(clock.monotonic(), 60.0)
    clock.advance(40.0)
    assert deadlines.limits().may_train_on
    clock.advance(2.0)
    assert not deadlines.limits().may_train_on


def wait(
    key: Key,
    total: float | None,
    save: float | None = None,
    limit: float = 30.0,
    share: float = 0.0,
    world: int = 2,
) -> float:
    """Returns the seconds of a wait for other workers, a given time before the end."""
    clock = FakeClock()
    deadlines = deadlines_on(clock, world=world)
    deadlines.peer_timeout, deadlines.save_seconds = limit, save
    deadlines.share_seconds = share
    if total is not None:
        deadlines.shorten(clock.monotonic() + total - 1000.0, 1000.0)
    return deadlines.limits().of[key] - clock.monotonic()


maybe = st.none() | seconds


@settings(max_examples=100)
@given(seconds, maybe, seconds)
def test_counts_are_waited_for_in_the_first_half(
    total: float, save: float | None, limit: float
) -> None:
    assert 0 < wait(Key.COUNT, total, save, limit) <= 0.5 * min(total, limit) + 1e-6


@settings(max_examples=100)
@given(seconds, seconds)
def test_shards_are_waited_for_longer_than_counts_but_not_to_the_end(
    total: float, limit: float
) -> None:
    shards = wait(Key.DONE, total, None, limit)
    assert wait(Key.COUNT, total, None, limit) <= shards < total


@pytest.mark.parametrize(
    ("total", "share", "waits"),
    [
        (30.0, 0.0, 21.0),  # there are no shares
        (30.0, 2.0, 21.0),
        (30.0, 10.0, 15.0),  # another write takes 1.5 times as long
        (20.0, 13.0, 2.0),  # some wait there is
        (14.0, 16.0, 9.8),  # another one takes too long: only a slow worker helps
        (30.0, 60.0, 21.0),
        (100.0, 10.0, 21.0),  # no wait is longer than `peer_timeout`
        (None, 60.0, 21.0),  # without a deadline
    ],
)
def test_a_deadline_reserves_time_for_the_share_of_a_silent_worker(
    total: float | None, share: float, waits: float
) -> None:
    assert wait(Key.DONE, total, share=share) == pytest.approx(waits)


@pytest.mark.parametrize(
    ("world", "share", "waits"),
    [
        (8, 2.0, 9.0),  # to write all of them takes 21 s; three tenths are waited
        (8, 1.0, 19.5),
        (4, 4.0, 12.0),
        (64, 0.1, 20.55),
        (64, 19.0, 3.0),  # one of them is written in any case
    ],
)
def test_it_leaves_time_for_more_shares_than_one(
    world: int, share: float, waits: float
) -> None:
    assert wait(Key.DONE, 30.0, share=share, world=world) == pytest.approx(waits)


def test_the_next_save_is_planned_as_one_that_the_chief_makes_alone() -> None:
    deadlines = deadlines_on(FakeClock(), world=8)
    assert deadlines.planned(4.0, 3.0) == 25.0
    assert deadlines.planned(4.0, 0.0) == 4.0


def test_a_deadline_that_is_over_leaves_no_wait() -> None:
    assert wait(Key.COUNT, -10.0, 1.0) == 0.0
    assert wait(Key.DONE, -10.0) == 0.0


def test_the_host_waits_ten_seconds_for_byes_less_before_a_deadline() -> None:
    assert wait(Key.BYE, None) == pytest.approx(10.0)
    assert wait(Key.BYE, 3.0) == pytest.approx(3.0)
    assert wait(Key.BYE, -1.0) == pytest.approx(0.5)


@settings(max_examples=100)
@given(seconds)
def test_the_guard_rings_between_notice_and_deadline(grace: float) -> None:
    clock, alarms = FakeClock(), Alarms()
    at = clock.monotonic()
    deadlines_on(clock, alarms=alarms).shorten(at, grace)
    [rings] = alarms.times
    assert at <= rings < at + grace
    assert at + grace - rings <= 1.0 + 1e-9
