"""Executes the coordinator's reads and writes of the store, and its alarms.

A `StoreExecutor` makes blocking calls in daemon threads, and passes the results to
functions of the coordinator, so the coordinator never blocks. Nothing waits for the end
of these threads, because a read of a missing key cannot be cancelled, and must not
delay the exit of the process.
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

from tfpreempt.coordination.key_value_store import KeyValueStore
from tfpreempt.core.clock import Clock
from tfpreempt.core.threads import ManagedThread
from tfpreempt.errors import CoordinationServiceUnavailableError, KeyExistsError

log = logging.getLogger(__name__)

FEWEST_WALKS = 8
"""Smallest number of threads that read many keys; each thread reads some of them."""

OnValue = Callable[[str], None]


@dataclasses.dataclass(eq=False)
class StoreExecutor:
    """Asynchronous access to a key-value store, and alarms.

    An alarm is the call of a function at a given time. Any thread may call the methods.
    The functions passed to the methods are called on threads of the executor.

    Args:
        store: key-value store of the workers.
        clock: time source for alarms.
        on_gone: function called when the store cannot be reached; may be called several
            times.
        deaths_every: seconds between two requests for the list of crashed workers.
    """

    store: KeyValueStore
    clock: Clock
    on_gone: Callable[[CoordinationServiceUnavailableError], None]
    deaths_every: float = 1.0

    def __post_init__(self) -> None:
        self._reads: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_stopped = False
        self._alarms: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._alarm_set = threading.Condition()
        reads, writes = iter(self._reads.get, None), iter(self._writes.get, None)
        ManagedThread("tfpreempt-hub", lambda: self._work(reads)).start()
        ManagedThread("tfpreempt-writer", lambda: self._work(writes)).start()
        ManagedThread("tfpreempt-alarms", self._ring).start()

    def stop(self) -> None:
        """Ends the threads when their blocking reads have returned.

        Called at the end of the process, and by tests: a test run creates thousands of
        executors in one process, and the kernel limits the number of threads.
        """
        self._is_stopped = True
        self._reads.put(None)
        self._writes.put(None)
        with self._alarm_set:
            self._alarm_set.notify_all()

    def get(self, key: str, then: OnValue) -> None:
        """Calls `then` with the value of a key, when the key has been inserted.

        A single thread executes the reads of all calls, one after the other.
        """
        self._reads.put(lambda: then(self.store.get(key)))

    def get_each(self, keys: Sequence[str], then: Callable[[int, str], None]) -> None:
        """Calls `then` for every key, when the key has been inserted.

        Args:
            keys: names of the keys.
            then: function called with the index of a key in `keys`, and the key's
                value; called on several threads, in no fixed order.
        """

        def read(i: int) -> None:
            then(i, self.store.get(keys[i]))

        reads = [functools.partial(read, i) for i in range(len(keys))]
        threads = reader_thread_count(len(keys))
        for first in range(threads):
            share = functools.partial(self._work, reads[first::threads])
            ManagedThread("tfpreempt-gather", share).start()

    def insert(self, key: str, value: str, then: OnValue) -> None:
        """Inserts a key, and calls `then` with the value of the key in the store.

        The value in the store is not `value` if the key was inserted before. Inserts
        take effect in the order of the calls.
        """

        def write() -> None:
            try:
                self.store.insert(key, value)
                held = value
            except KeyExistsError:
                held = self.store.get(key)
            then(held)

        self._writes.put(write)

    def delete(self, key: str) -> None:
        """Deletes a key, and all keys whose names begin with `key/`.

        Earlier calls of `insert` take effect before.
        """
        self._writes.put(functools.partial(self.store.delete, key))

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        """Calls a function at a time, on the alarm thread.

        Args:
            when: time on the monotonic clock.
            call: function to call; it must not block.
        """
        with self._alarm_set:
            heapq.heappush(self._alarms, (when, next(self._numbers), call))
            self._alarm_set.notify()

    def watch_deaths(
        self, until: threading.Event, then: Callable[[frozenset[int]], None]
    ) -> None:
        """Asks the store for the crashed workers, every `deaths_every` seconds.

        Args:
            until: event that ends the requests.
            then: function called with the crashed workers, if there are any.
        """

        def ask() -> None:
            dead = self.store.dead_workers()
            if dead and not until.is_set():
                then(dead)
            self.watch_deaths(until, then)

        self.call_at(
            self.clock.monotonic() + self.deaths_every,
            lambda: None if until.is_set() else self._writes.put(ask),
        )

    def watch_store(self, key: str, until: threading.Event, interval: float) -> None:
        """Checks repeatedly that the store responds; if not, reports the store as lost.

        A blocking read detects neither a frozen host nor a broken network. So this
        method inserts the same key repeatedly: the error "key exists" shows that the
        store responds. The thread does not hold the GIL while it waits for the
        response.

        Args:
            key: name of a key that only this worker inserts.
            until: event that ends the checks.
            interval: seconds between two inserts; also the timeout for a response.
        """
        answered = threading.Event()

        def look() -> None:
            if until.is_set():
                return
            if not answered.is_set():
                raise CoordinationServiceUnavailableError(
                    f"the coordination service has not answered for {interval:g} s. "
                    "Worker 0, which hosts the service, is suspended or unreachable; "
                    "restart all workers."
                )
            self.watch_store(key, until, interval)

        self.insert(key, "", lambda held: answered.set())
        self.call_at(self.clock.monotonic() + interval, look)

    def _work(self, jobs: Iterable[Callable[[], None]]) -> None:
        """Runs jobs, and calls `on_gone` for each job that raises an error.

        The error is the loss of the store, or a bug in tfpreempt.

        Args:
            jobs: calls of the store, or alarms.
        """
        for job in jobs:
            try:
                job()
            except CoordinationServiceUnavailableError as error:
                if not self._is_stopped:
                    self.on_gone(error)
            except Exception as error:
                log.exception(
                    "this worker can no longer communicate with the other workers, "
                    "because of a bug in tfpreempt; please report the bug. All "
                    "commits are intact"
                )
                self.on_gone(
                    CoordinationServiceUnavailableError(
                        f"the thread that talks with others failed: {error}"
                    )
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


def reader_thread_count(keys: int) -> int:
    """Returns the number of threads to read `keys` keys.

    The number is the square root of `keys`, but at least `FEWEST_WALKS`, and no more
    than `keys`. So with many keys, each thread reads about as many keys as there are
    threads. Even with thousands of keys, all keys are read within a few dozen round
    trips after the last insert.
    """
    return min(keys, max(FEWEST_WALKS, math.isqrt(keys)))


def call_and_wait(ask: Callable[[OnValue], None], wait: float) -> str | None:
    """Starts an asynchronous call, and waits for the result of the call.

    Args:
        ask: function that starts the call. Its argument is a function, which the call
            must call with the result.
        wait: seconds to wait.

    Returns:
        The result; None if there is no result after `wait` seconds.
    """
    given: queue.SimpleQueue[str] = queue.SimpleQueue()
    ask(given.put)
    try:
        return given.get(timeout=wait)
    except queue.Empty:
        return None
