"""Many sources over one thread, which asks one service for all of them."""

from __future__ import annotations

import dataclasses
import functools
import random
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TypedDict

from tfpreempt import errors
from tfpreempt.core.clock import Clock, SystemClock
from tfpreempt.notice.metadata import MetadataSession
from tfpreempt.notice.polling import (
    CLOSE_LIMIT_SECONDS,
    FailureLog,
    PollingLoop,
    Wait,
    retry_seconds,
    wait_event,
)
from tfpreempt.notice.source import NoticeSource, Source
from tfpreempt.notice.watcher import WatchedSource

FIRST_RETRY_SECONDS = 0.1
# A Spot preemption leaves 30 s: the first look after an outage must not be late too.
LONGEST_RETRY_SECONDS = 2.0

Jitter = Callable[[], float]
"""Returns a number from 0 to below 1."""


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


Report = Callable[[str, Told | None], None]
"""Takes a topic and its level: what is told while the notice is up, None while not."""


def quick_retry_seconds(failures: int, jitter: Jitter) -> float:
    """The pause after so many failures in a row (1 is the first).

    It begins short, because servers are away for less than a second at times, stays
    short, because a notice may come during an outage, and is spread, because all
    workers see the same server fail.
    """
    pause = min(retry_seconds(failures, FIRST_RETRY_SECONDS), LONGEST_RETRY_SECONDS)
    return pause * (0.5 + 0.5 * jitter())


class Poller:
    """Asks one service for all topics, from one thread.

    Args:
        session: its own, closed with it.
        name: of the service.
        topics: what it is asked for.
        interval: seconds after which a topic that failed alone is asked for again.
    """

    def __init__(
        self,
        session: MetadataSession,
        name: str,
        topics: Iterable[str],
        interval: float,
    ) -> None:
        self._session = session
        self._interval = interval
        self._failures = {
            topic: FailureLog(f"{name}:{topic}", lambda failures: interval)
            for topic in topics
        }

    def poll(self, report: Report) -> float:
        """Asks once, and reports each topic of which something is known now.

        A topic that is not reported keeps its level.

        Returns:
            The seconds until it is to be asked again.

        Raises:
            NoticeError: something could not be learned.
        """
        raise NotImplementedError

    def failure(self, topic: str) -> str:
        """Why the last `poll()`, which did not raise, did not learn this topic; or "".

        By the thread that asks, or once it has asked.
        """
        return self._failures[topic].text

    def close(self) -> None:
        """Ends a `poll()` that waits, at once. Any thread."""
        self._session.close()


class WatchOptions(TypedDict, total=False):
    """Keyword arguments of every watch.

    Attributes:
        clock: where times come from.
        wait: how to wait between requests; tests pass that of a fake clock.
        jitter: spreads the pauses after failures; returns 0 to below 1.
        close_limit: seconds for which the last `close()` waits for the thread.
    """

    clock: Clock
    wait: Wait
    jitter: Jitter
    close_limit: float


class TopicWatch:
    """Sources of several topics; their one thread lives from first start to last close.

    A source that starts while the thread runs hears at once of a notice that is up.
    When all are closed, new sources may be made and started.

    Args:
        name: of the service, for the thread and for messages.
        topics: what is watched; a single string counts as one topic.
        known: all topics that there are.
        argument: by what name it was given them, for the message.
        **options: see `WatchOptions`.

    Raises:
        ConfigurationError: there are no topics, or one is unknown.
    """

    def __init__(
        self,
        name: str,
        topics: Iterable[str],
        known: Iterable[str],
        *,
        argument: str = "topics",
        clock: Clock | None = None,
        wait: Wait = wait_event,
        jitter: Jitter = random.random,
        close_limit: float = CLOSE_LIMIT_SECONDS,
    ) -> None:
        chosen = tuple(dict.fromkeys([topics] if isinstance(topics, str) else topics))
        if not chosen or not {*chosen} <= {*known}:
            raise errors.ConfigurationError(
                f"{argument}={chosen!r} for {type(self).__name__}: expected some of "
                f"{sorted(known)}"
            )
        self.topics = chosen
        self.clock = SystemClock() if clock is None else clock
        self._name = name
        self._wait = wait
        self._jitter = jitter
        self._close_limit = close_limit
        self._lock = threading.Lock()
        self._members: tuple[_TopicSource, ...] = ()
        self._loop: PollingLoop | None = None
        self._levels: dict[str, Told | None] = {}  # of this thread; a new one's own

    def poller(self) -> Poller:
        """A new one; a thread has its own."""
        raise NotImplementedError

    def source(self, topic: str) -> NoticeSource:
        """A new source of one topic.

        Raises:
            ConfigurationError: it is not watched.
        """
        if topic not in self.topics:
            raise errors.ConfigurationError(
                f"topic {topic!r}: expected one of {sorted(self.topics)}, the topics "
                f"that this watch of {self._name} was made with"
            )
        return _TopicSource(self, topic, f"{self._name}:{topic}")

    def watched_sources(
        self, graces: Mapping[str, float | None]
    ) -> tuple[WatchedSource, ...]:
        """A new source of each topic, with the grace that its notices leave."""
        return tuple(WatchedSource(self.source(name), graces[name]) for name in graces)

    def join(self, member: _TopicSource) -> None:
        """A source was started. The first one starts the thread."""
        with self._lock:
            self._members = (*self._members, member)
            if self._loop is None:
                self._loop = self._new_loop()
                self._loop.start()
            told = member.told = self._levels.get(member.topic)
        if told is not None:
            member.send(told.detail)

    def leave(self, member: _TopicSource) -> None:
        """A source was closed. The last one ends the thread."""
        with self._lock:
            self._members = tuple(each for each in self._members if each is not member)
            if self._members or self._loop is None:
                return
            ended, self._loop, self._levels = self._loop, None, {}
        ended.close()

    def _new_loop(self) -> PollingLoop:
        poller = self.poller()
        report = functools.partial(self._report, self._levels)
        return PollingLoop(
            self._name,
            lambda: poller.poll(report),
            retry=lambda failures: quick_retry_seconds(failures, self._jitter),
            wait=self._wait,
            close_limit=self._close_limit,
            cut_off=poller.close,
        )

    def _report(
        self, levels: dict[str, Told | None], topic: str, told: Told | None
    ) -> None:
        with self._lock:
            if self._levels is not levels:
                return  # closed meanwhile
            levels[topic] = told
            members = [each for each in self._members if each.topic == topic]
            new = [each for each in members if each.told is None]
            for each in members:
                each.told = told
        if told is not None:
            for each in new:
                each.send(told.detail)


class _TopicSource(Source):
    """One topic's source."""

    def __init__(self, watch: TopicWatch, topic: str, name: str) -> None:
        super().__init__(name)
        self._watch = watch
        self.topic = topic
        self.told: Told | None = None  # while it is up; written under the watch's lock

    def seconds_left(self) -> float | None:
        told = self.told
        if told is None or told.goes_at is None:
            return None
        return told.goes_at - self._watch.clock.wall()

    def _begin(self) -> None:
        self._watch.join(self)

    def _end(self) -> None:
        self._watch.leave(self)
