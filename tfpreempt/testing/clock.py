"""A clock that stands still until a test moves it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

_LOOK_SECONDS = 0.001  # how often a waiter looks at an event that somebody else sets
_LIMIT_SECONDS = 20.0  # real time after which a test that hangs is told so


class FakeClock:
    """A `Clock` moved by hand, on which threads can wait.

    A step through a polling thread is `advance(interval)`, then `wait_for_waiters()`:
    after the first the thread has woken, after the second it is waiting again, so all
    that it had to do at that time is done.

    Args:
        start: what `monotonic()` says at first, in seconds.
        wall: what `wall()` says at first, in seconds since the epoch.
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
        """Moves time on; returns when every waiter whose time has come is awake.

        Args:
            seconds: how far; the clock never goes back.

        Raises:
            ValueError: it is negative.
            TimeoutError: a waiter did not wake up within 20 real seconds.
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
        """Waits for an event, or for a function to say True; any thread.

        Args:
            condition: looked at every millisecond of real time.
            timeout: the most seconds of this clock.

        Returns:
            Whether it was met, as `threading.Event.wait` does.
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
        """Blocks until at least so many threads wait on this clock.

        Raises:
            TimeoutError: they did not come within 20 real seconds.
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
