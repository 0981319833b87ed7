"""Before training: all workers start from the same plan, or all raise the same error.

The chief proposes, everyone checks the proposal against what it sees, and the chief
announces the result. Three insert-once keys a start: `plan`, `hello/<i>`, `ready`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from tfpreempt.coordination.store import KeyValueStore
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.threads import OutOfTimeError, call_within
from tfpreempt.errors import CoordinationError, TfpreemptError, WaitTimeoutError

Plan = dict[str, Any]
T = TypeVar("T")


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
        WaitTimeoutError: a worker did not come in time.
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
        problems = {}
        for i in range(cluster.world):
            name = f"{prefix}/hello/{i}"
            hello = _take(store, name, timeout, f"worker {i}", "problem")
            if hello["problem"]:
                problems[str(i)] = hello["problem"]
        _put(store, f"{prefix}/ready", problems)
    ready = _take(store, f"{prefix}/ready", timeout, "worker 0's go-ahead")
    said = {i: ready[f"{i}"] for i in range(cluster.world) if f"{i}" in ready}
    return plan, {i: str(problem) for i, problem in said.items()}


def describe(error: TfpreemptError) -> str:
    """An error as text that names its class first, so that peers can raise the same."""
    return f"{type(error).__name__}: {error}"


def _put(store: KeyValueStore, key: str, value: Plan) -> None:
    text = json.dumps(value)
    bounded(lambda: store.insert(key, text), 60.0, f"inserting {key}")


def _take(
    store: KeyValueStore, key: str, timeout: float, whom: str, *fields: str
) -> Plan:
    text = bounded(lambda: store.get(key), timeout, f"waiting for {whom}")
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
            f"{what} took longer than {timeout:g} s; a worker is missing, frozen, or "
            "makes its handlers in another order. Look at the logs of all workers."
        ) from error
