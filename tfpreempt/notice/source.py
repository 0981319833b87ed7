"""What every source of notices promises."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol, runtime_checkable

OnNotice = Callable[[str], None]
"""Called with a detail for people, from any thread of the source, never in a signal
handler. It returns quickly and does not raise."""


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """What a service says while a notice of it is up.

    Attributes:
        detail: for people.
        goes_at: when the machine goes, in seconds since the Unix epoch; None where the
            service does not say.
        since: when the service began to say so; None where it does not tell.
    """

    detail: str
    goes_at: float | None = None
    since: float | None = None


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
