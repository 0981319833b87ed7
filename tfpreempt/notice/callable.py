"""Notices from a function of the user, called repeatedly."""

from __future__ import annotations

import reprlib
import threading
from collections.abc import Callable

from tfpreempt import errors
from tfpreempt.notice.polling import PollingSource, Wait


class CallableSource(PollingSource):
    """Calls a `termination_watcher_fn` repeatedly, in its own thread.

    The source reports a notice when the returned value changes from false to true. If
    the function raises an error, the error is logged once, and the function is called
    again after 1 s, then after longer pauses, up to 30 s. If the function hangs, only
    this source is blocked.

    Args:
        fn: function without arguments, called on the source's thread.
        interval: seconds between two calls.
        wait: function that waits between calls; tests pass the wait of a fake clock.

    Raises:
        ConfigurationError: `fn` is not callable or the interval is not positive.
    """

    def __init__(
        self,
        fn: Callable[[], object],
        interval: float = 1.0,
        *,
        wait: Wait = threading.Event.wait,
    ) -> None:
        if not callable(fn):
            raise errors.ConfigurationError(
                f"fn={fn!r}: expected a function without arguments that returns True "
                "when this machine is about to be terminated; pass the function, not "
                "its result"
            )
        self._fn = fn
        self._label = str(getattr(fn, "__qualname__", type(fn).__qualname__))
        super().__init__(f"callable:{self._label}", interval, wait)

    def poll_once(self) -> str | None:
        value = self._fn()
        return f"{self._label}() returned {reprlib.repr(value)}" if value else None
