"""The arithmetic of deadlines."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tfpreempt.core import deadline as dl

seconds = st.floats(0.01, 10_000)
maybe = st.none() | seconds
few = settings(max_examples=100)  # it is arithmetic


@few
@given(seconds, seconds)
def test_the_guard_rings_between_notice_and_deadline(at, total):
    end = at + total
    assert at <= dl.guard(end, total) < end
    assert end - dl.guard(end, total) <= 1.0 + 1e-9


@few
@given(seconds, seconds, maybe, seconds)
def test_counts_are_waited_for_in_the_first_half(now, total, save, limit):
    by = dl.counts_by(now, now + total, save, limit)
    assert now < by <= now + 0.5 * min(total, limit) + 1e-6


@few
@given(seconds, seconds, seconds)
def test_shards_are_waited_for_longer_than_counts_but_not_to_the_end(now, total, limit):
    by = dl.dones_by(now, now + total, limit)
    assert dl.counts_by(now, now + total, None, limit) <= by < now + total


def test_a_deadline_that_is_over_leaves_no_wait():
    assert dl.counts_by(100.0, 90.0, 1.0, 30.0) == 100.0
    assert dl.dones_by(100.0, 90.0, 30.0) == 100.0


def test_the_host_waits_ten_seconds_for_byes_less_before_a_deadline():
    assert dl.byes_by(100.0, None) == 110.0
    assert dl.byes_by(100.0, 103.0) == 103.0
    assert dl.byes_by(100.0, 99.0) == 100.5
