"""Reads one key from each of many workers; a tombstone ends the wait for a missing key.

A blocking read of the store cannot be cancelled. To end a wait, the reading process
inserts the missing key with a tombstone: a value that means "given up". A tombstone is
inserted at once for a worker that the service reports as crashed, and at the deadline
for a late worker. The first insert of a key counts, so all workers see the same value:
either the worker's value or the tombstone.
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
OnComplete = Callable[[dict[int, Any]], None]


@dataclasses.dataclass(eq=False)
class KeyGather:
    """Reads one key of each of several workers; the constructor starts the reads.

    Any thread may call the methods.

    Args:
        executor: reads and writes the key-value store.
        key: kind of the key; determines how values are decoded.
        names: for every worker index, the name of the worker's key.
        by: index of this worker, written into the tombstones.
        then: function called for every worker with the worker's index, the value or a
            tombstone, and the extra fields.
        on_complete: function called when all keys have a value; its argument has the
            value for every worker index.
    """

    executor: StoreExecutor
    key: Key
    names: dict[int, str]
    by: int
    then: Then
    on_complete: OnComplete = lambda values: None

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
                is_complete = not self._missing
            if is_complete:
                self._complete.set()
                self.on_complete({each: self._values[each] for each in workers})

        self.executor.watch_deaths(
            self._complete,
            lambda dead: self.give_up(
                dead, "the coordination service reports the worker as unreachable"
            ),
        )
        self.executor.get_each(list(self.names.values()), got)

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
        """Inserts tombstones for workers that have not answered.

        Args:
            workers: indices of the workers to give up; a worker that has answered, or
                has a tombstone already, is ignored.
            why: reason, written into the tombstones and shown to people.
        """
        with self._lock:
            late = sorted((self._missing & workers) - self._given_up)
            self._given_up.update(late)
        for worker in late:
            reason = f"worker {worker} is missing in {AWAITED[self.key]}: {why}"
            extra = {"by": self.by, "reason": reason}
            text = keys.encode(Tombstone(), extra)
            self.executor.insert(self.names[worker], text, lambda held: None)
