"""Contract of every source of notices, and the base class of tfpreempt's sources."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from tfpreempt import errors

_logger = logging.getLogger(__name__)

OnNotice = Callable[[str], None]
"""Called with a description of the notice, from any thread of the source, never in a
signal handler. The function returns quickly and does not raise."""


class NoticeSource(Protocol):
    """A source of preemption notices, such as a signal or a metadata server.

    A source reports changes: a notice that stays up is reported once, and a notice that
    is withdrawn and returns is reported again. A source survives its own failures: a
    failure is logged once and retried with back-off.
    """

    @property
    def name(self) -> str:
        """Stable name for logs and the journal, such as "signal:SIGTERM"."""
        ...

    def start(self, on_notice: OnNotice) -> None:
        """Starts watching. Called once, on the main thread.

        Args:
            on_notice: function called with a detail for people at each notice, from any
                thread of the source, never in a signal handler. The function returns
                quickly and does not raise.

        Raises:
            NoticeError: the source cannot work here.
        """
        ...

    def rearm(self) -> None:
        """Watches again after other code may have disarmed the source. Main thread
        only.

        Signals can be disarmed. Called at the first `run()` and at each scope entry;
        cheap, and may do nothing.
        """
        ...

    def close(self) -> None:
        """Stops watching, joins threads with a limit, and restores changed state."""
        ...


@runtime_checkable
class TimedSource(NoticeSource, Protocol):
    """A source whose notices may name the time of the termination."""

    def seconds_left(self) -> float | None:
        """Returns the seconds left by the current notice; None if unknown.

        A value of 0 or less means that the time is over. Measured by this machine's
        wall clock, which the clouds synchronize. Any thread.
        """
        ...


@dataclasses.dataclass(eq=False, repr=False)
class NoticeSourceBase:
    """Base class of sources: started once, closed once, survives a listener's errors.

    A subclass implements `_begin` and `_end`, and calls `send`.

    Args:
        name: name of the source in logs and the journal.
    """

    name: str
    _on_notice: OnNotice | None = dataclasses.field(default=None, init=False)
    _is_closed: bool = dataclasses.field(default=False, init=False)

    def start(self, on_notice: OnNotice) -> None:
        """Starts watching.

        Args:
            on_notice: listener, see `NoticeSource.start`.

        Raises:
            NoticeError: the source cannot work here.
            UsageError: the source was started or closed before.
        """
        if self._on_notice is not None or self._is_closed:
            state = "closed" if self._is_closed else "started"
            raise errors.UsageError(
                f"start() was called on the notice source {self.name!r}, which was "
                f"{state} before; a source can be started once: make a new source"
            )
        self._on_notice = on_notice
        self._begin()

    def rearm(self) -> None:
        pass  # only signals can be disarmed

    def close(self) -> None:
        """Stops watching; reports no notice from now on. Idempotent."""
        was_open = self._on_notice is not None and not self._is_closed
        self._is_closed = True
        if was_open:
            self._end()

    def send(self, detail: str) -> None:
        """Passes on a notice, unless the source is closed. Any thread, never raises."""
        if self._on_notice is None or self._is_closed:
            return
        try:
            self._on_notice(detail)
        except Exception:
            # The source must survive an error of its listener: other sources may share
            # the thread.
            _logger.exception(
                "on_notice raised an error for a notice of %s; the source continues",
                self.name,
            )

    def _begin(self) -> None:
        """Starts watching."""

    def _end(self) -> None:
        """Stops watching. Called only after `_begin`."""
