"""How the coordinator's reads, writes and alarms happen: the protocol, and threads.

The coordinator itself never blocks. It asks a runtime, and is called back. `Threads`
does it with daemon threads that are never joined: a read of a key that never comes must
not hinder the end of the process, and cannot be cancelled.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from tfpreempt.coordination.store import KeyValueStore
from tfpreempt.core.clock import Clock
from tfpreempt.core.threads import OwnedThread
from tfpreempt.errors import KeyExistsError, StoreGoneError

log = logging.getLogger(__name__)

GATHERERS = 8
"""Threads that read many keys at once; each walks through its share."""

OnValue = Callable[[str], None]


class Runtime(Protocol):
    """Asynchronous access to a store, and alarms. Callbacks come on any thread."""

    def get(self, key: str, then: OnValue) -> None:
        """Calls `then` with the key's value once it is there. One at a time."""
        ...

    def get_each(self, keys: Sequence[str], then: Callable[[int, str], None]) -> None:
        """Calls `then` with the index and value of each key, as they come."""
        ...

    def insert(self, key: str, value: str, then: OnValue) -> None:
        """Inserts a key; `then` is given what the key holds now: this value or an
        older one. Inserts take effect in the order of the calls."""
        ...

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Calls `call`, which must not block, at a monotonic time."""
        ...

    def watch_deaths(
        self, until: threading.Event, then: Callable[[frozenset[int]], None]
    ) -> None:
        """Calls `then` with the dead workers whenever there are any, until told."""
        ...


class Threads:
    """A runtime on a blocking store.

    Args:
        store: the store.
        clock: for alarms.
        on_gone: called (at least once) when the store cannot be reached.
        deaths_every: seconds between two questions for dead workers.
    """

    def __init__(
        self,
        store: KeyValueStore,
        clock: Clock,
        on_gone: Callable[[StoreGoneError], None],
        deaths_every: float = 1.0,
    ) -> None:
        self._store = store
        self._clock = clock
        self._on_gone = on_gone
        self._deaths_every = deaths_every
        self._reads: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._alarms: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._alarm_set = threading.Condition()
        OwnedThread("tfpreempt-hub", lambda: self._drain(self._reads)).start()
        OwnedThread("tfpreempt-writer", lambda: self._drain(self._writes)).start()
        OwnedThread("tfpreempt-alarms", self._ring).start()

    def get(self, key: str, then: OnValue) -> None:
        self._reads.put(functools.partial(self._read, key, then))

    def get_each(self, keys: Sequence[str], then: Callable[[int, str], None]) -> None:
        def walk(indices: range) -> None:
            for i in indices:
                got = functools.partial(then, i)
                self._guarded(functools.partial(self._read, keys[i], got))

        threads = min(GATHERERS, len(keys))
        for t in range(threads):
            indices = range(t, len(keys), threads)
            walks = functools.partial(walk, indices)
            OwnedThread("tfpreempt-gather", walks).start()

    def insert(self, key: str, value: str, then: OnValue) -> None:
        def write() -> None:
            try:
                self._store.insert(key, value)
                held = value
            except KeyExistsError:
                held = self._store.get(key)
            then(held)

        self._writes.put(write)

    def at(self, when: float, call: Callable[[], None]) -> None:
        with self._alarm_set:
            heapq.heappush(self._alarms, (when, next(self._numbers), call))
            self._alarm_set.notify()

    def watch_deaths(
        self, until: threading.Event, then: Callable[[frozenset[int]], None]
    ) -> None:
        def ask() -> None:
            dead = self._store.dead_workers()
            if dead and not until.is_set():
                then(dead)
            self.watch_deaths(until, then)

        self.at(
            self._clock.monotonic() + self._deaths_every,
            lambda: None if until.is_set() else self._writes.put(ask),
        )

    def _drain(self, jobs: queue.SimpleQueue[Callable[[], None]]) -> None:
        while True:
            self._guarded(jobs.get())

    def _read(self, key: str, then: OnValue) -> None:
        then(self._store.get(key))

    def _guarded(self, job: Callable[[], None]) -> None:
        """Runs a job; a gone store is told to the coordinator, a bug to the log."""
        try:
            job()
        except StoreGoneError as error:
            self._on_gone(error)
        except Exception as error:
            log.exception("tfpreempt: a coordination thread failed; this is a bug")
            self._on_gone(StoreGoneError(f"a coordination thread failed: {error}"))

    def _ring(self) -> None:
        while True:
            with self._alarm_set:
                while not self._alarms:
                    self._alarm_set.wait()
                when, _, call = self._alarms[0]
                wait = when - self._clock.monotonic()
                if wait > 0:
                    self._alarm_set.wait(wait)
                    continue
                heapq.heappop(self._alarms)
            self._guarded(call)


def publish(runtime: Runtime, key: str, text: str, wait: float) -> str | None:
    """Inserts a key and waits for it; inserts made earlier are through by then.

    Returns:
        What the key holds, this text or an older one; None if unknown after `wait` s.
    """
    there = threading.Event()
    held: list[str] = []

    def then(value: str) -> None:
        held.append(value)
        there.set()

    runtime.insert(key, text, then)
    there.wait(wait)
    return held[0] if held else None
