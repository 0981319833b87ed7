"""One watcher, many sources, each with its own grace."""

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
from tfpreempt.core.threads import OwnedThread
from tfpreempt.notice.source import NoticeSource, TimedSource

_logger = logging.getLogger(__name__)

CLOSE_LIMIT_SECONDS = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class WatchedSource:
    """A source and the time that its notices leave.

    Attributes:
        source: a source that was not started yet.
        grace_seconds: seconds from its notice until the machine goes; None or 0 where
            nobody says: then the commit is made at once and sets no deadline. A notice
            that says a time of its own (`TimedSource`) can only shorten it.
    """

    source: NoticeSource
    grace_seconds: float | None = None

    def __post_init__(self) -> None:
        grace = self.grace_seconds
        if grace is not None and not is_seconds(grace):
            raise errors.ConfigurationError(
                f"grace_seconds={grace!r} for {self.source.name}: expected a finite "
                "number of seconds from 0 on, or None where it is not known"
            )

    def grace_now(self) -> float | None:
        """`grace_seconds`, or what is left by the notice's own time if that is less."""
        grace = self.grace_seconds
        if grace is None or not isinstance(self.source, TimedSource):
            return grace
        left = self.source.seconds_left()
        return grace if left is None else max(0.0, min(grace, left))


FindSources = Callable[[], Sequence[WatchedSource]]
"""Finds sources that were not started yet; may take seconds. Any thread."""


@dataclasses.dataclass(eq=False)
class Watcher:
    """Starts sources, and makes a notice of each report of a source.

    Args:
        sources: belong to the watcher from now on; more may be found later.
        worker: index of this worker, written into each notice.
        on_notice: called with each notice, one at a time, from a thread of the source.
            It returns quickly; an error is logged, and the sources live on.
        clock: time source.
        find_more: finds more sources, on a thread of the watcher's own; the found
            sources are started there. They are not signals, which only the main thread
            can watch. None: there are no more.

    Attributes:
        is_started: whether every source of the beginning listens.
    """

    sources: Sequence[WatchedSource]
    worker: int
    on_notice: Callable[[Notice], None]
    clock: Clock = dataclasses.field(default_factory=SystemClock)
    _: dataclasses.KW_ONLY
    find_more: FindSources | None = None
    is_started: bool = dataclasses.field(default=False, init=False)
    _started: list[NoticeSource] = dataclasses.field(default_factory=list)
    _closed: threading.Event = dataclasses.field(default_factory=threading.Event)
    # Held while on_notice runs, and while a found source starts. Both are re-entrant:
    # on_notice may close the watcher.
    _delivery: Any = dataclasses.field(default_factory=threading.RLock)
    _starting: Any = dataclasses.field(default_factory=threading.RLock)

    @property
    def shortest_grace(self) -> float | None:
        """The least seconds that a notice leaves; None where no source says."""
        known = [each.grace_seconds for each in self.sources if each.grace_seconds]
        return min(known, default=None)

    def start(self) -> None:
        """Starts every source, or none. Called once, on the main thread.

        Raises:
            UsageError: it was started or closed before.
            TfpreemptError: a source cannot work here; those before it were closed.
        """
        if self._started or self._closed.is_set():
            raise errors.UsageError(
                "start() of a watcher that was started or closed before; a watcher is "
                "started once: make a new one with new sources"
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
            OwnedThread("tfpreempt-find-sources", search).start()

    def _add_found(self, find: FindSources) -> None:
        for watched in find():
            with self._starting:
                if self._closed.is_set():
                    return
                try:
                    watched.source.start(functools.partial(self._receive, watched))
                except errors.TfpreemptError as error:
                    _logger.warning(
                        "tfpreempt: the notice source %s cannot be watched here (%s); "
                        "the other sources are watched",
                        watched.source.name,
                        error,
                    )
                    continue
                if self._closed.is_set():  # on_notice was called while it started
                    watched.source.close()
                    return
                self._started.append(watched.source)
            self.sources = (*self.sources, watched)

    def rearm(self) -> None:
        """Watches again after something may have disarmed signals. Main thread."""
        if not self._closed.is_set():
            for source in tuple(self._started):
                source.rearm()

    def close(self) -> None:
        """Stops every source; after it returns no notice is delivered. Idempotent.

        Waits at most 2 s for an on_notice that is running, and as long as each source
        takes, which has a limit of its own. A search of sources is not waited for, and
        starts no source any more. Main thread, so that signals are put back.
        """
        self._closed.set()
        self.is_started = False
        # The search itself is not joined: without an answer it would delay each close.
        if self._starting.acquire(timeout=CLOSE_LIMIT_SECONDS):
            self._starting.release()
        if self._delivery.acquire(timeout=CLOSE_LIMIT_SECONDS):
            self._delivery.release()
        else:
            _logger.warning(
                "on_notice has not returned within %.1f s of closing the watcher, "
                "which is closed without it",
                CLOSE_LIMIT_SECONDS,
            )
        while self._started:
            source = self._started.pop()
            try:
                source.close()
            except Exception:
                _logger.exception(
                    "closing the notice source %s failed; the others are closed",
                    source.name,
                )

    def _receive(self, watched: WatchedSource, detail: str) -> None:
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
                    "on_notice raised an error, given %s; watching goes on", notice
                )
