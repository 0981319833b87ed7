"""Many sources on one thread: recipients of notices, and lifetime of the thread."""

from __future__ import annotations

import logging
import queue
import random
import threading

import pytest

from tests.fakes.clock import FakeClock
from tests.notice.rigs import wait_until
from tfpreempt import errors
from tfpreempt.notice import polling
from tfpreempt.notice.metadata_watch import (
    ActiveNotice,
    MetadataWatch,
    quick_retry_seconds,
)
from tfpreempt.notice.source import TimedSource

GOES_AT = 1_700_000_100.0
Levels = dict[str, str | None]


class Watch(MetadataWatch):
    """Answers each poll with the next answer of the test."""

    name = "shared"
    _known = ("a", "b")

    def __init__(self, clock: FakeClock | None = None) -> None:
        super().__init__(
            self._known,
            1.0,
            url="http://nobody",
            clock=clock,
            wait=lambda stop, seconds: stop.wait(min(seconds, 0.001)),
        )
        self.script: queue.Queue[Levels | BaseException | None] = queue.Queue()
        self.asked = 0
        self.closed = 0

    def poll(self) -> float:
        self.asked += 1
        said = self.script.get(timeout=10.0)
        if said is None:
            raise errors.NoticeError("cut off")
        if isinstance(said, BaseException):
            raise said
        for topic, detail in said.items():
            self.report(
                topic, None if detail is None else ActiveNotice(detail, GOES_AT)
            )
        return 0.0

    def close(self) -> None:
        self.closed += 1
        self.script.put(None)


class Bench:
    def __init__(self) -> None:
        self.heard: list[str] = []
        self.clock = FakeClock(wall=GOES_AT - 100.0)
        self.watch = Watch(self.clock)

    def say(self, said: Levels | BaseException) -> None:
        """Answers a question, and returns when the next one is asked."""
        watch = self.watch
        assert wait_until(lambda: watch.asked > 0)
        before = watch.asked
        watch.script.put(said)
        assert wait_until(lambda: watch.asked > before)


def threads() -> int:
    return [each.name for each in threading.enumerate()].count("tfpreempt-shared")


def test_each_source_hears_its_own_topic_once() -> None:
    bench = Bench()
    first, second = bench.watch.source("a"), bench.watch.source("b")
    first.start(lambda detail: bench.heard.append(f"a {detail}"))
    second.start(lambda detail: bench.heard.append(f"b {detail}"))
    for said in [{"a": None}, {"a": "1"}, {"a": "2", "b": ""}, {"b": None}, {"b": "3"}]:
        bench.say(said)
    assert bench.heard == ["a 1", "b ", "b 3"]
    assert (first.name, second.name) == ("shared:a", "shared:b")
    first.close()
    second.close()


def test_the_thread_lives_from_the_first_start_to_the_last_close() -> None:
    for _ in range(2):
        bench = Bench()
        first, second = bench.watch.source("a"), bench.watch.source("b")
        assert threads() == 0
        first.start(bench.heard.append)
        second.start(bench.heard.append)
        assert threads() == 1
        first.close()
        assert threads() == 1
        second.close()
        assert threads() == 0
        assert bench.watch.closed == 1


def test_a_late_source_gets_the_active_notice_and_a_closed_one_none() -> None:
    bench = Bench()
    first, late = bench.watch.source("a"), bench.watch.source("a")
    first.start(lambda detail: bench.heard.append(f"first {detail}"))
    bench.say({"a": "up"})
    late.start(lambda detail: bench.heard.append(f"late {detail}"))
    assert bench.heard == ["first up", "late up"]
    first.close()
    bench.say({"a": None})
    bench.say({"a": "again"})
    assert bench.heard == ["first up", "late up", "late again"]
    late.close()


def test_a_source_knows_the_time_left_of_its_notice() -> None:
    bench = Bench()
    source, quiet = bench.watch.source("a"), bench.watch.source("b")
    assert isinstance(source, TimedSource)
    assert isinstance(quiet, TimedSource)
    left: list[float | None] = []
    source.start(lambda detail: left.append(source.seconds_left()))
    quiet.start(bench.heard.append)
    bench.say({"a": "up", "b": None})
    assert left == [100.0]
    bench.clock.advance(130.0)
    assert (source.seconds_left(), quiet.seconds_left()) == (-30.0, None)
    late = bench.watch.source("a")
    assert isinstance(late, TimedSource)
    late.start(lambda detail: left.append(late.seconds_left()))
    assert left == [100.0, -30.0]
    bench.say({"a": None})
    assert source.seconds_left() is None
    for each in (source, quiet, late):
        each.close()


def test_a_topic_that_is_not_reported_keeps_its_level() -> None:
    bench = Bench()
    source = bench.watch.source("a")
    source.start(bench.heard.append)
    for said in [{"a": "1"}, {}, errors.NoticeError("gone"), {"a": "1"}]:
        bench.say(said)
    assert bench.heard == ["1"]
    source.close()


def test_nothing_ends_the_thread_but_its_owner(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    source = bench.watch.source("a")
    source.start(bench.heard.append)
    with caplog.at_level(logging.INFO):
        for error in (SystemExit(1), ValueError("a bug"), ValueError("a bug")):
            bench.say(error)
        bench.say({"a": "up"})
    source.close()
    assert bench.heard == ["up"]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3, told
    # An error of tfpreempt itself has a traceback.
    assert caplog.records[0].exc_info
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING", "WARNING", "INFO"]  # the last: it works again


def test_a_notice_after_the_last_close_is_not_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(polling, "CLOSE_LIMIT_SECONDS", 0.05)
    release, entered = threading.Event(), threading.Event()
    heard: list[str] = []

    class Late(Watch):
        def poll(self) -> float:
            entered.set()
            release.wait(10.0)
            self.report("a", ActiveNotice("too late"))
            return 0.0

    source = Late().source("a")
    source.start(heard.append)
    assert entered.wait(10.0)
    source.close()
    release.set()
    assert wait_until(lambda: threads() == 0)
    assert heard == []


def test_starts_and_closes_from_many_threads_leave_nothing() -> None:
    class Idle(Watch):
        def poll(self) -> float:
            self.report("a", ActiveNotice("up"))
            return 0.001

    watch = Idle()
    longest = watch.source("b")
    longest.start(lambda detail: None)
    counts: list[int] = []

    def use() -> None:
        for _ in range(50):
            heard: list[str] = []
            source = watch.source("a")
            source.start(heard.append)
            wait_until(lambda heard=heard: bool(heard))
            source.close()
            counts.append(len(heard))

    users = [threading.Thread(target=use) for _ in range(4)]
    for user in users:
        user.start()
    for user in users:
        user.join(30.0)
    assert counts == [1] * 200
    assert threads() == 1
    longest.close()
    assert threads() == 0


def test_retries_begin_short_and_have_a_limit() -> None:
    for failures, longest in ((1, 0.1), (2, 0.2), (10**9, 2.0)):
        pauses = {quick_retry_seconds(failures) for _ in range(100)}
        assert longest / 2 <= min(pauses) < max(pauses) <= longest


def test_a_failure_draws_from_no_generator_of_the_programs() -> None:
    """Otherwise a resumed program would draw other numbers than before."""
    before = random.getstate()
    bench = Bench()
    source = bench.watch.source("a")
    source.start(bench.heard.append)
    bench.say(errors.NoticeError("gone"))
    source.close()
    assert random.getstate() == before
