"""Many sources over one thread, which asks one service for all of them."""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, TypedDict

from tfpreempt import errors
from tfpreempt.core.arguments import check_seconds
from tfpreempt.core.clock import Clock, SystemClock
from tfpreempt.notice.metadata import MetadataSession, checked_base_url
from tfpreempt.notice.polling import FailureLog, PollingLoop, Wait, retry_seconds
from tfpreempt.notice.source import NoticeSource, Source
from tfpreempt.notice.watcher import WatchedSource

# Of its own: a failure must not draw from the program's generator, which is restored.
_jitter = random.Random()


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


_Levels = dict[str, Told | None]

Report = Callable[[str, Told | None], None]
"""Takes a topic and its level: what is told while the notice is up, None while not."""


def quick_retry_seconds(failures: int) -> float:
    """The pause after so many failures in a row (1 is the first).

    It begins short, because servers are away for less than a second at times, stays
    short, because a Spot preemption that comes during an outage leaves 30 s, and is
    spread, because all workers see the same server fail.
    """
    return retry_seconds(failures, 0.1, 2.0) * _jitter.uniform(0.5, 1.0)


class Poller:
    """Asks one service for all topics of a watch, from one thread.

    Args:
        watch: says where to ask for what.
    """

    def __init__(self, watch: TopicWatch) -> None:
        self._session = MetadataSession(watch.url)
        self._clock = watch.clock
        self._interval = watch.interval
        self._failures = {
            topic: FailureLog(f"{watch.name}:{topic}") for topic in watch.topics
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
        url: host, host:port or http://host:port of the service; by default from the
            environment, see the cloud's `metadata_url()`.
        clock: where times come from.
        wait: how to wait between requests; tests pass that of a fake clock.
    """

    url: str | None
    clock: Clock
    wait: Wait


class TopicWatch:
    """Sources of several topics; their one thread lives from first start to last close.

    A source that starts while the thread runs hears at once of a notice that is up.
    When all are closed, new sources may be made and started.

    A subclass names its service, all topics of the service, and where the service is.

    Args:
        topics: the topics to watch; a single string counts as one topic.
        interval: seconds between two requests.
        url: see `WatchOptions`, as are `clock` and `wait`.

    Raises:
        ConfigurationError: there are no topics, one is unknown, the address is none, or
            the interval is not positive.
    """

    name: ClassVar[str]
    """The service, as threads and messages name the service."""
    _known: ClassVar[Iterable[str]]
    """All topics of the service."""
    _argument: ClassVar[str] = "topics"
    """The name of the argument that has the topics."""

    def __init__(
        self,
        topics: Iterable[str],
        interval: float,
        *,
        url: str | None = None,
        clock: Clock | None = None,
        wait: Wait = threading.Event.wait,
    ) -> None:
        kind = type(self).__name__
        chosen = tuple(dict.fromkeys([topics] if isinstance(topics, str) else topics))
        if not chosen or not {*chosen} <= {*self._known}:
            raise errors.ConfigurationError(
                f"{self._argument}={chosen!r} for {kind}: expected some of "
                f"{sorted(self._known)}"
            )
        self.topics = chosen
        if url is None:
            self.url = self._find_url(os.environ)
        else:
            self.url = checked_base_url(url, "url")
        self.interval = check_seconds(f"the interval of {kind}", interval)
        self.clock = SystemClock() if clock is None else clock
        self._wait = wait
        self._lock = threading.Lock()
        self._members: tuple[_TopicSource, ...] = ()
        self._loop: PollingLoop | None = None
        self._levels: _Levels = {}  # of this thread; a new one's own

    @staticmethod
    def _find_url(environment: Mapping[str, str]) -> str:
        """Returns where the service is, if `url` does not say."""
        raise NotImplementedError

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
                f"that this watch of {self.name} was made with"
            )
        return _TopicSource(self, topic)

    def watched_sources(
        self, graces: Mapping[str, float | None]
    ) -> tuple[WatchedSource, ...]:
        """A new source of each topic, with the grace that its notices leave."""
        return tuple(WatchedSource(self.source(name), graces[name]) for name in graces)

    def told(self, topic: str) -> Told | None:
        """What is up now."""
        return self._levels.get(topic)

    def join(self, member: _TopicSource) -> None:
        """A source was started. The first one starts the thread."""
        with self._lock:
            self._members = (*self._members, member)
            if self._loop is None:
                poller = self.poller()
                report = functools.partial(self._report, self._levels)
                self._loop = PollingLoop(
                    self.name,
                    lambda: poller.poll(report),
                    retry=quick_retry_seconds,
                    wait=self._wait,
                    cut_off=poller.close,
                )
                self._loop.start()
            told = self.told(member.topic)
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

    def _report(self, levels: _Levels, topic: str, told: Told | None) -> None:
        with self._lock:
            if self._levels is not levels:
                return  # closed meanwhile
            is_news = levels.get(topic) is None
            levels[topic] = told
            members = [each for each in self._members if each.topic == topic]
        if told is not None and is_news:
            for each in members:
                each.send(told.detail)


class _TopicSource(Source):
    """One topic's source."""

    def __init__(self, watch: TopicWatch, topic: str) -> None:
        super().__init__(f"{watch.name}:{topic}")
        self._watch = watch
        self.topic = topic

    def seconds_left(self) -> float | None:
        told = self._watch.told(self.topic)
        if told is None or told.goes_at is None:
            return None
        return told.goes_at - self._watch.clock.wall()

    def _begin(self) -> None:
        self._watch.join(self)

    def _end(self) -> None:
        self._watch.leave(self)
