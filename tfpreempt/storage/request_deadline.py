"""`Deadline`: timeout of a call to an object store, for all requests of the call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from tfpreempt.core.threads import CallTimeoutError, call_within

_T = TypeVar("_T")
# Settings of the client libraries: seconds without a byte after which a request fails,
# and seconds for the retries of a failing request. A caller that can wait longer, such
# as the mirror, logs the failure and calls again.
REQUEST_SECONDS = 60.0
RETRY_SECONDS = 30.0


class Deadline:
    """Deadline of one call to a store; the time starts with the constructor.

    No client library can end a request at a given time: the library's timeouts restart
    with every packet, or are the same for all requests. So a request runs in a separate
    thread. At the deadline the caller stops waiting; the thread ends with the request.

    Args:
        seconds: timeout of the whole call; None: no timeout.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds

    def run(self, act: Callable[[], _T]) -> _T:
        """Calls `act`, a part of the call to the store; returns the result of `act`.

        An error that `act` raises is raised unchanged.

        Raises:
            CallTimeoutError: the deadline has passed; `act` may still run in a thread.
        """
        if self._end is None:
            return act()
        left = self.left(0.0)
        try:
            return call_within(left, act)
        except CallTimeoutError as error:
            raise self._is_over() from error

    def left(self, unlimited: float) -> float:
        """Returns the seconds until the deadline; `unlimited` if there is no deadline.

        Raises:
            CallTimeoutError: the deadline has passed.
        """
        if self._end is None:
            return unlimited
        if (left := self._end - time.monotonic()) <= 0:
            raise self._is_over()
        return left

    def _is_over(self) -> CallTimeoutError:
        return CallTimeoutError(f"not complete within {self._seconds:g} s")
