"""How the coordinator's reads, writes and alarms happen.

The coordinator itself never blocks. It asks the runtime, and is called back. That has
daemon threads that are never joined: a read of a key that never comes must not hinder
the end of the process, and cannot be cancelled.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import logging
import math
import queue
import threading
from collections.abc import Callable, Iterable, Sequence

from tfpreempt.coordination.store import KeyValueStore
from tfpreempt.core.clock import Clock
from tfpreempt.core.threads import OwnedThread
from tfpreempt.errors import KeyExistsError, StoreGoneError

log = logging.getLogger(__name__)

FEWEST_WALKS = 8
"""Threads that read many keys at once, at least; each walks through its share."""

OnValue = Callable[[str], None]


@dataclasses.dataclass(eq=False)
class Runtime:
    """Asynchronous access to a store, and alarms. Callbacks come on any thread.

    Args:
        store: the store.
        clock: for alarms.
        on_gone: called (at least once) when the store cannot be reached.
        deaths_every: seconds between two questions for dead workers.
    """

    store: KeyValueStore
    clock: Clock
    on_gone: Callable[[StoreGoneError], None]
    deaths_every: float = 1.0

    def __post_init__(self) -> None:
        self._reads: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_stopped = False
        self._alarms: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._alarm_set = threading.Condition()
        reads, writes = iter(self._reads.get, None), iter(self._writes.get, None)
        OwnedThread("tfpreempt-hub", lambda: self._work(reads)).start()
        OwnedThread("tfpreempt-writer", lambda: self._work(writes)).start()
        OwnedThread("tfpreempt-alarms", self._ring).start()

    def stop(self) -> None:
        """Ends the threads, as soon as their reads end. For tests: see `new_process`.

        A process that trains has one runtime, which ends with the process. A test run
        makes thousands in one process, and the kernel limits the number of threads.
        """
        self._is_stopped = True
        self._reads.put(None)
        self._writes.put(None)
        with self._alarm_set:
            self._alarm_set.notify_all()

    def get(self, key: str, then: OnValue) -> None:
        """Calls `then` with the key's value once it is there. One at a time."""
        self._reads.put(lambda: then(self.store.get(key)))

    def get_each(self, keys: Sequence[str], then: Callable[[int, str], None]) -> None:
        """Calls `then` with the index and value of each key, as they come."""

        def read(i: int) -> None:
            then(i, self.store.get(keys[i]))

        reads = [functools.partial(read, i) for i in range(len(keys))]
        threads = walks(len(keys))
        for first in range(threads):
            share = functools.partial(self._work, reads[first::threads])
            OwnedThread("tfpreempt-gather", share).start()

    def insert(self, key: str, value: str, then: OnValue) -> None:
        """Inserts a key; `then` is given what the key holds now: this value or an
        older one. Inserts take effect in the order of the calls."""

        def write() -> None:
            try:
                self.store.insert(key, value)
                held = value
            except KeyExistsError:
                held = self.store.get(key)
            then(held)

        self._writes.put(write)

    def delete(self, key: str) -> None:
        """Deletes a key and everything under it, after what was inserted before."""
        self._writes.put(functools.partial(self.store.delete, key))

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Calls `call`, which must not block, at a monotonic time."""
        with self._alarm_set:
            heapq.heappush(self._alarms, (when, next(self._numbers), call))
            self._alarm_set.notify()

    def watch_deaths(
        self, until: threading.Event, then: Callable[[frozenset[int]], None]
    ) -> None:
        """Calls `then` with the dead workers whenever there are any, until told."""

        def ask() -> None:
            dead = self.store.dead_workers()
            if dead and not until.is_set():
                then(dead)
            self.watch_deaths(until, then)

        self.at(
            self.clock.monotonic() + self.deaths_every,
            lambda: None if until.is_set() else self._writes.put(ask),
        )

    def watch_store(self, key: str, until: threading.Event, patience: float) -> None:
        """Takes a store for gone that does not answer, until told.

        A read that blocks learns nothing of a host that has fallen silent, nor of a
        network that is cut. So a key is inserted again and again: that it is there
        already is an answer, and whoever waits for it holds no lock of Python's.

        Args:
            key: of this worker.
            until: ends it.
            patience: seconds between two questions, in which it is to answer.
        """
        answered = threading.Event()

        def look() -> None:
            if until.is_set():
                return
            if not answered.is_set():
                raise StoreGoneError(
                    f"the coordination service has not answered for {patience:g} s. "
                    "Its host, worker 0, is frozen or cut off; all workers must start "
                    "again."
                )
            self.watch_store(key, until, patience)

        self.insert(key, "", lambda held: answered.set())
        self.at(self.clock.monotonic() + patience, look)

    def _work(self, jobs: Iterable[Callable[[], None]]) -> None:
        """Runs jobs; a gone store is told to the coordinator, a bug to the log."""
        for job in jobs:
            try:
                job()
            except StoreGoneError as error:
                if not self._is_stopped:
                    self.on_gone(error)
            except Exception as error:
                log.exception(
                    "tfpreempt: this worker cannot talk with the others any more, by a "
                    "bug of tfpreempt: please report it. No commit is touched"
                )
                self.on_gone(
                    StoreGoneError(f"the thread that talks with others failed: {error}")
                )

    def _ring(self) -> None:
        while not self._is_stopped:
            with self._alarm_set:
                if not self._alarms:
                    self._alarm_set.wait()
                    continue
                when, _, call = self._alarms[0]
                wait = when - self.clock.monotonic()
                if wait > 0:
                    self._alarm_set.wait(wait)
                    continue
                heapq.heappop(self._alarms)
            self._work([call])


def walks(keys: int) -> int:
    """How many threads read so many keys.

    As many as each has keys to read: the last key is known a few dozen travel times
    after the last worker has inserted, also where there are thousands.
    """
    return min(keys, max(FEWEST_WALKS, math.isqrt(keys)))


def answer(ask: Callable[[OnValue], None], wait: float) -> str | None:
    """Waits for the value that a call of the runtime gives; None after `wait` s."""
    given: queue.SimpleQueue[str] = queue.SimpleQueue()
    ask(given.put)
    try:
        return given.get(timeout=wait)
    except queue.Empty:
        return None
