"""What a source does about its own failures: each logged once, retried later."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tfpreempt import errors

_logger = logging.getLogger(__name__)


class FaultLog:
    """Counts failures in a row and says each fault once.

    Args:
        name: the source's name, for messages.
        retry: the pause in seconds after so many failures in a row (1 is the first).
    """

    def __init__(self, name: str, retry: Callable[[int], float]) -> None:
        self._name = name
        self._retry = retry
        self._failures = 0
        self._fault: tuple[type[BaseException], str] | None = None

    @property
    def text(self) -> str:
        """The fault that lasts; "" if there is none."""
        return "" if self._fault is None else self._fault[1]

    def note_failure(self, error: BaseException) -> float:
        """Logs it unless the last failure was the same; returns the pause."""
        self._failures += 1
        pause = self._retry(self._failures)
        fault = (type(error), str(error))
        if fault != self._fault:
            # The traceback comes with the first fault of a row; what follows it is
            # one line, and the same fault again says nothing. Our own errors say in
            # words what happened and need none.
            is_told = isinstance(error, errors.NoticeError) or self._fault is not None
            _logger.warning(
                "%s failed (%s: %s); it is tried again in %.2g s and from then on with "
                "back-off. Until it works, a notice from it cannot be seen",
                self._name,
                *(fault[0].__name__, fault[1]),
                pause,
                exc_info=None if is_told else error,
            )
            self._fault = fault
        return pause

    def note_success(self) -> None:
        """Says that it works again, if it had failed."""
        if self._fault is not None:
            _logger.warning(
                "%s works again after %d failures", self._name, self._failures
            )
        self._failures, self._fault = 0, None
