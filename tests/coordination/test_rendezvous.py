"""Before training: one plan for all workers, or the same error for all."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tfpreempt.coordination import rendezvous
from tfpreempt.coordination.in_memory_store import InMemoryStore
from tfpreempt.coordination.rendezvous import agree, bounded
from tfpreempt.core.cluster import Cluster
from tfpreempt.errors import (
    CheckpointError,
    CoordinationServiceUnavailableError,
    PeerTimeoutError,
)


def start(
    workers,
    *,
    propose=lambda: ({"step": 3}, 0),
    checks=None,
    timeout=10.0,
    proposing=0.0,
):
    """Starts every worker in a thread; returns the result or error of each worker.

    The store ends afterwards, because waits for a missing worker would not end.
    """
    store = InMemoryStore()

    def one(worker):
        check = (checks or {}).get(worker, lambda plan: (None, worker))
        try:
            return agree(
                store,
                "start/1",
                Cluster(worker=worker, jobs=(("worker", 3),)),
                propose,
                check,
                timeout,
                proposing,
            )
        except Exception as error:
            return error

    with contextlib.closing(store), ThreadPoolExecutor(3) as pool:
        return list(pool.map(one, workers))


def test_all_workers_get_the_chiefs_plan_and_their_own_objects():
    assert start(range(3)) == [({"ok": True, "step": 3}, i, {}) for i in range(3)]


def test_the_checks_of_all_but_the_chief_see_the_plan():
    seen = []

    def check(plan):
        seen.append(plan["step"])
        return None, None

    start(range(3), checks=dict.fromkeys(range(3), check))
    assert seen == [3, 3]


def test_an_answer_of_a_worker_reaches_all_workers():
    results = start(range(3), checks={2: lambda plan: ("another disk", "its view")})
    assert [answers for _, _, answers in results] == [{2: "another disk"}] * 3
    assert results[2][1] == "its view"


def test_a_check_that_raises_is_a_problem_too():
    def check(plan):
        raise CheckpointError("cannot read it")

    results = start(range(3), checks={1: check})
    for _, _, problems in results:
        assert list(problems) == [1]
        assert "cannot read it" in problems[1]
    assert [mine for _, mine, _ in results] == [0, None, 2]


def test_the_chiefs_error_is_raised_there_and_sent_to_the_others():
    def propose():
        raise CheckpointError("the directory is a file")

    chief, *others = start(range(3), propose=propose)
    assert isinstance(chief, CheckpointError)
    for _, _, problems in others:
        assert list(problems) == [0]
        assert "the directory is a file" in problems[0]


def test_a_chief_that_waits_itself_has_more_time_than_a_worker():
    """For example, for another run's lease, while its workers wait for the plan."""
    begun = threading.Event()

    def propose():
        begun.wait(0.3)
        return {"step": 3}, None

    _, other = start([0, 1], propose=propose, timeout=0.1, proposing=10.0)
    assert "worker 2 is missing" in str(other)


def test_a_missing_worker_is_named_in_time():
    for error in start([0, 1], timeout=0.05):
        assert isinstance(error, PeerTimeoutError)
        said = "worker 2 is missing in the start of a handler: the worker did not"
        assert said in str(error)


def test_a_worker_that_answers_at_the_timeout_is_not_missing(monkeypatch):
    """Before, the chief's list of missing workers was empty: a ValueError."""

    def in_turn(do, jobs, *, watch, **how):
        answers = [do(job) for job in jobs]
        watch()
        return answers

    monkeypatch.setattr(rendezvous, "map_in_threads", in_turn)
    results = start(range(3), timeout=0.0, proposing=10.0)
    assert results == [({"ok": True, "step": 3}, i, {}) for i in range(3)]


def test_a_crashed_worker_is_not_waited_for(monkeypatch):
    """Before, the wait took five minutes, although the service reported after 10 s."""
    monkeypatch.setattr(InMemoryStore, "dead_workers", lambda store: frozenset({2}))
    for error in start([0, 1], timeout=600.0):
        assert isinstance(error, PeerTimeoutError)
        assert "the coordination service reports the worker as unreachable" in str(
            error
        )


def test_a_missing_chief_is_named_in_time():
    (other,) = start([1], timeout=0.05)
    assert isinstance(other, PeerTimeoutError)
    assert "worker 0" in str(other)


def test_a_chief_that_ends_is_named():
    """The store ends with the chief."""
    store = InMemoryStore()
    closing = threading.Timer(0.05, store.close)
    closing.start()
    with pytest.raises(
        CoordinationServiceUnavailableError, match="worker 0 was lost in the start"
    ):
        agree(
            store,
            "start/1",
            Cluster(worker=1, jobs=(("worker", 2),)),
            lambda: ({}, None),
            lambda plan: (None, None),
            10.0,
        )
    closing.join()


def test_a_lost_store_is_not_mistaken_for_a_missing_worker():
    store = InMemoryStore()
    store.close()
    with pytest.raises(CoordinationServiceUnavailableError):
        bounded(lambda: store.get("a"), 10.0, "reading")


def test_a_bounded_call_may_return_none():
    assert bounded(lambda: None, 10.0, "nothing") is None


def test_a_blocking_call_is_abandoned_at_its_timeout():
    release = threading.Event()
    with pytest.raises(PeerTimeoutError, match=r"sleeping took longer than 0\.01 s"):
        bounded(release.wait, 0.01, "sleeping")
    release.set()
