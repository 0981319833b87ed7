"""A key-value store that fails, or takes its time, where the test says.

`FaultyStore` stands in front of any store and passes the contract test of the real ones
while no fault is asked for.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from tfpreempt.coordination.memory import MemoryStore
from tfpreempt.coordination.store import KeyValueStore
from tfpreempt.errors import StoreGoneError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreFault:
    """What goes wrong with the operations that match.

    Attributes:
        operation: "insert", "get", "delete", "dead_workers", or "*" for any.
        key: pattern of the key, as in file names; matches any key by default.
        after: how many matching operations go well before.
        times: how many fail then; None: all that follow.
        error: what is raised; None: nothing, the operation only takes longer.
        delay_seconds: what it takes longer.
        is_done: the operation takes effect all the same, but its answer is lost.
    """

    operation: str = "*"
    key: str = "*"
    after: int = 0
    times: int | None = 1
    error: Exception | None = dataclasses.field(
        default_factory=lambda: StoreGoneError("simulated: the store does not answer")
    )
    delay_seconds: float = 0.0
    is_done: bool = False

    def matches(self, operation: str, key: str) -> bool:
        """Whether it is about this operation."""
        about = self.operation in ("*", operation)
        return about and fnmatch.fnmatchcase(key, self.key)


class FaultyStore:
    """A store in front of another one; all methods may be called from any thread.

    Args:
        inner: the store that does the work; one in memory by default.
        faults: what goes wrong; the first one that matches and is due.
        sleep: waits so many seconds, for faults with a delay.

    Attributes:
        operations: (operation, key) in the order in which they were asked for.
    """

    def __init__(
        self,
        inner: KeyValueStore | None = None,
        *,
        faults: Sequence[StoreFault] = (),
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self.operations: list[tuple[str, str]] = []
        self._inner: KeyValueStore = MemoryStore() if inner is None else inner
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
