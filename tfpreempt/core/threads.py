"""Threads with an owner, jobs in many threads, and calls with a timeout."""

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
_TICK_SECONDS = 0.1  # seconds between two calls of `watch`
_logger = logging.getLogger(__name__)


class ManagedThread(threading.Thread):
    """A daemon thread that its owner can stop; logs an error raised by its target.

    Nothing stops the thread automatically (there is no `__del__`). An owner that needs
    the thread to end before the process ends sets `stop_event` and calls `join`.

    Args:
        name: the thread's name, shown by debuggers and in logs.
        target: function without arguments that runs in the thread, and returns soon
            after `stop_event` is set.

    Attributes:
        stop_event: event that asks the target to return; any thread may set it.
    """

    def __init__(self, name: str, target: Callable[[], None]) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self.stop_event = threading.Event()

    def join(  # type: ignore[override]  # returns the result of is_alive() too
        self, timeout: float | None = None
    ) -> bool:
        """Waits for the thread to end.

        Any thread may call the method; if the thread joins itself, it does not wait.

        Args:
            timeout: maximum wait in seconds; None: no timeout.

        Returns:
            Whether the thread has ended, or was never started.
        """
        if self.ident is not None and self is not threading.current_thread():
            super().join(timeout)
        return not self.is_alive()

    def run(self) -> None:
        try:
            super().run()
        except BaseException:
            _logger.exception(
                "the thread %s ended with an error, and does no more work",
                self.name,
            )


class CallTimeoutError(TimeoutError):
    """A call took longer than its timeout."""


def call_within(seconds: float, call: Callable[[], _T]) -> _T:
    """Calls a function that may block, in a daemon thread, and waits with a timeout.

    Args:
        seconds: timeout. After the timeout the function continues in the thread, but
            its result is ignored.
        call: function to call.

    Returns:
        The result of the function.

    Raises:
        CallTimeoutError: the function took longer than `seconds`.
        BaseException: the exception that the function raised.
    """
    future: concurrent.futures.Future[_T] = concurrent.futures.Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised to the caller
            future.set_exception(error)

    threading.Thread(target=work, name="tfpreempt-bounded", daemon=True).start()
    if not concurrent.futures.wait([future], seconds).done:
        raise CallTimeoutError(f"{seconds:g} s are over")
    return future.result()


def map_in_threads(
    do: Callable[[_Job], _T],
    jobs: Iterable[_Job],
    *,
    threads: int,
    name: str,
    watch: Callable[[], None] = lambda: None,
    failed: threading.Event | None = None,
    stop_timeout: float = 0.0,
) -> list[_T]:
    """Runs jobs in daemon threads, started in order; no job starts after an error.

    The function uses no executor of concurrent.futures, because at exit Python waits
    for the threads of an executor. A thread that hangs in a request would delay the
    exit, and after a notice only seconds may be left.

    Args:
        do: function that does one job; called on several threads.
        jobs: arguments for `do`, one for every job.
        threads: maximum number of threads; a thread is started only if jobs are left.
        name: prefix of the threads' names.
        watch: function that the calling thread calls about ten times a second; if it
            raises an exception, no further job is started.
        failed: event that this function sets after an error; a long job can check the
            event and return early.
        stop_timeout: seconds to wait at the end until the threads have ended, for all
            threads together.

    Returns:
        The results of the jobs, in order.

    Raises:
        BaseException: the exception of the first job that failed, or of `watch`.
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

    workers: list[ManagedThread] = []
    try:
        # The first threads may have done all jobs already.
        while todo and len(workers) < threads:
            workers.append(ManagedThread(f"{name}-{len(workers)}", work))
            workers[-1].start()
        while workers and not is_done.wait(_TICK_SECONDS):
            watch()
    except BaseException:
        is_over.set()
        raise
    finally:
        limit = time.monotonic() + stop_timeout
        for thread in workers:
            thread.join(max(0.0, limit - time.monotonic()))
    if failures:
        raise failures[0]
    return [results[index] for index in range(count)]
