"""The interface of a source of notices, and a base class for sources."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from tfpreempt import errors

_logger = logging.getLogger(__name__)

OnNotice = Callable[[str], None]
"""Function that a source calls with a description of the notice. The source may call it
on any thread, but not in a signal handler. It returns quickly and raises no error."""


class NoticeSource(Protocol):
    """A source of preemption notices, such as a signal or a metadata server.

    A source reports a notice once, when the notice becomes active. If the notice is
    withdrawn and becomes active again, the source reports it again. If a poll fails,
    the source logs the failure once, and polls again after longer and longer pauses.
    """

    @property
    def name(self) -> str:
        """Stable name for logs and the journal, such as "signal:SIGTERM"."""
        ...

    def start(self, on_notice: OnNotice) -> None:
        """Starts to watch. Called once, on the main thread.

        Args:
            on_notice: function that the source calls at every notice, with a
                description of the notice. The source may call it on any thread, but not
                in a signal handler. The function returns quickly and raises no errors.

        Raises:
            NoticeError: the source cannot work on this machine.
        """
        ...

    def rearm(self) -> None:
        """Restores what other code may have replaced, such as a signal handler.

        Called on the main thread, at the first `run()` and at the beginning of each
        watch scope. Only signal sources need the method; in other sources the method
        may do nothing.
        """
        ...

    def close(self) -> None:
        """Stops watching, ends the threads, and restores what `start` has changed."""
        ...


@runtime_checkable
class TimedSource(NoticeSource, Protocol):
    """A source that may know the time when the machine will be terminated."""

    def seconds_left(self) -> float | None:
        """Returns the seconds until the termination that the active notice announces.

        Returns None if there is no notice, or if its time is unknown. The value may be
        0 or negative. It is computed with the wall clock of the machine, which the
        cloud synchronizes. Any thread may call the method.
        """
        ...


@dataclasses.dataclass(eq=False, repr=False)
class NoticeSourceBase:
    """Base class of sources, which can be started once.

    A subclass implements `_begin` and `_end`, and calls `send` for every notice.

    Args:
        name: name of the source in logs and the journal.
    """

    name: str
    _on_notice: OnNotice | None = dataclasses.field(default=None, init=False)
    _is_closed: bool = dataclasses.field(default=False, init=False)

    def start(self, on_notice: OnNotice) -> None:
        """Starts watching.

        Args:
            on_notice: function that the source calls, see `NoticeSource.start`.

        Raises:
            NoticeError: the source cannot work on this machine.
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
        # Other code can replace only signal handlers, so there is nothing to restore.
        pass

    def close(self) -> None:
        """Stops watching: a closed source reports no notice. May be called again."""
        was_open = self._on_notice is not None and not self._is_closed
        self._is_closed = True
        if was_open:
            self._end()

    def send(self, detail: str) -> None:
        """Reports a notice, unless the source is closed; logs an error of `on_notice`.

        Any thread may call the method.

        Args:
            detail: description of the notice.
        """
        if self._on_notice is None or self._is_closed:
            return
        try:
            self._on_notice(detail)
        except Exception:
            # Continue after an error of the listener: other sources may share the
            # thread.
            _logger.exception(
                "on_notice raised an error for a notice of %s; the source continues",
                self.name,
            )

    def _begin(self) -> None:
        """Starts watching."""

    def _end(self) -> None:
        """Stops watching. Called only after `_begin`."""
