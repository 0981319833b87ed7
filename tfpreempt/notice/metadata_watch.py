"""Several notice sources that share one thread, which polls a metadata service."""

from __future__ import annotations

import dataclasses
import os
import random
import threading
from collections.abc import Iterable, Mapping
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
    """A notice that the metadata service shows at present.

    Attributes:
        detail: description of the notice, for messages.
        shutdown_at: time at which the machine will be terminated, in seconds since the
            Unix epoch; None if unknown.
        since: time at which the notice was given, in seconds since the Unix epoch; None
            if unknown.
    """

    detail: str
    shutdown_at: float | None = None
    since: float | None = None


def quick_retry_seconds(failures: int) -> float:
    """Returns the seconds to wait before the next poll after failed polls.

    The first pause is short, because a server may be unreachable for less than a
    second. Later pauses are at most 2 s, because a Spot preemption during an outage
    leaves only 30 s. The pauses are random, so that workers do not retry at the same
    time.

    Args:
        failures: number of consecutive failed polls, from 1 on.
    """
    return retry_seconds(failures, 0.1, 2.0) * _jitter.uniform(0.5, 1.0)


class WatchOptions(TypedDict, total=False):
    """Keyword arguments of every watch.

    Attributes:
        url: address of the service: host, host:port or http://host:port; by default the
            result of the cloud's `metadata_url()`.
        clock: time source.
        wait: function that waits between polls; tests pass the wait of a fake clock.
    """

    url: str | None
    clock: Clock
    wait: Wait


class MetadataWatch:
    """Watches several topics of a service with one thread; has a source for each topic.

    The thread runs from the start of the first source until the last source is closed;
    then the watch is over. If a topic has an active notice when a further source is
    started, the new source reports the notice at once.

    Subclasses define the name of the service, its topics and its address, and poll.

    Args:
        topics: the topics to watch; a string is a single topic.
        interval: seconds between two polls.
        url: address of the service, see `WatchOptions`.
        clock: time source.
        wait: function that waits between polls.

    Raises:
        ConfigurationError: there are no topics, a topic is unknown, the address is
            invalid, or the interval is not positive.

    Attributes:
        levels: for every topic reported so far, the active notice, or None.
    """

    name: ClassVar[str]
    """Name of the service, in thread names, source names and messages."""
    _known: ClassVar[Iterable[str]]
    """All topics of the service."""
    _argument: ClassVar[str] = "topics"
    """Name of the user's argument with the topics, for error messages."""

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
        self._session = MetadataSession(self.url)
        self._failures = {
            topic: FailureLog(f"{self.name}:{topic}") for topic in self.topics
        }
        self._lock = threading.Lock()
        self._sources: tuple[_TopicSource, ...] = ()
        self.levels: dict[str, ActiveNotice | None] = {}
        self._loop = PollingLoop(
            self.name,
            self.poll,
            retry=quick_retry_seconds,
            wait=wait,
            cut_off=self.close,
        )

    @staticmethod
    def _find_url(environment: Mapping[str, str]) -> str:
        """Returns the address of the service for a watch without the argument `url`."""
        raise NotImplementedError

    def poll(self) -> float:
        """Polls once, and reports every topic for which the service gave an answer.

        For any other topic, the last reported state stays valid.

        Returns:
            The seconds until the next poll.

        Raises:
            NoticeError: the poll failed.
        """
        raise NotImplementedError

    def failure(self, topic: str) -> str:
        """Returns the error of the last poll for a topic; "" if there was no error.

        Call it on the polling thread, or while no poll is running.
        """
        return self._failures[topic].text

    def close(self) -> None:
        """Ends a running `poll()`, and refuses later polls; callable on any thread."""
        self._session.close()

    def source(self, topic: str) -> NoticeSource:
        """Returns a new source of a topic.

        Raises:
            ConfigurationError: the watch does not watch the topic.
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
        """Returns a new source for every topic in `graces`, with its grace period.

        Args:
            graces: for every topic, the grace period in seconds; None if unknown.
        """
        return tuple(
            NoticeSourceConfig(self.source(name), graces[name]) for name in graces
        )

    def notice(self, topic: str) -> ActiveNotice | None:
        """Returns the active notice of a topic, or None."""
        return self.levels.get(topic)

    def join(self, source: _TopicSource) -> None:
        """Adds a source that is being started; the first source starts the thread."""
        with self._lock:
            if not self._sources:
                self._loop.start()
            self._sources = (*self._sources, source)
            notice = self.notice(source.topic)
        if notice is not None:
            source.send(notice.detail)

    def leave(self, source: _TopicSource) -> None:
        """Removes a source that is being closed; the last source ends the thread."""
        with self._lock:
            self._sources = tuple(each for each in self._sources if each is not source)
            is_over = not self._sources
        if is_over:
            self._loop.close()

    def report(self, topic: str, notice: ActiveNotice | None) -> None:
        """Keeps the state of a topic, and sends a new notice to the sources.

        Args:
            topic: the topic.
            notice: the active notice; None if there is none.
        """
        with self._lock:
            is_news = self.levels.get(topic) is None
            self.levels[topic] = notice
            sources = [each for each in self._sources if each.topic == topic]
        if notice is not None and is_news:
            for each in sources:
                each.send(notice.detail)


class _TopicSource(NoticeSourceBase):
    """The notice source of one topic of a watch."""

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
