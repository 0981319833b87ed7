"""An insert-once store with slow messages, and a coordinator's executor for the store.

The executor has the order of `StoreExecutor`: reads in sequence, inserts in sequence,
and gathers in a few parallel walks. The store is in the chief's process: when the chief
is frozen, the store is frozen, and after the chief's end every request fails.

A message is a request with its reply. A reply that waited for its key is one more
message, because the store sends it later.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence

from tests.cluster.timeline import Process, Timeline, milliseconds
from tfpreempt.coordination.store_executor import OnValue, reader_thread_count
from tfpreempt.errors import CoordinationServiceUnavailableError

DEATHS_EVERY = 1000
"""Milliseconds between two polls for crashed workers."""

Job = Callable[[Callable[[], None]], None]  # calls its argument at the end


class Request:
    """A message to the store without a reply so far."""

    __slots__ = ("answer", "fail", "key", "process", "value")

    def __init__(
        self,
        process: Process,
        key: str,
        value: str | None,
        answer: OnValue,
        fail: Callable[[], None],
    ) -> None:
        self.process = process
        self.key = key
        self.value = value  # None: a get
        self.answer = answer
        self.fail = fail


class SimulatedStore:
    """The store of a simulated cluster.

    Args:
        timeline: the virtual time.
        host: process that runs the store.
        delay: returns the milliseconds that the next message travels.
        is_lost: returns whether a reply on its way is lost when the host ends.
        rate: number of messages that the store serves in a millisecond, in the order of
            arrival; None: no limit.

    Attributes:
        values: the inserted values.
        served: number of messages.
    """

    def __init__(
        self,
        timeline: Timeline,
        host: Process,
        delay: Callable[[], int],
        is_lost: Callable[[], bool],
        rate: int | None = None,
    ) -> None:
        self.values: dict[str, str] = {}
        self.served = 0
        self._rate = rate
        self._next_place = 0  # in the queue, counted in messages since 0 ms
        self._timeline = timeline
        self._host = host
        self._delay = delay
        self._is_lost = is_lost
        self._answering: set[int] = set()
        self._open: dict[int, Request] = {}
        self._waiting: dict[str, list[int]] = {}
        self._numbers = itertools.count()

    def send(self, request: Request) -> None:
        """Sends a request; the reply or the failure comes later."""
        number = next(self._numbers)
        self._open[number] = request
        if self._host.gone_at is not None:
            self._fail(number)
            return
        arrive = functools.partial(self._arrive, number)
        self._timeline.after(self._delay(), arrive, self._host)

    def close(self) -> None:
        """Ends the store together with its host."""
        for number in list(self._open):
            if number not in self._answering or self._is_lost():
                self._fail(number)
        self._waiting.clear()

    def serve(self, length: int = 1) -> int:
        """Puts a message into the queue.

        Args:
            length: duration of the service, in units of an ordinary message.

        Returns:
            The milliseconds until the message is served.
        """
        self.served += 1
        if self._rate is None:
            return 0
        now = self._timeline.now
        place = max(self._next_place, now * self._rate)
        self._next_place = place + length
        return (place + length - 1) // self._rate - now

    def _arrive(self, number: int) -> None:
        wait = self.serve()
        if not wait:
            self._handle(number)
            return
        handle = functools.partial(self._handle, number)
        self._timeline.after(wait, handle, self._host)

    def _handle(self, number: int) -> None:
        if number not in self._open:
            return
        request = self._open[number]
        if request.process.gone_at is not None and request.value is None:
            del self._open[number]
            return
        known = self.values.get(request.key)
        if request.value is None:
            if known is None:
                self._waiting.setdefault(request.key, []).append(number)
            else:
                self._answer(number, known, self._delay())
        elif known is None:
            self.values[request.key] = request.value
            self._answer(number, request.value, self._delay())
            for waiting in self._waiting.pop(request.key, ()):
                wait = self.serve()
                self._answer(waiting, request.value, wait + self._delay())
        else:  # reply "it exists", and then a get of the value
            wait = self.serve()
            self._answer(number, known, wait + self._delay() + 2 * self._delay())

    def _answer(self, number: int, text: str, wait: int) -> None:
        self._answering.add(number)
        arrive = functools.partial(self._answered, number, text)
        self._timeline.after(wait, arrive, self._open[number].process)

    def _answered(self, number: int, text: str) -> None:
        request = self._open.pop(number, None)
        if request is not None:
            request.answer(text)

    def _fail(self, number: int) -> None:
        request = self._open.pop(number)
        self._timeline.after(self._delay(), request.fail, request.process)


class SimulatedExecutor:
    """A `StoreExecutor` for the coordinator of one simulated worker.

    Args:
        timeline: the virtual time.
        process: process in which callbacks run.
        store: the cluster's store.
        dead_workers: returns the crashed workers according to the service.
        on_gone: called when the store is unreachable.
    """

    def __init__(
        self,
        timeline: Timeline,
        process: Process,
        store: SimulatedStore,
        dead_workers: Callable[[], frozenset[int]],
        on_gone: Callable[[CoordinationServiceUnavailableError], None],
    ) -> None:
        self._timeline = timeline
        self._process = process
        self._store = store
        self._dead_workers = dead_workers
        self._on_gone = on_gone
        self._reads = _Line()
        self._writes = _Line()
        self._watches: list[
            tuple[threading.Event, Callable[[frozenset[int]], None]]
        ] = []
        self._asking = False

    def get(self, key: str, then: OnValue) -> None:
        self._reads.join(functools.partial(self._request, key, None, then))

    def get_each(self, keys: Sequence[str], then: Callable[[int, str], None]) -> None:
        threads = reader_thread_count(len(keys))
        for t in range(threads):
            walk = _Line()
            for i in range(t, len(keys), threads):
                got = functools.partial(then, i)
                walk.join(functools.partial(self._request, keys[i], None, got))

    def insert(self, key: str, value: str, then: OnValue) -> None:
        self._writes.join(functools.partial(self._request, key, value, then))

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        self._timeline.at(milliseconds(when), call, self._process)

    def watch_deaths(
        self, until: threading.Event, then: Callable[[frozenset[int]], None]
    ) -> None:
        self._watches.append((until, then))
        self.ask_for_the_dead()

    def ask_for_the_dead(self) -> None:
        """Starts polling for crashed workers, if a watch exists."""
        if self._watches and not self._asking:
            self._asking = True
            self._timeline.after(DEATHS_EVERY, self._ask, self._process)

    def _ask(self) -> None:
        self._asking = False
        self._watches = [watch for watch in self._watches if not watch[0].is_set()]
        dead = self._dead_workers()
        for until, then in list(self._watches) if dead else ():
            if not until.is_set():
                then(dead)
        self.ask_for_the_dead()

    def _request(
        self, key: str, value: str | None, then: OnValue, done: Callable[[], None]
    ) -> None:
        def answer(text: str) -> None:
            then(text)
            done()

        def fail() -> None:
            error = CoordinationServiceUnavailableError(
                f"the simulated store is gone, asked for {key!r}"
            )
            self._on_gone(error)
            done()

        self._store.send(Request(self._process, key, value, answer, fail))


class _Line:
    """Jobs of one thread: each job begins when the job before has ended."""

    __slots__ = ("_busy", "_jobs")

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._busy = False

    def join(self, job: Job) -> None:
        self._jobs.append(job)
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = bool(self._jobs)
        if self._jobs:
            self._jobs.popleft()(self._next)
