"""What a source does about its own failures: each logged once, retried later.

Two failures are the same fault if type and message are the same, but for what a server
said (`NoticeError.kind`), and but for the numbers in errors of others: a page may carry
a date, a message the address of an object, that is always new.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

from tfpreempt import errors

_logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


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
        self.text = ""
        """What the last failure said; "" if there was none since it last worked."""

    def note_failure(self, error: BaseException) -> float:
        """Logs it unless the last failure was the same; returns the pause."""
        self._failures += 1
        pause = self._retry(self._failures)
        self.text = str(error)
        ours = error if isinstance(error, errors.NoticeError) else None
        kind = _NUMBER.sub("", self.text) if ours is None else ours.kind
        fault = (type(error), kind)
        if fault != self._fault:
            # The traceback comes with the first fault of a row; what follows it is
            # one line, and the same fault again says nothing. Our own errors say in
            # words what happened and need none.
            is_told = ours is not None or self._fault is not None
            _logger.warning(
                "%s failed (%s: %s); it is tried again in %.2g s and from then on with "
                "back-off. Until it works, a notice from it cannot be seen",
                self._name,
                *(type(error).__name__, self.text),
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
        self._failures, self._fault, self.text = 0, None, ""
