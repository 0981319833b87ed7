"""Lets all workers start from the same plan, or raises an error on every worker.

Before training the chief proposes a plan, such as the commit to restore. Every other
worker compares the plan with the files that it sees, and may object. The chief then
publishes the objections. Each start of a handler uses three kinds of insert-once keys:
`plan`, `hello/<i>` (the answer of worker i) and `ready` (the objections).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from tfpreempt.coordination.key_value_store import KeyValueStore
from tfpreempt.coordination.store_executor import reader_thread_count
from tfpreempt.core.clock import SystemClock
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.threads import CallTimeoutError, call_within, map_in_threads
from tfpreempt.errors import (
    CoordinationError,
    CoordinationServiceUnavailableError,
    PeerTimeoutError,
    TfpreemptError,
)

StartPlan = dict[str, Any]
T = TypeVar("T")

ASKS_EVERY = 1.0
"""Seconds between two requests of the chief for the list of crashed workers."""

ANSWER_SECONDS = 5.0
"""Seconds by which the other workers wait longer than the chief. In this time they read
from the chief which workers are missing."""

MISSING = "missing"
"""Field of the key `ready` with the chief's message about a missing worker."""


def agree(
    store: KeyValueStore,
    prefix: str,
    cluster: Cluster,
    propose: Callable[[], tuple[StartPlan, T]],
    check: Callable[[StartPlan], tuple[str | None, T]],
    timeout: float,
    proposing: float = 0.0,
) -> tuple[StartPlan, T | None, dict[int, str]]:
    """Agrees on a plan with the other workers.

    Every worker calls the function. If a process starts several handlers, the calls are
    in the same order on every worker.

    Args:
        store: key-value store, called in a separate thread with a timeout.
        prefix: beginning of the key names of this start of a handler.
        cluster: the workers of the run, and the index of this worker.
        propose: function called on the chief. It returns the plan, as JSON values, and
            any object, which `agree` returns.
        check: function called with the plan on the other workers. It returns an
            objection (None to accept the plan), and any object, which `agree` returns.
            A raised `TfpreemptError` counts as an objection.
        timeout: seconds to wait for the slowest worker.
        proposing: additional seconds that the other workers wait for the chief's plan.

    Returns:
        The plan; the object from `propose` or `check`, None if `check` raised an error;
        the objections by worker index, empty if no worker objects.

    Raises:
        CoordinationError: a key has a value that this version does not write.
        PeerTimeoutError: a worker did not answer in time, or has crashed.
        CoordinationServiceUnavailableError: the store cannot be reached.
    """
    if cluster.is_chief:
        mine: T | None
        try:
            proposed, mine = propose()
        except TfpreemptError as error:
            refusal = {"ok": False, "problem": describe(error)}
            _put(store, f"{prefix}/plan", refusal)
            raise
        plan: StartPlan = {"ok": True, **proposed}
        _put(store, f"{prefix}/plan", plan)
        try:
            ready = _wait_for_answers(store, prefix, cluster.num_workers, timeout)
        except PeerTimeoutError as error:
            ready = {MISSING: str(error)}
        _put(store, f"{prefix}/ready", ready)
    else:
        limit = timeout + proposing
        plan = _take(store, f"{prefix}/plan", limit, "worker 0's plan", "ok")
        if not plan["ok"]:
            return plan, None, {0: str(plan.get("problem"))}
        try:
            answer, mine = check(plan)
        except TfpreemptError as error:
            answer, mine = describe(error), None
        _put(store, f"{prefix}/hello/{cluster.worker}", {"problem": answer})
        limit = timeout + ANSWER_SECONDS
        ready = _take(store, f"{prefix}/ready", limit, "worker 0's go-ahead")
    if MISSING in ready:
        raise PeerTimeoutError(ready[MISSING])
    answers = {i: ready[f"{i}"] for i in range(cluster.num_workers) if f"{i}" in ready}
    return plan, mine, {i: str(text) for i, text in answers.items()}


