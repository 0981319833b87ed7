"""How long a call to an object store may take, however many requests it makes."""

from __future__ import annotations

import time

from tfpreempt import errors

REQUEST_SECONDS = 60.0
# Longer ones are for the caller: the mirror tells of a fault and tries again itself.
RETRY_SECONDS = 30.0


class OutOfTimeError(errors.TfpreemptError, TimeoutError):
    """The time that a caller gave is used up; translated before anybody sees it."""


class Limit:
    """One call's time, from now on.

    Args:
        seconds: for the whole call; None: there is no such limit, only the store's own
            for each request and for each fault.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds

    def request(self) -> float:
        """Seconds that a request may take.

        Raises:
            OutOfTimeError: there are none left.
        """
        return min(self._left(REQUEST_SECONDS), REQUEST_SECONDS)

    def retry(self) -> float:
        """Seconds for which something that fails may be tried again.

        Raises:
            OutOfTimeError: there are none left.
        """
        return min(self._left(RETRY_SECONDS), RETRY_SECONDS)

    def call(self) -> float | None:
        """Seconds that are left for the whole call; None: no limit.

        Raises:
            OutOfTimeError: there are none left.
        """
        return None if self._end is None else self._left(0.0)

    def check(self) -> None:
        """Raises OutOfTimeError if no time is left."""
        self.call()

    def _left(self, unlimited: float) -> float:
        if self._end is None:
            return unlimited
        left = self._end - time.monotonic()
        if left <= 0:
            raise OutOfTimeError(f"{self.seconds:g} s are over")
        return left
