"""A clock that stands still until a test advances the time."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

_LOOK_SECONDS = 0.001  # real time between two checks of a condition
_LIMIT_SECONDS = 20.0  # real time after which a hanging test fails


class FakeClock:
    """A `Clock` whose time changes only by `advance`; threads can wait for a time.

    To let a polling thread poll once, call `advance(interval)`, then
    `wait_for_waiters()`. The first call wakes the thread. The second call returns when
    the thread has polled, and waits again.

    Args:
        start: initial value of `monotonic()`, in seconds.
        wall: initial value of `wall()`, in seconds since the epoch.
    """

    def __init__(self, start: float = 1000.0, wall: float = 1_700_000_000.0) -> None:
        self._now = start
        self._wall_offset = wall - start
        self._changed = threading.Condition()
        self._tickets = itertools.count()
        self._waiters: dict[int, float] = {}

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now + self._wall_offset

    def advance(self, seconds: float) -> None:
        """Advances the time, and wakes the threads whose timeouts have passed.

        Args:
            seconds: seconds to add; not negative.

        Raises:
            ValueError: the number of seconds is negative.
            TimeoutError: a thread did not wake up within 20 s of real time.
        """
        if seconds < 0:
            raise ValueError(f"seconds={seconds}: a monotonic clock never goes back")
        target = self._now + seconds
        with self._changed:
            self._now = target
            self._changed.notify_all()
        self._wait_until(
            lambda: all(until > target for until in self._waiters.values()),
            lambda: f"waiters are still asleep at {target}",
        )

    def wait(
        self, condition: threading.Event | Callable[[], bool], timeout: float
    ) -> bool:
        """Waits for an event, or until a function returns True. Any thread may call.

        Args:
            condition: event or function, checked every millisecond of real time.
            timeout: maximum seconds to wait, on this clock.

        Returns:
            Whether the condition was met before the timeout.
        """
        is_met = (
            condition.is_set if isinstance(condition, threading.Event) else condition
        )
        with self._changed:
            ticket, until = next(self._tickets), self._now + timeout
            try:
                while not is_met() and self._now < until:
                    self._waiters[ticket] = until
                    self._changed.notify_all()
                    self._changed.wait(_LOOK_SECONDS)
            finally:
                self._waiters.pop(ticket, None)
                self._changed.notify_all()
        return is_met()

    def wait_for_waiters(self, count: int = 1) -> None:
        """Waits (in real time) until enough threads are in `wait`.

        Args:
            count: number of threads to wait for.

        Raises:
            TimeoutError: fewer threads were waiting after 20 s of real time.
        """
        self._wait_until(
            lambda: len(self._waiters) >= count,
            lambda: f"{len(self._waiters)} of {count} threads wait on the fake clock",
        )

    def _wait_until(
        self, is_met: Callable[[], bool], describe: Callable[[], str]
    ) -> None:
        with self._changed:
            if not self._changed.wait_for(is_met, _LIMIT_SECONDS):
                raise TimeoutError(f"{describe()}, after {_LIMIT_SECONDS} real seconds")