def describe(error: TfpreemptError) -> str:
    """Returns an error as text that begins with the name of the error's class.

    So another worker, which receives the text, can raise an error of the same class.
    """
    return f"{type(error).__name__}: {error}"


def _wait_for_answers(
    store: KeyValueStore, prefix: str, num_workers: int, timeout: float
) -> dict[str, str]:
    """Waits, on the chief, for the answers of the other workers to the chief's plan.

    Args:
        store: key-value store with the answers.
        prefix: beginning of the key names of this start of a handler.
        num_workers: number of workers, including the chief.
        timeout: seconds to wait for the slowest worker.

    Returns:
        The objections of workers that do not accept the plan, by worker index.

    Raises:
        PeerTimeoutError: a worker has crashed (raised at once), or is too late.
    """
    others = range(1, num_workers)
    clock, missing = SystemClock(), set(others)
    end, asks_at = clock.monotonic() + timeout, clock.monotonic()

    def read_answer(worker: int) -> str | None:
        key = f"{prefix}/hello/{worker}"
        problem: str | None = _read(key, store.get(key), "problem")["problem"]
        missing.discard(worker)
        return problem

    def watch() -> None:
        nonlocal asks_at
        now = clock.monotonic()
        if missing and now >= end:
            raise _missing(
                min(missing), f"the worker did not arrive within {timeout:g} s"
            )
        if now >= asks_at:
            asks_at = now + ASKS_EVERY
            for worker in sorted(missing & store.dead_workers()):
                raise _missing(
                    worker, "the coordination service reports the worker as unreachable"
                )

    answers = map_in_threads(
        read_answer,
        others,
        threads=reader_thread_count(num_workers),
        name="tfpreempt-start",
        watch=watch,
    )
    return {f"{i}": text for i, text in zip(others, answers, strict=True) if text}


def _missing(worker: int, why: str) -> PeerTimeoutError:
    return PeerTimeoutError(
        f"worker {worker} is missing in the start of a handler: {why}. The worker "
        "has exited, is suspended, or creates its handlers in another order. Check "
        "the logs of all workers."
    )


def _put(store: KeyValueStore, key: str, value: StartPlan) -> None:
    text = json.dumps(value)
    bounded(lambda: store.insert(key, text), 60.0, f"inserting {key}")


def _take(
    store: KeyValueStore, key: str, timeout: float, whom: str, *fields: str
) -> StartPlan:
    try:
        text = bounded(lambda: store.get(key), timeout, f"waiting for {whom}")
    except CoordinationServiceUnavailableError as error:
        where = "worker 0 was lost in the start of a handler"
        raise CoordinationServiceUnavailableError(
            f"{where}, while {whom} was waited for: {error}"
        ) from error
    return _read(key, text, *fields)


def _read(key: str, text: str, *fields: str) -> StartPlan:
    try:
        plan: StartPlan = json.loads(text)
    except (ValueError, RecursionError):
        plan = {}
    if not isinstance(plan, dict) or not plan.keys() >= set(fields):
        raise CoordinationError(
            f"the key {key!r} holds {text[:200]!r}; expected a JSON object with "
            f"{fields}. Do all workers run the same version of tfpreempt?"
        )
    return plan


def bounded(call: Callable[[], T], timeout: float, what: str) -> T:
    """Calls a function that may block forever, in a daemon thread, with a timeout.

    Args:
        call: function to call.
        timeout: maximum seconds to wait.
        what: description of the call, for the error message.

    Raises:
        PeerTimeoutError: the function took longer than `timeout` seconds.
    """
    try:
        return call_within(timeout, call)
    except CallTimeoutError as error:
        raise PeerTimeoutError(
            f"{what} took longer than {timeout:g} s, in the start of a handler; a "
            "worker is missing, suspended, or creates its handlers in another order. "
            "Check the logs of all workers."
        ) from error
