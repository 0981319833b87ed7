"""A few threads that share a list of tasks; the first failure ends them all.

Not an executor: the interpreter joins an executor's threads at exit, and a thread that
hangs in a request would hold up the exit of a process that has seconds to leave.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterable

from tfpreempt.core.threads import OwnedThread

Task = Callable[[], None]

_TICK = 0.1  # seconds between two looks of the owner
_LEAVE = 5.0  # seconds that the threads have, together, to notice a failure


class CancelledError(Exception):
    """Another task has failed, or the owner has given up; raised within tasks."""


class Crew:
    """Threads of one piece of work. Tasks may add tasks.

    Args:
        name: of the threads.
        threads: how many, 1 or more.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._threads = threads
        self._tasks: collections.deque[Task] = collections.deque()
        self._changed = threading.Condition()
        self._running = 0
        self._failure: BaseException | None = None
        self._cancelled = False

    def add(self, tasks: Iterable[Task], *, first: bool = False) -> None:
        """Puts tasks at the end of the list. Any thread.

        Args:
            tasks: the tasks.
            first: before all others instead, so that what was begun is finished.
        """
        with self._changed:
            if first:
                self._tasks.extendleft(reversed(list(tasks)))
            else:
                self._tasks.extend(tasks)
            self._changed.notify_all()

    def check(self) -> None:
        """Called by tasks that take long. Any thread.

        Raises:
            CancelledError: the task is to end.
        """
        if self._cancelled:
            raise CancelledError

    def run(self, watch: Callable[[], None]) -> None:
        """Returns when all tasks are done. The owner's thread.

        Args:
            watch: called every tenth of a second; what it raises ends the work.

        Raises:
            BaseException: what the first task that failed has raised.
        """
        crew = [
            OwnedThread(f"{self._name}-{number}", self._work)
            for number in range(self._threads)
        ]
        try:
            for thread in crew:
                thread.start()
            while not self._is_over(_TICK):
                watch()
        finally:
            with self._changed:
                self._cancelled = True
                self._changed.notify_all()
            limit = time.monotonic() + _LEAVE
            for thread in crew:
                thread.end(max(0.0, limit - time.monotonic()))
        if self._failure is not None:
            raise self._failure

    def _is_over(self, timeout: float) -> bool:
        def is_over() -> bool:
            return self._failure is not None or not (self._tasks or self._running)

        with self._changed:
            return self._changed.wait_for(is_over, timeout)

    def _work(self) -> None:
        while (task := self._take()) is not None:
            failure: BaseException | None = None
            try:
                task()
            except CancelledError:
                pass
            except BaseException as error:  # noqa: BLE001 - the owner raises it
                failure = error
            with self._changed:
                self._running -= 1
                if failure is not None:
                    self._failure = self._failure or failure
                    self._cancelled = True
                self._changed.notify_all()

    def _take(self) -> Task | None:
        with self._changed:
            while not self._tasks and self._running and not self._cancelled:
                self._changed.wait(_LEAVE)
            if self._cancelled or not self._tasks:
                return None
            self._running += 1
            return self._tasks.popleft()
