"""A notice from a function that is asked again and again."""

from __future__ import annotations

import reprlib
from collections.abc import Callable

from tfpreempt import errors
from tfpreempt.notice._outlet import Outlet
from tfpreempt.notice._polling import CLOSE_LIMIT_SECONDS, PollingLoop, Wait, wait_event
from tfpreempt.notice.source import OnNotice


class CallableSource:
    """Polls a `termination_watcher_fn` in a thread of its own.

    What the function returns is taken by its truth; the change from false to true is
    the notice. An exception is logged once per fault and retried with back-off, from
    1 s up to 30 s. A call that hangs hangs only this source.

    Args:
        fn: takes no arguments. Called in the source's thread.
        interval: seconds between two calls.
        wait: how to wait between calls; tests pass that of a fake clock.
        close_limit: seconds for which `close()` waits for a running call.

    Raises:
        ConfigurationError: `fn` is not callable or the interval is not positive.
    """

    def __init__(
        self,
        fn: Callable[[], object],
        interval: float = 1.0,
        *,
        wait: Wait = wait_event,
        close_limit: float = CLOSE_LIMIT_SECONDS,
    ) -> None:
        if not callable(fn):
            raise errors.ConfigurationError(
                f"fn={fn!r}: expected a function without arguments that returns True "
                "when this machine is about to go; pass the function, not its result"
            )
        self._fn = fn
        self._label = str(getattr(fn, "__qualname__", type(fn).__qualname__))
        self._name = f"callable:{self._label}"
        self._outlet = Outlet(self._name)
        self._loop = PollingLoop(
            self._name,
            self._poll,
            self._outlet.send,
            interval=interval,
            wait=wait,
            close_limit=close_limit,
        )

    @property
    def name(self) -> str:
        return self._name

    def start(self, on_notice: OnNotice) -> None:
        self._outlet.open(on_notice)
        self._loop.start()

    def rearm(self) -> None:
        pass  # nothing can disarm a poll

    def close(self) -> None:
        if self._outlet.close():
            self._loop.close()

    def _poll(self) -> str | None:
        value = self._fn()
        return f"{self._label}() returned {reprlib.repr(value)}" if value else None
