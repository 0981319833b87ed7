"""What every source of notices promises, and what all of ours share."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from tfpreempt import errors

_logger = logging.getLogger(__name__)

OnNotice = Callable[[str], None]
"""Called with a detail for people, from any thread of the source, never in a signal
handler. It returns quickly and does not raise."""


class NoticeSource(Protocol):
    """One way in which a machine learns that it is going away.

    A source reports a change, not a level: a notice that stays up is reported once; one
    that is withdrawn and comes again is reported again. A source survives its own
    failures: they are logged once per fault and retried with back-off.
    """

    @property
    def name(self) -> str:
        """Stable name for logs and the journal, such as "signal:SIGTERM"."""
        ...

    def start(self, on_notice: OnNotice) -> None:
        """Starts to watch. Called once, on the main thread.

        Raises:
            NoticeError: the source cannot work here.
        """
        ...

    def rearm(self) -> None:
        """Watches again after something may have disarmed it (signals). Main thread.

        Called at the first `run()` and at each scope entry; cheap, may do nothing.
        """
        ...

    def close(self) -> None:
        """Stops, joins its threads with a limit, and puts back what it changed."""
        ...


@runtime_checkable
class TimedSource(NoticeSource, Protocol):
    """A source that may be told by when the machine goes."""

    def seconds_left(self) -> float | None:
        """What is left now of the notice that is up; None where nobody says.

        0 or less: the time has come. By this machine's wall clock, which the clouds
        keep; any thread.
        """
        ...


@dataclasses.dataclass(eq=False, repr=False)
class Source:
    """A source that is started once, closed once, and outlives its listener's errors.

    A subclass says how to begin and how to end to watch, and calls `send`.

    Args:
        name: as it is called in logs and the journal.
    """

    name: str
    _on_notice: OnNotice | None = dataclasses.field(default=None, init=False)
    _is_closed: bool = dataclasses.field(default=False, init=False)

    def start(self, on_notice: OnNotice) -> None:
        """Starts to watch.

        Raises:
            NoticeError: the source cannot work here.
            UsageError: it was started or closed before.
        """
        if self._on_notice is not None or self._is_closed:
            state = "closed" if self._is_closed else "started"
            raise errors.UsageError(
                f"start() of the notice source {self.name!r}, which was already "
                f"{state}; a source is started once: make a new one"
            )
        self._on_notice = on_notice
        self._begin()

    def rearm(self) -> None:
        pass  # nothing disarms what is no signal

    def close(self) -> None:
        """Stops; nothing is reported from now on. Idempotent."""
        was_open = self._on_notice is not None and not self._is_closed
        self._is_closed = True
        if was_open:
            self._end()

    def send(self, detail: str) -> None:
        """Passes a notice on; says nothing when closed. Any thread, never raises."""
        if self._on_notice is None or self._is_closed:
            return
        try:
            self._on_notice(detail)
        except Exception:
            # The source must outlive its listener: others may share its thread.
            _logger.exception(
                "on_notice raised an error, given a notice of %s; watching goes on",
                self.name,
            )

    def _begin(self) -> None:
        """Begins to watch."""

    def _end(self) -> None:
        """Ends it, if it has begun."""
