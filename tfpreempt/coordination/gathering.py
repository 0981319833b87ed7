"""Collecting one key of many workers: blocking reads, ended by inserting.

A read of a key that never comes cannot be cancelled, so a wait is ended by inserting a
tombstone under the key: for a worker that the service reports dead at once, for a late
one at the limit. Whoever inserts first, worker or tombstone, is what everybody sees.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from tfpreempt.coordination import keys
from tfpreempt.coordination.events import AWAITED, Key, Tombstone
from tfpreempt.coordination.runtime import Runtime

Then = Callable[[int, Any, keys.Extra], None]
Whole = Callable[[dict[int, Any]], None]


@dataclasses.dataclass(eq=False)
class Gathering:
    """One key of each of some workers, which is read from now on; any thread.

    Args:
        runtime: access to the store.
        key: which key it is; says how values are read.
        names: the key's name for each worker.
        by: who gathers; named in the tombstones.
        then: given each worker, its value or a tombstone, and what travels beside it.
        whole: given the values of all workers, by worker, once all are there.
    """

    runtime: Runtime
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
            lambda dead: self.give_up(dead, "the coordination service reports it dead"),
        )
        self.runtime.get_each(list(self.names.values()), got)

    def wait(self, timeout: float) -> frozenset[int]:
        """Waits until all is there; returns who is missing after `timeout` seconds."""
        self._complete.wait(timeout)
        return self.missing

    @property
    def missing(self) -> frozenset[int]:
        """The workers that have not answered."""
        with self._lock:
            return frozenset(self._missing)

    def give_up(self, workers: frozenset[int], why: str) -> None:
        """Gives up on these workers, as far as they have not answered; once on each."""
        with self._lock:
            late = sorted((self._missing & workers) - self._given_up)
            self._given_up.update(late)
        for worker in late:
            reason = f"worker {worker} is missing in {AWAITED[self.key]}: {why}"
            extra = {"by": self.by, "reason": reason}
            text = keys.encode(Tombstone(), extra)
            self.runtime.insert(self.names[worker], text, lambda held: None)
