"""Several sources with a common thread, polling a metadata service."""

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
from tfpreempt.notice.metadata_session import MetadataSession, checked_base_url
from tfpreempt.notice.polling import FailureLog, PollingLoop, Wait, retry_seconds
from tfpreempt.notice.source import NoticeSource, NoticeSourceBase
from tfpreempt.notice.watcher import NoticeSourceConfig

# Use a separate generator: retries must not change the state of the program's
# generator, which is saved and restored.
_jitter = random.Random()


@dataclasses.dataclass(frozen=True, slots=True)
class ActiveNotice:
    """A notice that a service reports now.

    Attributes:
        detail: description, as text for messages.
        shutdown_at: time when the machine will be terminated, in seconds since the Unix
            epoch; None if unknown.
        since: time when the notice was given; None if unknown.
    """

    detail: str
    shutdown_at: float | None = None
    since: float | None = None


_Levels = dict[str, ActiveNotice | None]

Report = Callable[[str, ActiveNotice | None], None]
"""Takes a topic and the active notice, or None while no notice is active."""


def quick_retry_seconds(failures: int) -> float:
    """Returns the pause before the next attempt; `failures` counts from 1.

    The first pause is short, because servers may be unreachable for less than a second.
    Later pauses are at most 2 s, because a Spot preemption during an outage leaves only
    30 s. The pauses are random, so that workers do not retry at the same time.
    """
    return retry_seconds(failures, 0.1, 2.0) * _jitter.uniform(0.5, 1.0)


class Poller:
    """Polls a service for all topics of a watch. Used by one thread.

    Args:
        watch: the watch with the address and the topics.
    """

    def __init__(self, watch: MetadataWatch) -> None:
        self._session = MetadataSession(watch.url)
        self._clock = watch.clock
        self._interval = watch.interval
        self._failures = {
            topic: FailureLog(f"{watch.name}:{topic}") for topic in watch.topics
        }

    def poll(self, report: Report) -> float:
        """Polls once, and reports the state of every topic that it has found out.

        The state of other topics is unchanged.

        Args:
            report: function called with a topic and its notice; with None, if there is
                no notice.

        Returns:
            The seconds until the next poll.

        Raises:
            NoticeError: the poll failed.
        """
        raise NotImplementedError

    def failure(self, topic: str) -> str:
        """Returns why the last `poll()` has not found out the state of a topic; or "".

        Called on the thread that polls, or after a poll has ended.
        """
        return self._failures[topic].text

    def close(self) -> None:
        """Ends a waiting `poll()`. For any thread."""
        self._session.close()


class WatchOptions(TypedDict, total=False):
    """Keyword arguments of every watch.

    Attributes:
        url: address of the service: host, host:port or http://host:port. By default it
            is taken from the environment; see `metadata_url()` of the cloud.
        clock: time source.
        wait: function waiting between requests; tests pass the wait of a fake clock.
    """

    url: str | None
    clock: Clock
    wait: Wait


class MetadataWatch:
    """Watches several topics of a service with one thread; every topic is a source.

    The thread runs from the start of the first source until the last source is closed.
    If a notice is active when a further source is started, this source reports it at
    once. After all sources are closed, new sources may be made and started.

    Subclasses define the name of the service, its topics and its address.

    Args:
        topics: the topics to watch; a string is a single topic.
        interval: seconds between two polls.
        url: address of the service, see `WatchOptions`.
        clock: time source, see `WatchOptions`.
        wait: waiting function, see `WatchOptions`.

    Raises:
        ConfigurationError: there are no topics, a topic is unknown, the address is
            invalid, or the interval is not positive.
    """

    name: ClassVar[str]
    """Name of the service in thread names and messages."""
    _known: ClassVar[Iterable[str]]
    """All topics of the service."""
    _argument: ClassVar[str] = "topics"
    """Name of the argument for the topics, for errors."""

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
                f"{self._argument}={chosen!r} of the service {self.name!r}: expected "
                f"some of {sorted(self._known)}"
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
        self._sources: tuple[_TopicSource, ...] = ()
        self._loop: PollingLoop | None = None
        # The active notice of each topic. Each thread gets a new dict, so that a late
        # report of an ended thread can be ignored.
        self._levels: _Levels = {}

    @staticmethod
    def _find_url(environment: Mapping[str, str]) -> str:
        """Returns the address of the service, if no `url` was given."""
        raise NotImplementedError

    def poller(self) -> Poller:
        """Returns a new poller, for a new thread."""
        raise NotImplementedError

    def source(self, topic: str) -> NoticeSource:
        """Returns a new source of a topic.

        Raises:
            ConfigurationError: the watch does not have the topic.
        """
        if topic not in self.topics:
            raise errors.ConfigurationError(
                f"topic {topic!r}: expected one of {sorted(self.topics)}, the watched "
                f"topics of the service {self.name!r}"
            )
        return _TopicSource(self, topic)

    def watched_sources(
        self, graces: Mapping[str, float | None]
    ) -> tuple[NoticeSourceConfig, ...]:
        """Returns a new source for every topic.

        Args:
            graces: grace period in seconds of every topic; None if unknown.
        """
        return tuple(
            NoticeSourceConfig(self.source(name), graces[name]) for name in graces
        )

    def notice(self, topic: str) -> ActiveNotice | None:
        """Returns the active notice of a topic, or None."""
        return self._levels.get(topic)

    def join(self, source: _TopicSource) -> None:
        """Adds a started source. The first source starts the thread."""
        with self._lock:
            self._sources = (*self._sources, source)
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
            notice = self.notice(source.topic)
        if notice is not None:
            source.send(notice.detail)

    def leave(self, source: _TopicSource) -> None:
        """Removes a closed source. The last source ends the thread."""
        with self._lock:
            self._sources = tuple(each for each in self._sources if each is not source)
            if self._sources or self._loop is None:
                return
            ended, self._loop, self._levels = self._loop, None, {}
        ended.close()

    def _report(self, levels: _Levels, topic: str, notice: ActiveNotice | None) -> None:
        with self._lock:
            if self._levels is not levels:
                return  # all sources of this thread were closed
            is_news = levels.get(topic) is None
            levels[topic] = notice
            sources = [each for each in self._sources if each.topic == topic]
        if notice is not None and is_news:
            for each in sources:
                each.send(notice.detail)


class _TopicSource(NoticeSourceBase):
    """Source of one topic."""

    def __init__(self, watch: MetadataWatch, topic: str) -> None:
        super().__init__(f"{watch.name}:{topic}")
        self._watch = watch
        self.topic = topic

    def seconds_left(self) -> float | None:
        notice = self._watch.notice(self.topic)
        if notice is None or notice.shutdown_at is None:
            return None
        return notice.shutdown_at - self._watch.clock.wall()

    def _begin(self) -> None:
        self._watch.join(self)

    def _end(self) -> None:
        self._watch.leave(self)
