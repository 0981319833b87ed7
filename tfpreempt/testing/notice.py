"""A notice source that a test controls."""

from __future__ import annotations

from tfpreempt.notice.source import NoticeSourceBase


class ScriptedSource(NoticeSourceBase):
    """A `NoticeSource` for tests, without threads: it reports a notice when `fire` is
    called.

    Args:
        name: name of the source.
        start_error: error that `start()` raises, to simulate a source that cannot work
            on this machine.

    Attributes:
        rearmed: number of calls of `rearm()`.
        is_started: whether `start()` has succeeded.
        is_closed: whether `close()` was called.
    """

    def __init__(
        self, name: str = "scripted", *, start_error: Exception | None = None
    ) -> None:
        super().__init__(name)
        self._start_error = start_error
        self.rearmed = 0
        self.is_started = False
        self.is_closed = False

    def fire(self, detail: str = "") -> None:
        """Reports a notice, on the calling thread.

        Does nothing if the source is not started, or is closed.

        Args:
            detail: description of the notice.
        """
        self.send(detail)

    def rearm(self) -> None:
        self.rearmed += 1

    def close(self) -> None:
        super().close()
        self.is_closed = True

    def _begin(self) -> None:
        if self._start_error is not None:
            raise self._start_error
        self.is_started = True
