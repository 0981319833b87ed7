"""A source of notices that says what a test tells it to say."""

from __future__ import annotations

from tfpreempt.notice.source import Source


class ScriptedSource(Source):
    """A `NoticeSource` without threads: it speaks when fired.

    Args:
        name: its name.
        start_error: raised by `start()`, as by a source that cannot work here.

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
        """Reports a notice now, in this thread; nothing when not started or closed."""
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
