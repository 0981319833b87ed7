"""Before training: all workers start from the same plan, or all raise the same error.

The chief proposes, everyone checks the proposal against what it sees, and the chief
announces the result. Three insert-once keys a start: `plan`, `hello/<i>`, `ready`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from tfpreempt.coordination.runtime import walks
from tfpreempt.coordination.store import KeyValueStore
from tfpreempt.core.clock import SystemClock
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.threads import OutOfTimeError, call_within, map_in_threads
from tfpreempt.errors import (
    CoordinationError,
    StoreGoneError,
    TfpreemptError,
    WaitTimeoutError,
)

Plan = dict[str, Any]
T = TypeVar("T")

ASKS_EVERY = 1.0
"""Seconds between two questions of the chief for dead workers."""

HEARD_WITHIN = 5.0
"""Seconds in which all hear from the chief who is missing: it waits for no longer."""

MISSING = "missing"
"""Under which the chief says that a worker has not come."""


def agree(
    store: KeyValueStore,
    prefix: str,
    cluster: Cluster,
    propose: Callable[[], Plan],
    check: Callable[[Plan], str | None],
    timeout: float,
    proposing: float = 0.0,
) -> tuple[Plan, dict[int, str]]:
    """Agrees on a plan; called by every worker, in the same order of prefixes.

    Args:
        store: the store; used from a thread of its own, with a deadline.
        prefix: namespace of this start.
        cluster: who the workers are; the chief proposes.
        propose: makes the chief's plan, JSON-able.
        check: what this worker finds wrong with the plan, for people; None if nothing.
        timeout: seconds to wait for the slowest worker.
        proposing: more seconds that the others give the chief for its plan.

    Returns:
        The plan, and what each worker found wrong (empty: all agree).

    Raises:
        CoordinationError: a key holds what this version does not write.
        WaitTimeoutError: a worker did not come in time, or is dead.
        StoreGoneError: the store cannot be reached.
    """
    plan: Plan = {}
    if cluster.is_chief:
        try:
            plan = {"ok": True, **propose()}
        except TfpreemptError as error:
            plan = {"ok": False, "problem": describe(error)}
            _put(store, f"{prefix}/plan", plan)
            raise
        _put(store, f"{prefix}/plan", plan)
    else:
        patience = timeout + proposing
        plan = _take(store, f"{prefix}/plan", patience, "worker 0's plan", "ok")
        if not plan["ok"]:
            return plan, {0: str(plan.get("problem"))}
    try:
        problem = check(plan)
    except TfpreemptError as error:
        problem = describe(error)
    _put(store, f"{prefix}/hello/{cluster.worker}", {"problem": problem})
    if cluster.is_chief:
        try:
            hellos = _hear_all(store, prefix, cluster.world, timeout)
            problems = {str(i): each["problem"] for i, each in enumerate(hellos)}
        except WaitTimeoutError as error:
            problems = {MISSING: str(error)}
        problems = {who: text for who, text in problems.items() if text}
        _put(store, f"{prefix}/ready", problems)
    patience = timeout + HEARD_WITHIN
    ready = _take(store, f"{prefix}/ready", patience, "worker 0's go-ahead")
    if MISSING in ready:
        raise WaitTimeoutError(ready[MISSING])
    said = {i: ready[f"{i}"] for i in range(cluster.world) if f"{i}" in ready}
    return plan, {i: str(problem) for i, problem in said.items()}


def describe(error: TfpreemptError) -> str:
    """An error as text that names its class first, so that peers can raise the same."""
    return f"{type(error).__name__}: {error}"


def _hear_all(
    store: KeyValueStore, prefix: str, world: int, timeout: float
) -> list[Plan]:
    """What each worker says, to the chief, which asks meanwhile who is dead.

    Raises:
        WaitTimeoutError: one is dead, or too late.
    """
    clock, missing = SystemClock(), set(range(world))
    end, asks_at = clock.monotonic() + timeout, clock.monotonic()

    def hear(worker: int) -> Plan:
        key = f"{prefix}/hello/{worker}"
        hello = _read(key, store.get(key), "problem")
        missing.discard(worker)
        return hello

    def watch() -> None:
        nonlocal asks_at
        now = clock.monotonic()
        if missing and now >= end:
            raise _missing(min(missing), f"it did not come within {timeout:g} s")
        if now >= asks_at:
            asks_at = now + ASKS_EVERY
            for worker in sorted(missing & store.dead_workers()):
                raise _missing(worker, "the coordination service reports it dead")

    return map_in_threads(
        hear, range(world), threads=walks(world), name="tfpreempt-start", watch=watch
    )


def _missing(worker: int, why: str) -> WaitTimeoutError:
    return WaitTimeoutError(
        f"worker {worker} is missing in the start of a handler: {why}. If it is not "
        "gone, it is frozen, or makes its handlers in another order. Look at the logs "
        "of all workers."
    )


def _put(store: KeyValueStore, key: str, value: Plan) -> None:
    text = json.dumps(value)
    bounded(lambda: store.insert(key, text), 60.0, f"inserting {key}")


def _take(
    store: KeyValueStore, key: str, timeout: float, whom: str, *fields: str
) -> Plan:
    try:
        text = bounded(lambda: store.get(key), timeout, f"waiting for {whom}")
    except StoreGoneError as error:
        where = "worker 0 was lost in the start of a handler"
        raise StoreGoneError(
            f"{where}, while {whom} was waited for: {error}"
        ) from error
    return _read(key, text, *fields)


def _read(key: str, text: str, *fields: str) -> Plan:
    try:
        plan: Plan = json.loads(text)
    except (ValueError, RecursionError):
        plan = {}
    if not isinstance(plan, dict) or not plan.keys() >= set(fields):
        raise CoordinationError(
            f"the key {key!r} holds {text[:200]!r}; expected a JSON object with "
            f"{fields}. Do all workers run the same version of tfpreempt?"
        )
    return plan


def bounded(call: Callable[[], T], timeout: float, what: str) -> T:
    """Runs a call that may block for ever in a daemon thread, with a deadline.

    Raises:
        WaitTimeoutError: it took longer than `timeout` seconds.
    """
    try:
        return call_within(timeout, call)
    except OutOfTimeError as error:
        raise WaitTimeoutError(
            f"{what} took longer than {timeout:g} s, in the start of a handler; a "
            "worker is missing, frozen, or makes its handlers in another order. Look "
            "at the logs of all workers."
        ) from error
