"""The times at which the chief requests a snapshot, and the measured cost."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.clock import FakeClock
from tfpreempt.handler.activity import SnapshotScheduler
from tfpreempt.handler.snapshots import SnapshotTiming

STEP = 0.1


class Training:
    """The run, its snapshots and their surroundings, with a fake clock."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.executor = self.snapshots = self
        self.step_flag = SimpleNamespace(started=1)
        self.base = self.steps_made = 0
        self.saved_at = 0
        self.is_armed = True
        self.is_off = self.is_busy = self.preemption_pending = self.is_dropped = False
        self.is_saving = False
        self.refused = 0
        self.taken: SnapshotTiming | None = None
        self.asked: list[int] = []  # steps that had been made
        self.next_look: Callable[[], Any] = lambda: None
        here: Any = self
        self.times = SnapshotScheduler(
            weakref.ref(here),
            here,
            here,
            lambda: self.is_saving,
        )

    def __iter__(self) -> Any:
        return iter([self])

    @property
    def has_moved(self) -> bool:
        return self.steps_made != self.saved_at

    def call_at(self, when: float, call: Callable[[], Any]) -> None:
        self.next_look = call

    def periodic(self, *, snapshot: bool) -> bool:
        self.asked.append(self.steps_made)
        return True

    def train(self, steps: int, *, seconds: float = STEP) -> None:
        for _ in range(steps):
            self.clock.advance(seconds)
            self.steps_made += 1
            self.step_flag.started += 1
            self.times.look()

    def validate(self, batches: int) -> None:
        """Boundaries, and no steps."""
        for _ in range(batches):
            self.clock.advance(STEP)
            self.step_flag.started += 1
            self.times.look()

    def take(self) -> None:
        """A snapshot that stops training for 0.1 s, and is written during five steps,
        which take no longer than others."""
        now = self.clock.monotonic()
        self.clock.advance(0.1)
        self.taken = SnapshotTiming(
            arrived=now,
            left=now + 0.1,
            steps=self.steps_made,
            intervals=self.step_flag.started,
        )
        self.is_busy = True
        self.train(5)
        self.is_busy = False
        self.train(2)
        assert self.taken is None

    @property
    def step_seconds(self) -> float | None:
        return self.times.interval.step_seconds


@pytest.fixture
def training() -> Training:
    made = Training()
    made.train(30)
    assert made.asked
    made.take()
    assert made.step_seconds == pytest.approx(STEP)
    return made


def test_no_snapshot_is_requested_without_a_new_step(training: Training) -> None:
    training.train(2000)
    training.take()
    training.asked.clear()
    made = training.steps_made
    training.times._last = made
    training.validate(3000)
    assert made not in training.asked


def test_a_validation_is_no_step(training: Training) -> None:
    training.train(20)
    training.validate(500)
    training.train(20)
    training.take()
    assert training.step_seconds == pytest.approx(STEP)


def test_a_validation_after_it_is_no_cost_of_a_snapshot(training: Training) -> None:
    """Otherwise the next snapshot would be due in a day."""
    training.train(100)
    now = training.clock.monotonic()
    training.clock.advance(0.1)
    training.taken = SnapshotTiming(
        arrived=now,
        left=now + 0.1,
        steps=training.steps_made,
        intervals=training.step_flag.started,
    )
    training.validate(10_000)
    training.train(3)
    training.asked.clear()
    training.train(400)
    assert training.asked


def test_steps_during_a_commit_are_not_measured(training: Training) -> None:
    training.train(10)
    training.is_saving = True
    training.saved_at = training.steps_made
    training.train(50, seconds=5 * STEP)
    training.is_saving = False
    training.train(1)
    training.take()
    assert training.step_seconds == pytest.approx(STEP)


def test_no_snapshot_is_requested_after_a_notice(training: Training) -> None:
    training.asked.clear()
    training.preemption_pending = True
    training.train(3000)
    assert training.asked == []


def test_a_refused_snapshot_is_retried_later(training: Training) -> None:
    """A disk that hangs briefly, or too little memory, does not end the snapshots."""

    def until_asked() -> float:
        training.asked.clear()
        while not training.asked:
            training.train(1)
        return training.clock.monotonic()

    training.refused = 1
    first = until_asked()
    assert until_asked() - first >= 30.0
