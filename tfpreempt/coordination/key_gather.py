"""Collects a key of many workers: blocking reads, ended by an insert.

A read of a key that never comes cannot be cancelled. So a wait is ended by inserting a
tombstone under the key: at once for a worker reported as crashed by the service, at
the deadline for a late worker. The first insert, by the worker or with a tombstone, is
the value seen by every worker.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from tfpreempt.coordination import keys
from tfpreempt.coordination.protocol_types import AWAITED, Key, Tombstone
from tfpreempt.coordination.store_executor import StoreExecutor

Then = Callable[[int, Any, keys.Extra], None]
Whole = Callable[[dict[int, Any]], None]


@dataclasses.dataclass(eq=False)
class KeyGather:
    """A key of several workers, read from construction on; any thread.

    Args:
        runtime: access to the store.
        key: kind of the key; determines how values are decoded.
        names: name of the key for each worker.
        by: index of the gathering worker, recorded in the tombstones.
        then: function called for each worker with the index, the value or a tombstone,
            and the extra fields.
        whole: function called with the values by worker, once every value is there.
    """

    runtime: StoreExecutor
    key: Key
    names: dict[int, str]
    by: int
    then: Then
    whole: Whole = lambda values: None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._missing = set(self.names)
        self._given_up: set[int] = set()
        self._values: dict[int, Any] = {}
        self._complete = threading.Event()
        workers = list(self.names)

        def got(index: int, text: str) -> None:
            worker = workers[index]
            value, extra = keys.decode(self.key, text)
            self.then(worker, value, extra)
            with self._lock:
                self._values[worker] = value
                self._missing.discard(worker)
                is_whole = not self._missing
            if is_whole:
                self._complete.set()
                self.whole({each: self._values[each] for each in workers})

        self.runtime.watch_deaths(
            self._complete,
            lambda dead: self.give_up(
                dead, "the coordination service reports the worker as dead"
            ),
        )
        self.runtime.get_each(list(self.names.values()), got)

    def wait(self, timeout: float) -> frozenset[int]:
        """Waits up to `timeout` seconds; returns the workers still missing."""
        self._complete.wait(timeout)
        return self.missing

    @property
    def missing(self) -> frozenset[int]:
        """The workers that have not answered."""
        with self._lock:
            return frozenset(self._missing)

    def give_up(self, workers: frozenset[int], why: str) -> None:
        """Inserts tombstones for `workers` without an answer, once per worker."""
        with self._lock:
            late = sorted((self._missing & workers) - self._given_up)
            self._given_up.update(late)
        for worker in late:
            reason = f"worker {worker} is missing in {AWAITED[self.key]}: {why}"
            extra = {"by": self.by, "reason": reason}
            text = keys.encode(Tombstone(), extra)
            self.runtime.insert(self.names[worker], text, lambda held: None)
