"""How long a call to an object store may take, however many requests it makes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from tfpreempt.core.threads import OutOfTimeError, call_within

_T = TypeVar("_T")
# What the clients are told: a request's longest silence, and for how long one that
# fails is sent again. More is for the caller: the mirror tells of a fault and goes on.
REQUEST_SECONDS = 60.0
RETRY_SECONDS = 30.0


class Deadline:
    """The end of one call's time, from now on.

    No client can end a request at a given moment: their time-outs begin anew with each
    packet, or belong to the store. So the caller leaves; its request ends by itself.

    Args:
        seconds: for the whole call; None: as long as the requests take.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds

    def run(self, act: Callable[[], _T]) -> _T:
        """What a part of the call returns or raises.

        Raises:
            OutOfTimeError: time is up; the part may go on in its thread.
        """
        if self._end is None:
            return act()
        left = self.left(0.0)
        try:
            return call_within(left, act)
        except OutOfTimeError as error:
            raise self._is_over() from error

    def left(self, unlimited: float) -> float:
        """Seconds until then; so many if there is no end.

        Raises:
            OutOfTimeError: time is up.
        """
        if self._end is None:
            return unlimited
        if (left := self._end - time.monotonic()) <= 0:
            raise self._is_over()
        return left

    def _is_over(self) -> OutOfTimeError:
        return OutOfTimeError(f"it was not done within {self._seconds:g} s")
