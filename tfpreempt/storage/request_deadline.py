"""Time limit of a call to an object store, whatever the number of its requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from tfpreempt.core.threads import CallTimeoutError, call_within

_T = TypeVar("_T")
# Settings of the clients: the longest silence of a request, and the longest retrying of
# a failing request. Longer waits are up to the caller: the mirror reports the failure
# and continues.
REQUEST_SECONDS = 60.0
RETRY_SECONDS = 30.0


class Deadline:
    """Deadline of one call, which starts now.

    No client can end a request at a given moment: a client's timeout starts again with
    each packet, or belongs to the store. So the caller stops waiting, and the request
    ends by itself.

    Args:
        seconds: time limit of the whole call; None: no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds

    def run(self, act: Callable[[], _T]) -> _T:
        """Runs a part of the call; returns its result or raises its error.

        Raises:
            CallTimeoutError: the deadline has passed; the part may continue in its
                thread.
        """
        if self._end is None:
            return act()
        left = self.left(0.0)
        try:
            return call_within(left, act)
        except CallTimeoutError as error:
            raise self._is_over() from error

    def left(self, unlimited: float) -> float:
        """Returns the seconds left, or `unlimited` without a deadline.

        Raises:
            CallTimeoutError: the deadline has passed.
        """
        if self._end is None:
            return unlimited
        if (left := self._end - time.monotonic()) <= 0:
            raise self._is_over()
        return left

    def _is_over(self) -> CallTimeoutError:
        return CallTimeoutError(f"it was not done within {self._seconds:g} s")
