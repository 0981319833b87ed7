"""One contract for all key-value stores: the real stores and the fake."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.fakes.key_value_store import FaultyKeyValueStore, StoreFault
from tfpreempt.coordination.in_memory_store import InMemoryStore
from tfpreempt.errors import (
    CoordinationServiceUnavailableError,
    KeyExistsError,
    PeerTimeoutError,
)

ROOT = Path(__file__).parents[2]
SOON = 10.0  # seconds until every expected event


def closing_memory():
    store = InMemoryStore()
    return store, store.close


def closing_faulty():
    inner = InMemoryStore()
    return FaultyKeyValueStore(inner), inner.close


STORES = {"memory": closing_memory, "faulty": closing_faulty}
INSIDE = os.environ.get("TFPREEMPT_CONTRACT_STORE")
if INSIDE:
    from tests.contracts import service_stores

    STORES = {INSIDE: getattr(service_stores, INSIDE)}


@pytest.fixture(params=STORES)
def opened(request):
    """Returns the store, and a function that ends the store (None: impossible)."""
    return STORES[request.param]()


@pytest.fixture
def store(opened):
    return opened[0]


def in_thread(call):
    """Runs a function in a daemon thread; the list gets its result or error."""
    results: list[object] = []

    def target():
        try:
            results.append(call())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread, results


def test_an_inserted_value_is_read(store):
    store.insert("c/read", "välue {}")
    assert store.get("c/read") == "välue {}"
    assert store.get("c/read", timeout=SOON) == "välue {}"


def test_a_key_is_inserted_once(store):
    store.insert("c/once", "first")
    with pytest.raises(KeyExistsError, match="c/once"):
        store.insert("c/once", "second")
    assert store.get("c/once") == "first"


def test_of_racing_inserts_exactly_one_wins(store):
    barrier, won = threading.Barrier(4), []

    def race(number):
        barrier.wait()
        store.insert("c/race", str(number))
        won.append(str(number))

    racers = [in_thread(lambda i=i: race(i))[0] for i in range(4)]
    for racer in racers:
        racer.join(SOON)
    assert [store.get("c/race")] == won


def test_an_insert_wakes_every_get_that_waits(store):
    waits = [in_thread(lambda: store.get("c/late")) for _ in range(3)]
    other, answers = in_thread(lambda: store.get("c/other", timeout=SOON))
    store.insert("c/late", "now")
    for thread, results in waits:
        thread.join(SOON)
        assert results == ["now"]
    assert answers == []
    store.insert("c/other", "too")
    other.join(SOON)
    assert answers == ["too"]


def test_a_get_gives_up_at_its_time_out(store):
    started = time.monotonic()
    with pytest.raises(PeerTimeoutError, match="c/never"):
        store.get("c/never", timeout=0.05)
    assert 0.04 <= time.monotonic() - started < SOON


def test_a_deleted_key_can_be_inserted_again(store):
    store.insert("c/again", "first")
    store.delete("c/again")
    with pytest.raises(PeerTimeoutError):
        store.get("c/again", timeout=0.05)
    store.insert("c/again", "second")
    assert store.get("c/again") == "second"


def test_delete_takes_the_subtree_and_nothing_else(store):
    for key in ("c/tree", "c/tree/1", "c/tree/1/2", "c/trees"):
        store.insert(key, key)
    store.delete("c/tree")
    for key in ("c/tree", "c/tree/1", "c/tree/1/2"):
        with pytest.raises(PeerTimeoutError):
            store.get(key, timeout=0.02)
    assert store.get("c/trees") == "c/trees"


def test_deleting_a_missing_key_is_no_error(store):
    store.delete("c/absent")


def test_no_worker_is_reported_as_crashed_at_first(store):
    assert store.dead_workers() == frozenset()


def test_a_lost_store_raises_an_error_in_every_caller(opened):
    store, close = opened
    if close is None:
        pytest.skip("the service of this process cannot be closed and used again")
    thread, results = in_thread(lambda: store.get("c/gone"))
    close()
    thread.join(SOON)
    assert [type(result) for result in results] == [CoordinationServiceUnavailableError]
    for call in (
        lambda: store.insert("c/x", "x"),
        lambda: store.get("c/x", timeout=SOON),
        lambda: store.delete("c/x"),
        store.dead_workers,
    ):
        with pytest.raises(CoordinationServiceUnavailableError):
            call()


@pytest.mark.skipif(INSIDE != "tensorflow", reason="about errors of TensorFlow")
def test_the_class_of_a_workers_error_lives_on(store):
    """The last test of the real service: TensorFlow crashed a process that asked a few
    times for the states of crashed workers."""
    import tensorflow as tf
    from tensorflow.python.eager import context

    code = tf.errors.UNAVAILABLE
    with contextlib.suppress(tf.errors.OpError):
        context.context().report_error_to_cluster(code, "a test")
    before = sys.getrefcount(tf.errors.UnavailableError)
    for _ in range(9):
        assert store.dead_workers() == {0}
    assert sys.getrefcount(tf.errors.UnavailableError) >= before


@pytest.mark.parametrize(
    "service", [pytest.param("tensorflow", marks=pytest.mark.tensorflow), "jax"]
)
@pytest.mark.multiprocess
@pytest.mark.skipif(INSIDE is not None, reason="this is the process that it starts")
def test_the_coordination_service_keeps_the_contract(service, zygote_of):
    """The tests above, in a process that is a cluster of one worker."""
    result = zygote_of(service).run(
        Path(pytest.__file__).with_name("__main__.py"),
        *("-q", "-x", "-p", "no:cacheprovider", __file__),
        directory=ROOT,
        env={**os.environ, "TFPREEMPT_CONTRACT_STORE": service},
        limit=240,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


# --- the faults of the fake ----------------------------------------------------------


def test_a_fault_meets_the_operation_that_it_names():
    fault = StoreFault(operation="insert", key="a/*", after=1)
    store = FaultyKeyValueStore(faults=[fault])
    store.insert("b/1", "1")
    store.insert("a/1", "1")
    with pytest.raises(CoordinationServiceUnavailableError, match="simulated"):
        store.insert("a/2", "2")
    store.insert("a/2", "2")
    assert store.get("a/2") == "2"
    assert store.operations[-1] == ("get", "a/2")


def test_an_answer_can_be_lost_although_the_key_is_there():
    inner = InMemoryStore()
    store = FaultyKeyValueStore(
        inner, faults=[StoreFault(operation="insert", is_done=True)]
    )
    with pytest.raises(CoordinationServiceUnavailableError):
        store.insert("a", "1")
    assert inner.get("a") == "1"


def test_a_slow_operation_takes_its_time_and_works():
    slept: list[float] = []
    slow = StoreFault(operation="get", error=None, delay_seconds=3.0, times=None)
    store = FaultyKeyValueStore(faults=[slow], sleep=slept.append)
    store.insert("a", "1")
    assert [store.get("a"), store.get("a")] == ["1", "1"]
    assert slept == [3.0, 3.0]


def test_a_lost_connection_stays_lost():
    store = FaultyKeyValueStore(faults=[StoreFault(after=2, times=None)])
    store.insert("a", "1")
    store.get("a")
    for _ in range(2):
        with pytest.raises(CoordinationServiceUnavailableError):
            store.get("a")
    with pytest.raises(CoordinationServiceUnavailableError):
        store.dead_workers()
