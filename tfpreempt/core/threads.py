"""Threads that have an owner, jobs in many of them, and calls that may hang."""

from __future__ import annotations

import collections
import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

_T = TypeVar("_T")
_Job = TypeVar("_Job")
_TICK_SECONDS = 0.1  # between two looks of whoever waits for many threads
_logger = logging.getLogger(__name__)


class OwnedThread(threading.Thread):
    """A daemon thread with a name and an end.

    A failure is logged. There is no `__del__`: the owner stops its thread, if it is to
    end before the process does.

    Args:
        name: the thread's name, shown by debuggers and in logs.
        target: runs in the thread, without arguments; it returns soon after
            `stop_event` is set.

    Attributes:
        stop_event: its owner asks the target to return by it; any thread.
    """

    def __init__(self, name: str, target: Callable[[], None]) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self.stop_event = threading.Event()

    def join(  # type: ignore[override]  # says what Thread's leaves to is_alive()
        self, timeout: float | None = None
    ) -> bool:
        """Waits for the thread to end. Any thread; from the thread itself, no wait.

        Args:
            timeout: the most seconds to wait.

        Returns:
            Whether it has ended (or was never started).
        """
        if self.ident is not None and self is not threading.current_thread():
            super().join(timeout)
        return not self.is_alive()

    def run(self) -> None:
        try:
            super().run()
        except BaseException:
            _logger.exception(
                "the thread %s has ended by an error, and does its work no more",
                self.name,
            )


class OutOfTimeError(TimeoutError):
    """A call took longer than its caller waits."""


def call_within(seconds: float, call: Callable[[], _T]) -> _T:
    """Calls, in a daemon thread, what may block longer than anybody wants to wait.

    Args:
        seconds: how long to wait; what is not over by then goes on unheard.
        call: what is called.

    Raises:
        OutOfTimeError: it took longer.
        BaseException: what the call has raised.
    """
    future: concurrent.futures.Future[_T] = concurrent.futures.Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised to the caller
            future.set_exception(error)

    threading.Thread(target=work, name="tfpreempt-bounded", daemon=True).start()
    if not concurrent.futures.wait([future], seconds).done:
        raise OutOfTimeError(f"{seconds:g} s are over")
    return future.result()


def map_in_threads(
    do: Callable[[_Job], _T],
    jobs: Iterable[_Job],
    *,
    threads: int,
    name: str,
    watch: Callable[[], None] = lambda: None,
    failed: threading.Event | None = None,
    patience: float = 0.0,
) -> list[_T]:
    """Does jobs in daemon threads, begun in their order; the first error ends them.

    Not an executor: the interpreter joins an executor's threads at its exit, and one
    that hangs in a request would hold up the end of a process with seconds to leave.

    Args:
        do: does one job. Any thread.
        jobs: the jobs.
        threads: how many at a time, at most; no more are begun than there is work for.
        name: of the threads.
        watch: called about ten times a second by this thread; what it raises ends them.
        failed: set when an error ends the work; jobs that take long look at it.
        patience: seconds that the threads have, together, to leave after an error.

    Returns:
        What came of each job, in their order.

    Raises:
        BaseException: what the first job that failed has raised.
    """
    todo = collections.deque(enumerate(jobs))
    count = len(todo)
    results: dict[int, _T] = {}
    failures: list[BaseException] = []
    is_over = failed or threading.Event()
    is_done = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            try:
                index, job = todo.popleft()
            except IndexError:
                return
            try:
                results[index] = do(job)
            except BaseException as error:  # noqa: BLE001 - raised to the caller
                failures.append(error)
                is_over.set()
            if failures or len(results) == count:
                is_done.set()

    workers: list[OwnedThread] = []
    try:
        while todo and len(workers) < threads:  # the first few may have done it all
            workers.append(OwnedThread(f"{name}-{len(workers)}", work))
            workers[-1].start()
        while workers and not is_done.wait(_TICK_SECONDS):
            watch()
    except BaseException:
        is_over.set()
        raise
    finally:
        limit = time.monotonic() + patience
        for thread in workers:
            thread.join(max(0.0, limit - time.monotonic()))
    if failures:
        raise failures[0]
    return [results[index] for index in range(count)]
