"""A key-value store that fails or is slow when a test wants.

`FaultyKeyValueStore` wraps a key-value store, and behaves as the wrapped store except
for the faults that the test passes.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from tfpreempt.coordination.in_memory_store import InMemoryStore
from tfpreempt.coordination.key_value_store import KeyValueStore
from tfpreempt.errors import CoordinationServiceUnavailableError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreFault:
    """A fault to inject: which operations of the store fail or are slow, and when.

    Attributes:
        operation: "insert", "get", "delete", "dead_workers", or "*" for any operation.
        key: pattern for the key's name, with the wildcards of file names; by default
            any key.
        after: number of matching operations that succeed before the fault begins.
        times: number of operations with the fault; None: all further operations.
        error: error to raise; None: the operation succeeds, after `delay_seconds`.
        delay_seconds: seconds by which the operation takes longer.
        is_done: whether the store executes the operation before the error is raised, as
            if only the answer was lost.
    """

    operation: str = "*"
    key: str = "*"
    after: int = 0
    times: int | None = 1
    error: Exception | None = dataclasses.field(
        default_factory=lambda: CoordinationServiceUnavailableError(
            "simulated: the store does not answer"
        )
    )
    delay_seconds: float = 0.0
    is_done: bool = False

    def matches(self, operation: str, key: str) -> bool:
        """Returns whether the fault applies to an operation on a key."""
        about = self.operation in ("*", operation)
        return about and fnmatch.fnmatchcase(key, self.key)


class FaultyKeyValueStore:
    """A key-value store with injected faults. Any thread may call any method.

    Args:
        inner: the wrapped key-value store; by default a new store in memory.
        faults: faults to inject. If several faults match an operation, the first one
            applies.
        sleep: function that waits for a number of seconds; called with the
            `delay_seconds` of a fault.

    Attributes:
        operations: the calls so far, in order, as (operation, key).
    """

    def __init__(
        self,
        inner: KeyValueStore | None = None,
        *,
        faults: Sequence[StoreFault] = (),
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self.operations: list[tuple[str, str]] = []
        self._inner: KeyValueStore = InMemoryStore() if inner is None else inner
        self._faults = tuple(faults)
        self._seen = [0] * len(self._faults)
        self._sleep = sleep or threading.Event().wait
        self._lock = threading.Lock()

    def insert(self, key: str, value: str) -> None:
        self._run("insert", key, lambda: self._inner.insert(key, value))

    def get(self, key: str, timeout: float | None = None) -> str:
        return self._run("get", key, lambda: self._inner.get(key, timeout))

    def delete(self, key: str) -> None:
        self._run("delete", key, lambda: self._inner.delete(key))

    def dead_workers(self) -> frozenset[int]:
        return self._run("dead_workers", "", self._inner.dead_workers)

    def _run(self, operation: str, key: str, call: Callable[[], T]) -> T:
        with self._lock:
            self.operations.append((operation, key))
            fault = self._due(operation, key)
        if fault is None:
            return call()
        if fault.delay_seconds:
            self._sleep(fault.delay_seconds)
        if fault.error is None:
            return call()
        if fault.is_done:
            call()
        raise fault.error

    def _due(self, operation: str, key: str) -> StoreFault | None:
        found: StoreFault | None = None
        for i, fault in enumerate(self._faults):
            if not fault.matches(operation, key):
                continue
            number = self._seen[i] - fault.after
            self._seen[i] += 1
            due = number >= 0 and (fault.times is None or number < fault.times)
            if due and found is None:
                found = fault
        return found
