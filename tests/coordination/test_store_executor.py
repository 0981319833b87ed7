"""Threads: reads, inserts, gathers and alarms on a blocking store."""

from __future__ import annotations

import queue
import threading

import pytest

from tests.fakes.key_value_store import FaultyKeyValueStore, StoreFault
from tfpreempt.coordination.in_memory_store import InMemoryStore
from tfpreempt.coordination.store_executor import (
    FEWEST_WALKS,
    StoreExecutor,
    reader_thread_count,
)
from tfpreempt.core.clock import SystemClock
from tfpreempt.errors import CoordinationServiceUnavailableError

SOON = 10.0  # seconds until every expected event


class Answers:
    """Collects the arguments of callbacks; `take` waits for the next."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[object] = queue.SimpleQueue()

    def __call__(self, *given: object) -> None:
        self._queue.put(given[0] if len(given) == 1 else given)

    def take(self, count: int = 1) -> list[object]:
        return [self._queue.get(timeout=SOON) for _ in range(count)]

    def is_empty(self) -> bool:
        return self._queue.empty()


@pytest.fixture
def store():
    return InMemoryStore()


@pytest.fixture
def gone():
    return Answers()


@pytest.fixture
def executor(store, gone):
    executor = StoreExecutor(store, SystemClock(), gone, deaths_every=0.001)
    yield executor
    store.close()  # lets the threads that still read go
    executor.stop()


def test_a_get_is_answered_when_the_key_comes(executor, store):
    answers = Answers()
    executor.get("a", answers)
    assert answers.is_empty()
    store.insert("a", "1")
    assert answers.take() == ["1"]


def test_gets_are_answered_one_after_the_other(executor, store):
    answers = Answers()
    store.insert("b", "2")
    executor.get("a", answers)
    executor.get("b", answers)
    store.insert("a", "1")
    assert answers.take(2) == ["1", "2"]


def test_many_keys_come_with_their_index(executor, store):
    answers = Answers()
    names = [f"k/{i}" for i in range(3 * FEWEST_WALKS + 1)]
    executor.get_each(names, answers)
    for i in reversed(range(len(names))):
        store.insert(names[i], str(i))
    got = answers.take(len(names))
    assert sorted(got) == [(i, str(i)) for i in range(len(names))]


@pytest.mark.parametrize(
    ("keys", "threads"), [(0, 0), (1, 1), (8, 8), (63, 8), (1000, 31), (10_000, 100)]
)
def test_many_keys_are_read_by_a_few_threads(keys: int, threads: int) -> None:
    assert reader_thread_count(keys) == threads


def test_a_get_of_no_keys_does_nothing(executor):
    executor.get_each([], lambda index, text: None)


def test_an_insert_returns_the_value_of_the_key(executor, store):
    answers = Answers()
    store.insert("old", "first")
    executor.insert("old", "mine", answers)
    executor.insert("new", "mine", answers)
    assert answers.take(2) == ["first", "mine"]
    assert store.get("new") == "mine"


def test_inserts_take_effect_in_order():
    inner = InMemoryStore()
    slow = StoreFault(operation="insert", key="a", error=None, delay_seconds=0.01)
    store, answers = FaultyKeyValueStore(inner, faults=[slow]), Answers()
    executor = StoreExecutor(store, SystemClock(), lambda error: None)
    for key in "abc":
        executor.insert(key, key, answers)
    assert answers.take(3) == ["a", "b", "c"]


def test_alarms_ring_in_the_order_of_their_times(executor):
    now, rung = SystemClock().monotonic(), Answers()
    executor.call_at(now + 0.02, lambda: rung("third"))
    executor.call_at(now + 0.01, lambda: rung("second"))
    executor.call_at(now - 5, lambda: rung("first"))
    assert rung.take(3) == ["first", "second", "third"]


def test_an_alarm_may_set_another(executor):
    rung = Answers()
    executor.call_at(0.0, lambda: executor.call_at(0.0, lambda: rung("inner")))
    assert rung.take() == ["inner"]


def test_a_bug_in_a_callback_is_logged_and_ends_nothing(executor, store, caplog):
    def fail(text: str) -> None:
        raise AssertionError("a bug")

    answers = Answers()
    store.insert("a", "1")
    executor.get("a", fail)
    executor.insert("b", "2", fail)
    executor.call_at(0.0, lambda: fail(""))
    executor.get("a", answers)
    executor.insert("c", "3", answers)
    executor.call_at(0.0, lambda: answers("alarm"))
    assert sorted(answers.take(3)) == ["1", "3", "alarm"]
    assert "a bug in tfpreempt" in caplog.text


def test_the_loss_of_the_store_is_reported(executor, store, gone):
    executor.get("a", lambda text: None)
    executor.get_each(["b"], lambda index, text: None)
    store.close()
    assert {type(error) for error in gone.take(2)} == {
        CoordinationServiceUnavailableError
    }
    executor.insert("c", "3", lambda text: None)
    assert isinstance(gone.take()[0], CoordinationServiceUnavailableError)


def test_crashed_workers_are_reported_until_the_request_ends(executor, store):
    told, until = Answers(), threading.Event()
    executor.watch_deaths(until, told)
    store.dead_workers = lambda: frozenset({2})
    assert told.take(2) == [frozenset({2})] * 2
    until.set()


class Silent(InMemoryStore):
    """A store whose host is frozen from the third request on, until it resumes."""

    def __init__(self) -> None:
        super().__init__()
        self.thaws = threading.Event()
        self.asked = 0

    def insert(self, key: str, value: str) -> None:
        self.asked += 1
        if self.asked == 3:
            self.thaws.wait()
        super().insert(key, value)


@pytest.mark.slow  # waits in real time
def test_a_silent_store_is_reported(gone):
    store = Silent()
    StoreExecutor(store, SystemClock(), gone).watch_store(
        "mine", threading.Event(), 0.5
    )
    [error] = gone.take()
    assert store.asked == 3
    assert "has not answered for 0.5 s" in str(error)
    store.thaws.set()


def test_a_store_is_checked_until_the_request_ends(gone):
    store, until = Silent(), threading.Event()
    executor, rung = StoreExecutor(store, SystemClock(), gone), Answers()
    executor.watch_store("mine", until, 0.01)
    until.set()
    executor.call_at(SystemClock().monotonic() + 0.05, lambda: rung("later"))
    assert rung.take() == ["later"]
    assert store.asked <= 1
    assert gone.is_empty()


def test_asking_for_deaths_ends_with_the_store(executor, store, gone):
    executor.watch_deaths(threading.Event(), lambda dead: None)
    store.close()
    assert isinstance(gone.take()[0], CoordinationServiceUnavailableError)
