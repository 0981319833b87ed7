"""Threads that share jobs: all are done, or the first failure is the caller's."""

from __future__ import annotations

import threading

import pytest

from tfpreempt.core.threads import (
    CallTimeoutError,
    ManagedThread,
    call_within,
    map_in_threads,
)


@pytest.mark.parametrize("threads", [1, 4, 100])
def test_the_results_of_jobs_are_in_their_order(threads):
    done = map_in_threads(lambda n: n * n, range(50), threads=threads, name="test")
    assert done == [n * n for n in range(50)]


def test_without_jobs_it_is_over_at_once():
    assert map_in_threads(str, [], threads=3, name="test") == []


def test_no_thread_is_begun_for_jobs_that_are_done(monkeypatch):
    begun = []

    class Quick(ManagedThread):
        def start(self):
            begun.append(self.name)
            super().start()
            self.join(60)

    monkeypatch.setattr("tfpreempt.core.threads.ManagedThread", Quick)
    done = map_in_threads(str, [1, 2, 3], threads=3, name="test")
    assert done == ["1", "2", "3"]
    assert begun == ["test-0"]


def test_the_first_failure_ends_the_others():
    failed, ended, is_long = threading.Event(), threading.Event(), threading.Event()
    begun = []

    def work(job):
        begun.append(job)
        if job == "long":
            is_long.set()
            if failed.wait(60):
                ended.set()
        if job == "failing":
            is_long.wait(60)
            raise OSError("first")

    jobs = ["long", "failing", "never"]
    with pytest.raises(OSError, match="first"):
        map_in_threads(
            work, jobs, threads=2, name="test", failed=failed, stop_timeout=60.0
        )
    assert ended.is_set()
    assert "never" not in begun


def test_the_caller_may_give_up():
    begun, failed, release = threading.Event(), threading.Event(), threading.Event()

    def watch():
        begun.wait(60)
        raise TimeoutError("enough")

    def work(job):
        begun.set()
        release.wait(60)  # as in a request that nothing ends

    with pytest.raises(TimeoutError, match="enough"):
        map_in_threads(work, [1], threads=1, name="test", watch=watch, failed=failed)
    assert failed.is_set()
    release.set()


def test_a_call_is_waited_for_no_longer_than_allowed():
    release = threading.Event()
    with pytest.raises(CallTimeoutError, match=r"0\.1 s"):
        call_within(0.1, lambda: release.wait(60))
    release.set()
    assert call_within(60.0, lambda: 5) == 5
    with pytest.raises(TimeoutError, match="its own") as caught:
        call_within(60.0, raise_its_own)
    assert not isinstance(caught.value, CallTimeoutError)


def raise_its_own():
    raise TimeoutError("its own")
