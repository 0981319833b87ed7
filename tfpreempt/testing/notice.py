"""A source of notices that a test fires."""

from __future__ import annotations

from tfpreempt.notice.source import NoticeSourceBase


class ScriptedSource(NoticeSourceBase):
    """A `NoticeSource` without threads; `fire` reports a notice.

    Args:
        name: name of the source.
        start_error: error raised by `start()`, as by a source that cannot work on the
            machine.

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
        """Reports a notice now, in this thread.

        Does nothing before the start and after the close.

        Args:
            detail: text of the notice, for people.
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
