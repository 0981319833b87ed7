"""Starts and stops the sources of notices, each with its own grace period."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tfpreempt import errors
from tfpreempt.core.arguments import is_seconds
from tfpreempt.core.clock import Clock, SystemClock
from tfpreempt.core.events import Notice
from tfpreempt.core.threads import ManagedThread
from tfpreempt.notice.source import NoticeSource, TimedSource

_logger = logging.getLogger(__name__)

CLOSE_LIMIT_SECONDS = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class NoticeSourceConfig:
    """A source of notices, and its grace period.

    Attributes:
        source: a source that has not been started.
        grace_seconds: seconds from a notice until the machine is terminated. None or 0:
            unknown, so the commit is made at once, without a deadline. If the source
            knows the time of the termination (a `TimedSource`), and less time remains,
            the remaining time is used.
    """

    source: NoticeSource
    grace_seconds: float | None = None

    def __post_init__(self) -> None:
        grace = self.grace_seconds
        if grace is not None and not is_seconds(grace):
            raise errors.ConfigurationError(
                f"grace_seconds={grace!r} for {self.source.name}: expected a finite "
                "number of seconds from 0 on, or None if unknown"
            )

    def grace_now(self) -> float | None:
        """Returns the smaller of `grace_seconds` and the seconds the source reports."""
        grace = self.grace_seconds
        if grace is None or not isinstance(self.source, TimedSource):
            return grace
        left = self.source.seconds_left()
        return grace if left is None else max(0.0, min(grace, left))


FindSources = Callable[[], Sequence[NoticeSourceConfig]]
"""Function that finds further sources, and returns them without starting them. It may
take seconds, and may be called on any thread."""


@dataclasses.dataclass(eq=False)
class Watcher:
    """Starts notice sources, and calls a function with every `Notice` that they report.

    Args:
        sources: sources to start; the watcher closes them. Sources found by `find_more`
            are added.
        worker: index of this worker, written into every notice.
        on_notice: function called with every notice, on a thread of the source, for one
            notice at a time. It returns quickly; its errors are logged.
        clock: time source.
        find_more: function that finds further sources, such as those of a metadata
            server. A background thread calls the function and starts the sources, so
            they must not be signals, which only the main thread can watch. None: there
            are no further sources.

    Attributes:
        is_started: whether all initial sources have been started.
    """

    sources: Sequence[NoticeSourceConfig]
    worker: int
    on_notice: Callable[[Notice], None]
    clock: Clock = dataclasses.field(default_factory=SystemClock)
    _: dataclasses.KW_ONLY
    find_more: FindSources | None = None
    is_started: bool = dataclasses.field(default=False, init=False)
    _started: list[NoticeSource] = dataclasses.field(default_factory=list)
    _closed: threading.Event = dataclasses.field(default_factory=threading.Event)
    # Locks: _delivery is held while on_notice runs, _starting while a source found by
    # find_more is started. Re-entrant, because on_notice may close the watcher.
    _delivery: Any = dataclasses.field(default_factory=threading.RLock)
    _starting: Any = dataclasses.field(default_factory=threading.RLock)

    @property
    def shortest_grace(self) -> float | None:
        """Shortest grace period of all sources, in seconds; None if all are unknown."""
        known = [each.grace_seconds for each in self.sources if each.grace_seconds]
        return min(known, default=None)

    def start(self) -> None:
        """Starts every source; call it once, on the main thread.

        Raises:
            UsageError: the watcher was started or closed before.
            TfpreemptError: a source cannot work on this machine. The sources that were
                started before are closed.
        """
        if self._started or self._closed.is_set():
            raise errors.UsageError(
                "start() was called on a watcher that was started or closed before; a "
                "watcher can be started once: make a new watcher with new sources"
            )
        try:
            for watched in self.sources:
                watched.source.start(functools.partial(self._receive, watched))
                self._started.append(watched.source)
        except BaseException:
            self.close()
            raise
        self.is_started = True
        if self.find_more is not None:
            search = functools.partial(self._add_found, self.find_more)
            ManagedThread("tfpreempt-find-sources", search).start()

    def _add_found(self, find: FindSources) -> None:
        for watched in find():
            with self._starting:
                if self._closed.is_set():
                    return
                try:
                    watched.source.start(functools.partial(self._receive, watched))
                except errors.TfpreemptError as error:
                    _logger.warning(
                        "the notice source %s cannot be watched here (%s); "
                        "the other sources are watched",
                        watched.source.name,
                        error,
                    )
                    continue
                # Check again: on_notice may have closed the watcher during the start.
                if self._closed.is_set():
                    watched.source.close()
                    return
                self._started.append(watched.source)
            self.sources = (*self.sources, watched)

    def rearm(self) -> None:
        """Calls `rearm` of every source, as other code may replace signal handlers."""
        if not self._closed.is_set():
            for source in tuple(self._started):
                source.rearm()

    def close(self) -> None:
        """Stops every source; `on_notice` is not called after the close.

        Call the method on the main thread, so that signal handlers can be restored. A
        second call does nothing. The method waits for every source's `close`, at most
        2 s for a source that the background thread is starting, and at most 2 s for a
        running `on_notice`. It does not wait for a running `find_more`; sources that
        `find_more` finds after `close` are not started.
        """
        self._closed.set()
        self.is_started = False
        # Do not wait for the search: a server that does not answer would delay the
        # close.
        if self._starting.acquire(timeout=CLOSE_LIMIT_SECONDS):
            self._starting.release()
        if self._delivery.acquire(timeout=CLOSE_LIMIT_SECONDS):
            self._delivery.release()
        else:
            _logger.warning(
                "on_notice has not returned within %.1f s; the watcher is closed "
                "without waiting longer",
                CLOSE_LIMIT_SECONDS,
            )
        while self._started:
            source = self._started.pop()
            try:
                source.close()
            except Exception:
                _logger.warning(
                    "the notice source %s could not be closed; the other sources are "
                    "closed",
                    source.name,
                    exc_info=True,
                )

    def _receive(self, watched: NoticeSourceConfig, detail: str) -> None:
        notice = Notice(
            source=watched.source.name,
            worker=self.worker,
            grace_seconds=watched.grace_now(),
            received_at=self.clock.monotonic(),
            detail=detail,
        )
        with self._delivery:
            if self._closed.is_set():
                return
            try:
                self.on_notice(notice)
            except Exception:
                _logger.exception(
                    "on_notice raised an error for %s; the sources continue",
                    notice,
                )
