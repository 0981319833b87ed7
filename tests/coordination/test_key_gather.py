"""One key of many workers, collected."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from tfpreempt.coordination import keys
from tfpreempt.coordination.key_gather import KeyGather
from tfpreempt.coordination.protocol_types import Key, StepCount, Tombstone


class RecordingExecutor:
    """Replaces the executor: the test determines the values and the crashed workers."""

    def __init__(self) -> None:
        self.inserted: list[str] = []
        self.got: Callable[[int, str], None] = lambda index, text: None
        self.report_dead: Callable[[frozenset[int]], None] = lambda dead: None

    def get_each(self, keys: Sequence[str], then: Callable[[int, str], None]) -> None:
        self.got = then

    def insert(self, key: str, value: str, then: Callable[[str], None]) -> None:
        self.inserted.append(key)

    def watch_deaths(
        self, until: threading.Event, then: Callable[[frozenset[int]], None]
    ) -> None:
        self.report_dead = then


def gather(executor: RecordingExecutor, **options: Any) -> KeyGather:
    """The counts of workers 1 to 3."""
    names = {j: f"count/{j}" for j in (1, 2, 3)}
    options = {"then": lambda worker, value, extra: None, **options}
    return KeyGather(executor, Key.COUNT, names, by=0, **options)  # type: ignore[arg-type]


def test_all_values_arrive_together_in_worker_order() -> None:
    executor, on_complete = RecordingExecutor(), []
    gather(executor, on_complete=on_complete.append)
    for index, value in ((2, StepCount(7)), (0, StepCount(5)), (1, Tombstone())):
        assert on_complete == []
        executor.got(index, keys.encode(value))
    assert [list(values.items()) for values in on_complete] == [
        [(1, StepCount(5)), (2, Tombstone()), (3, StepCount(7))]
    ]


def test_a_worker_often_reported_as_crashed_is_given_up_once() -> None:
    executor = RecordingExecutor()
    gathering = gather(executor)
    for _ in range(3):
        executor.report_dead(frozenset({2}))
    gathering.give_up(frozenset({1, 2}), "too late")
    assert executor.inserted == ["count/2", "count/1"]


def test_a_worker_that_has_answered_is_not_given_up() -> None:
    executor = RecordingExecutor()
    gathering = gather(executor)
    executor.got(0, keys.encode(StepCount(5)))
    gathering.give_up(frozenset({1, 3}), "too late")
    assert executor.inserted == ["count/3"]
    assert gathering.missing == {2, 3}
