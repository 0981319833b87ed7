"""One loop that asks again and again: edges out, faults logged once, back-off."""

from __future__ import annotations

import logging
import math
import numbers
import threading
from collections.abc import Callable

from tfpreempt import errors
from tfpreempt.core.threads import OwnedThread
from tfpreempt.notice._faults import FaultLog

_logger = logging.getLogger(__name__)

Poll = Callable[[], str | None]
"""Asks once: a detail while the notice is up, None while it is not."""

Wait = Callable[[threading.Event, float], bool]
"""Waits at most that many seconds for the event; returns whether it is set."""

CLOSE_LIMIT_SECONDS = 2.0
FIRST_RETRY_SECONDS = 1.0
LONGEST_RETRY_SECONDS = 30.0


def wait_event(event: threading.Event, seconds: float) -> bool:
    """Waits on the real clock."""
    return event.wait(seconds)


def retry_seconds(failures: int, first: float = FIRST_RETRY_SECONDS) -> float:
    """The pause after the given number of failures in a row (1 is the first)."""
    doublings = min(failures - 1, 16)
    return min(first * 2.0**doublings, LONGEST_RETRY_SECONDS)


class PollingLoop:
    """Polls in a thread of its own and reports each change from quiet to notice.

    Args:
        name: the source's name; the thread is called after it.
        poll: asks once. It may raise: that is logged once per fault and retried. It
            may hang: then only this thread hangs.
        on_edge: called in the thread with the detail of each new notice.
        interval: seconds between two polls that went well.
        wait: how to wait; tests pass that of a fake clock.
        close_limit: seconds for which `close()` waits for the thread.

    Raises:
        ConfigurationError: the interval is not a positive finite number.
    """

    def __init__(
        self,
        name: str,
        poll: Poll,
        on_edge: Callable[[str], None],
        *,
        interval: float,
        wait: Wait = wait_event,
        close_limit: float = CLOSE_LIMIT_SECONDS,
    ) -> None:
        self._name = name
        self._poll = poll
        self._on_edge = on_edge
        self._interval = checked_interval(name, interval)
        self._wait = wait
        self._close_limit = close_limit
        self._is_up = False
        self._faults = FaultLog(name, retry_seconds)
        self._thread = OwnedThread(f"tfpreempt-{name}", self._run)

    def start(self) -> None:
        """Starts to poll, at once. Called once."""
        self._thread.start()

    def close(self) -> None:
        """Stops; waits for the thread with a limit and warns if it is still there."""
        if not self._thread.end(self._close_limit):
            _logger.warning(
                "%s: its call has not returned within %.1f s of closing; its daemon "
                "thread is left behind and nothing that it finds will be reported. A "
                "watcher function should return at once",
                self._name,
                self._close_limit,
            )

    def _run(self) -> None:
        stop = self._thread.stop_event
        while not stop.is_set():
            if self._wait(stop, self._step()):
                return

    def _step(self) -> float:
        """Polls once; returns the seconds to wait before the next time."""
        try:
            detail = self._poll()
        except BaseException as error:  # noqa: BLE001 - a poll's sys.exit() is a fault
            return self._faults.note_failure(error)
        self._faults.note_success()
        is_new = detail is not None and not self._is_up
        self._is_up = detail is not None
        if is_new and detail is not None and not self._thread.stop_event.is_set():
            self._on_edge(detail)
        return self._interval


def checked_interval(name: str, interval: object) -> float:
    """The interval as a float.

    Raises:
        ConfigurationError: it is not a positive finite number.
    """
    if not isinstance(interval, bool) and isinstance(interval, numbers.Real):
        seconds = float(interval)
        if math.isfinite(seconds) and seconds > 0:
            return seconds
    raise errors.ConfigurationError(
        f"interval={interval!r} for {name}: expected a positive, finite number of "
        "seconds between two polls, such as interval=1.0"
    )
