"""Many sources over one thread that asks for all of them."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from tfpreempt import errors
from tfpreempt.core.clock import Clock, SystemClock
from tfpreempt.core.threads import OwnedThread
from tfpreempt.notice._faults import FaultLog
from tfpreempt.notice._outlet import Outlet
from tfpreempt.notice._polling import (
    CLOSE_LIMIT_SECONDS,
    Wait,
    retry_seconds,
    wait_event,
)
from tfpreempt.notice.source import NoticeSource, OnNotice, Told

_logger = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 0.1
# A Spot preemption leaves 30 s: the first look after an outage must not be late too.
LONGEST_RETRY_SECONDS = 2.0

Report = Callable[[str, Told | None], None]
"""Takes a topic and its level: what is told while the notice is up, None while not."""

Jitter = Callable[[], float]
"""Returns a number from 0 to below 1."""


class Asker(Protocol):
    """Asks one service for all topics, from one thread."""

    def ask(self, report: Report) -> float:
        """Asks once, and reports each topic of which something is known now.

        A topic that is not reported keeps its level.

        Returns:
            The seconds until it is to be asked again.

        Raises:
            NoticeError: something could not be learned.
        """
        ...

    def fault(self, topic: str) -> str:
        """Why the last `ask()`, which did not raise, did not learn this topic; or "".

        By the thread that asks, or once it has asked.
        """
        ...

    def close(self) -> None:
        """Ends an `ask()` that waits, at once. Any thread."""
        ...


def quick_retry_seconds(failures: int, jitter: Jitter) -> float:
    """The pause after so many failures in a row (1 is the first).

    It begins short, because servers are away for less than a second at times, stays
    short, because a notice may come during an outage, and is spread, because all
    workers see the same server fail.
    """
    pause = min(retry_seconds(failures, FIRST_RETRY_SECONDS), LONGEST_RETRY_SECONDS)
    return pause * (0.5 + 0.5 * jitter())


class SharedWatch:
    """Sources of several topics; their one thread lives from first start to last close.

    A source that starts while the thread runs hears at once of a notice that is up.
    When all are closed, new sources may be made and started.

    Args:
        name: of the service, for the thread and for messages.
        sources: the topics and the names of their sources.
        make_asker: called whenever a thread is started.
        clock: by which it is known what a notice leaves.
        wait: how to wait between two questions; tests pass that of a fake clock.
        jitter: spreads the pauses after failures.
        close_limit: seconds for which the last `close()` waits for the thread.
    """

    def __init__(
        self,
        name: str,
        sources: Mapping[str, str],
        make_asker: Callable[[], Asker],
        *,
        clock: Clock | None = None,
        wait: Wait = wait_event,
        jitter: Jitter = random.random,
        close_limit: float = CLOSE_LIMIT_SECONDS,
    ) -> None:
        self.clock = SystemClock() if clock is None else clock
        self._name = name
        self._sources = dict(sources)
        self._make_asker = make_asker
        self._wait = wait
        self._jitter = jitter
        self._close_limit = close_limit
        self._lock = threading.Lock()
        self._members: tuple[_TopicSource, ...] = ()
        self._round: _Round | None = None

    def source(self, topic: str) -> NoticeSource:
        """A new source of one topic.

        Raises:
            ConfigurationError: it is not watched.
        """
        if topic not in self._sources:
            raise errors.ConfigurationError(
                f"topic {topic!r}: expected one of {sorted(self._sources)}, the topics "
                f"that this watch of {self._name} was made with"
            )
        return _TopicSource(self, topic, self._sources[topic])

    def join(self, member: _TopicSource) -> None:
        """A source was started."""
        with self._lock:
            self._members = (*self._members, member)
            if self._round is None:
                self._round = _Round(self._make_asker())
                self._round.thread = OwnedThread(
                    f"tfpreempt-{self._name}", self._round_target(self._round)
                )
                self._round.thread.start()
            told = member.told = self._round.levels.get(member.topic)
        if told is not None:
            member.outlet.send(told.detail)

    def leave(self, member: _TopicSource) -> None:
        """A source was closed. The last one ends the thread."""
        with self._lock:
            self._members = tuple(each for each in self._members if each is not member)
            if self._members or self._round is None:
                return
            ended, self._round = self._round, None
        ended.end(self._name, self._close_limit)

    def _round_target(self, current: _Round) -> Callable[[], None]:
        faults = FaultLog(
            self._name, lambda failures: quick_retry_seconds(failures, self._jitter)
        )

        def report(topic: str, told: Told | None) -> None:
            self._report(current, topic, told)

        def run() -> None:
            stop = current.thread.stop_event
            while not stop.is_set():
                try:
                    pause = current.asker.ask(report)
                except BaseException as error:  # noqa: BLE001 - nothing may end it
                    if stop.is_set():
                        return  # close() has cut the request off
                    pause = faults.note_failure(error)
                else:
                    faults.note_success()
                if self._wait(stop, pause):
                    return

        return run

    def _report(self, current: _Round, topic: str, told: Told | None) -> None:
        with self._lock:
            if self._round is not current:
                return  # closed meanwhile
            current.levels[topic] = told
            members = [each for each in self._members if each.topic == topic]
            new = [each for each in members if each.told is None]
            for each in members:
                each.told = told
        if told is not None:
            for each in new:
                each.outlet.send(told.detail)


class _Round:
    """What lives as long as one thread."""

    thread: OwnedThread

    def __init__(self, asker: Asker) -> None:
        self.asker = asker
        self.levels: dict[str, Told | None] = {}

    def end(self, name: str, limit: float) -> None:
        self.thread.stop()
        self.asker.close()
        if not self.thread.end(limit):
            _logger.warning(
                "%s: its request has not ended within %.1f s of closing; its daemon "
                "thread is left behind and nothing that it finds will be reported",
                name,
                limit,
            )


class _TopicSource:
    """One topic's source."""

    def __init__(self, watch: SharedWatch, topic: str, name: str) -> None:
        self._watch = watch
        self._name = name
        self.topic = topic
        self.outlet = Outlet(name)
        self.told: Told | None = None  # while it is up; written under the watch's lock

    @property
    def name(self) -> str:
        return self._name

    def start(self, on_notice: OnNotice) -> None:
        self.outlet.open(on_notice)
        self._watch.join(self)

    def seconds_left(self) -> float | None:
        told = self.told
        if told is None or told.goes_at is None:
            return None
        return told.goes_at - self._watch.clock.wall()

    def rearm(self) -> None:
        pass  # nothing can disarm a request

    def close(self) -> None:
        if self.outlet.close():
            self._watch.leave(self)


def checked_topics(
    topics: Iterable[str],
    known: Iterable[str],
    owner: str,
    *,
    argument: str = "topics",
) -> tuple[str, ...]:
    """The topics, each once, in the order given.

    Args:
        topics: the argument's value; a single string counts as one topic.
        known: all that there are.
        owner: who was given them, for the message.
        argument: by what name.

    Raises:
        ConfigurationError: there are none, or one is unknown.
    """
    chosen = tuple(dict.fromkeys([topics] if isinstance(topics, str) else topics))
    unknown = [name for name in chosen if name not in set(known)]
    if unknown or not chosen:
        raise errors.ConfigurationError(
            f"{argument}={chosen!r} for {owner}: expected some of {sorted(known)}"
        )
    return chosen
