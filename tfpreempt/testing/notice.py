"""A source of notices that says what a test tells it to say."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tfpreempt.notice.source import Source
from tfpreempt.testing.clock import FakeClock


class ScriptedSource(Source):
    """A `NoticeSource` without threads: it speaks when fired, or at scripted times.

    Args:
        name: its name.
        at: times, in monotonic seconds of the clock, and what is said then; those that
            lie before `start()` are not said.
        clock: needed for `at`; the notice comes in the thread that advances it.
        start_error: raised by `start()`, as by a source that cannot work here.

    Attributes:
        rearmed: number of calls of `rearm()`.
        is_started: whether `start()` has succeeded.
        is_closed: whether `close()` was called.

    Raises:
        ValueError: `at` without a clock.
    """

    def __init__(
        self,
        name: str = "scripted",
        at: Sequence[tuple[float, str]] = (),
        clock: FakeClock | None = None,
        *,
        start_error: Exception | None = None,
    ) -> None:
        if at and clock is None:
            raise ValueError("at= needs a clock= whose times these are")
        super().__init__(name)
        self._at = tuple(at)
        self._clock = clock
        self._start_error = start_error
        self.rearmed = 0
        self.is_started = False
        self.is_closed = False

    def _begin(self) -> None:
        if self._start_error is not None:
            raise self._start_error
        self.is_started = True
        if self._clock is not None:
            now = self._clock.monotonic()
            for when, detail in self._at:
                if when >= now:
                    self._clock.call_at(when, functools.partial(self.fire, detail))

    def fire(self, detail: str = "") -> None:
        """Reports a notice now, in this thread; nothing when not started or closed."""
        self.send(detail)

    def rearm(self) -> None:
        self.rearmed += 1

    def close(self) -> None:
        super().close()
        self.is_closed = True
