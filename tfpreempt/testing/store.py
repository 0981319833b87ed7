"""A key-value store that fails, or is slow, on request of the test.

`FaultyKeyValueStore` wraps any store. Without faults the wrapped store passes the
contract test of the real stores.
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
    """A fault of the matching operations.

    Attributes:
        operation: "insert", "get", "delete", "dead_workers", or "*" for any operation.
        key: pattern of the key, as for file names; matches any key by default.
        after: number of matching operations that succeed before the first failure.
        times: number of operations that fail then; None: every further operation.
        error: error to raise; None: no error, the operation only takes longer.
        delay_seconds: additional duration of the operation.
        is_done: whether the operation takes effect although its answer is lost.
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
    """A store that wraps another store; any thread may call any method.

    Args:
        inner: the wrapped store; a store in memory by default.
        faults: possible faults; the first matching and due fault takes effect.
        sleep: waits for a number of seconds, for faults with a delay.

    Attributes:
        operations: (operation, key) pairs in the order of the calls.
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
