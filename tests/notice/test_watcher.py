"""The watcher: many sources with their grace periods."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tests.fakes.clock import FakeClock
from tests.notice.rigs import wait_until
from tfpreempt import errors
from tfpreempt.core.events import Notice
from tfpreempt.notice.watcher import NoticeSourceConfig, Watcher
from tfpreempt.testing.notice import ScriptedSource

START = 1000.0


def watch(
    *sources: ScriptedSource,
    on_notice: Callable[[Notice], None] = lambda notice: None,
    clock: FakeClock | None = None,
    graces: tuple[float | None, ...] = (),
) -> Watcher:
    padded = (*graces, *[None] * (len(sources) - len(graces)))
    watched = [
        NoticeSourceConfig(source, grace)
        for source, grace in zip(sources, padded, strict=True)
    ]
    return Watcher(watched, 3, on_notice, FakeClock() if clock is None else clock)


def test_a_notice_has_worker_source_time_and_grace_period() -> None:
    clock, heard = FakeClock(), list[Notice]()
    source = ScriptedSource("signal:SIGTERM")
    watcher = watch(source, on_notice=heard.append, clock=clock, graces=(30.0,))
    watcher.start()
    clock.advance(5.0)
    source.fire("SIGTERM")
    assert heard == [
        Notice(
            source="signal:SIGTERM",
            worker=3,
            grace_seconds=30.0,
            received_at=START + 5.0,
            detail="SIGTERM",
        )
    ]
    watcher.close()


class Timed(ScriptedSource):
    """A source with the time at which the machine is taken away."""

    left: float | None

    def seconds_left(self) -> float | None:
        return self.left


@pytest.mark.parametrize(
    ("grace", "left", "told"),
    [
        (120.0, 100.0, 100.0),
        (120.0, 900.0, 120.0),  # a clock that is wrong cannot make it longer
        (120.0, -3.0, 0.0),  # the time has come: commit and leave
        (120.0, None, 120.0),
        (None, 100.0, None),
    ],
)
def test_a_time_of_its_own_shortens_the_grace(
    grace: float | None, left: float | None, told: float | None
) -> None:
    heard: list[Notice] = []
    source = Timed()
    source.left = left
    watcher = watch(source, on_notice=heard.append, graces=(grace,))
    watcher.start()
    source.fire()
    assert [notice.grace_seconds for notice in heard] == [told]
    watcher.close()


def test_an_error_of_the_listener_is_logged_and_later_notices_follow(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls: list[Notice] = []

    def listen(notice: Notice) -> None:
        calls.append(notice)
        raise ValueError("not today")

    source = ScriptedSource()
    watcher = watch(source, on_notice=listen, graces=(5.0,))
    watcher.start()
    source.fire()
    source.fire()
    assert len(calls) == 2
    assert caplog.text.count("ValueError: not today") == 2
    watcher.close()


def test_if_one_source_cannot_start_all_are_closed() -> None:
    good, never = ScriptedSource("good"), ScriptedSource("never")
    bad = ScriptedSource("bad", start_error=errors.NoticeError("no such place"))
    watcher = watch(good, bad, never)
    with pytest.raises(errors.NoticeError, match="no such place"):
        watcher.start()
    assert good.is_closed
    assert not never.is_started
    with pytest.raises(errors.UsageError):
        watcher.start()


def test_after_close_no_notice_is_reported() -> None:
    class Deaf(ScriptedSource):
        def close(self) -> None:
            """Still sends a notice, like a thread that was just about to."""

    heard: list[Notice] = []
    source = Deaf()
    watcher = watch(source, on_notice=heard.append, graces=(5.0,))
    watcher.start()
    watcher.close()
    source.fire()
    assert heard == []


def test_close_continues_after_an_error_of_a_source(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Stuck(ScriptedSource):
        def close(self) -> None:
            raise OSError("stuck")

    first = ScriptedSource()
    watcher = watch(first, Stuck())
    watcher.start()
    watcher.close()
    watcher.close()
    assert first.is_closed
    assert "stuck" in caplog.text


def test_close_waits_for_a_running_listener() -> None:
    entered, release, left = (threading.Event() for _ in range(3))

    def listen(notice: Notice) -> None:
        entered.set()
        release.wait(10.0)
        left.set()

    source = ScriptedSource()
    watcher = watch(source, on_notice=listen)
    watcher.start()
    threading.Thread(target=source.fire, daemon=True).start()
    assert entered.wait(10.0)
    closer = threading.Thread(target=watcher.close, daemon=True)
    closer.start()
    assert not wait_until(lambda: not closer.is_alive(), limit=0.05)
    release.set()
    closer.join(10.0)
    assert left.is_set()


def test_the_listener_may_close_the_watcher() -> None:
    heard: list[Notice] = []

    def listen(notice: Notice) -> None:
        heard.append(notice)
        watcher.close()

    source = ScriptedSource()
    watcher = watch(source, on_notice=listen)
    watcher.start()
    source.fire()
    source.fire()
    assert len(heard) == 1


def test_rearm_reaches_every_source_while_open() -> None:
    sources = [ScriptedSource(), ScriptedSource()]
    watcher = watch(*sources)
    watcher.rearm()
    assert [source.rearmed for source in sources] == [0, 0]
    watcher.start()
    watcher.rearm()
    watcher.close()
    watcher.rearm()
    assert [source.rearmed for source in sources] == [1, 1]


def test_starts_once() -> None:
    watcher = watch(ScriptedSource())
    watcher.start()
    with pytest.raises(errors.UsageError, match="make a new watcher"):
        watcher.start()
    watcher.close()


def test_without_sources_it_is_quiet() -> None:
    watcher = watch()
    watcher.start()
    watcher.rearm()
    watcher.close()


@pytest.mark.parametrize("grace", [-1.0, float("nan"), float("inf")])
def test_a_grace_that_cannot_be_is_refused(grace: float) -> None:
    with pytest.raises(errors.ConfigurationError, match="grace_seconds"):
        NoticeSourceConfig(ScriptedSource(), grace)


# --- sources that are found later ----------------------------------------------------


def test_found_sources_are_watched_with_their_grace_periods() -> None:
    heard: list[Notice] = []
    at_once, found = ScriptedSource("at-once"), ScriptedSource("found")
    looks, answers = threading.Event(), threading.Event()

    def find() -> list[NoticeSourceConfig]:
        looks.set()
        answers.wait(10)
        return [NoticeSourceConfig(found, 30.0)]

    watcher = Watcher([NoticeSourceConfig(at_once)], 0, heard.append, find_more=find)
    watcher.start()
    assert looks.wait(10)
    at_once.fire()  # while the search lasts
    assert (watcher.is_started, watcher.shortest_grace) == (True, None)
    answers.set()
    assert wait_until(lambda: watcher.shortest_grace == 30.0)
    found.fire()
    assert [(each.source, each.grace_seconds) for each in heard] == [
        ("at-once", None),
        ("found", 30.0),
    ]
    watcher.close()
    assert found.is_closed


def test_a_search_that_outlasts_the_watcher_starts_no_source() -> None:
    found, answers = ScriptedSource(), threading.Event()
    searching: list[threading.Thread] = []

    def find() -> list[NoticeSourceConfig]:
        searching.append(threading.current_thread())
        answers.wait(10)
        return [NoticeSourceConfig(found)]

    watcher = Watcher([], 0, lambda notice: None, find_more=find)
    watcher.start()
    assert wait_until(lambda: searching)
    watcher.close()
    answers.set()
    searching[0].join(10)
    assert not found.is_started


def test_a_found_source_that_cannot_start_leaves_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad = ScriptedSource("bad", start_error=errors.NoticeError("no such place"))
    good = ScriptedSource("good")
    found = [NoticeSourceConfig(bad), NoticeSourceConfig(good)]
    watcher = Watcher([], 0, lambda notice: None, find_more=lambda: found)
    watcher.start()
    assert wait_until(lambda: good.is_started)
    assert "the notice source bad cannot be watched here (no such place)" in caplog.text
    watcher.close()


def test_a_notice_of_a_found_source_may_close_the_watcher() -> None:
    class Standing(ScriptedSource):
        def _begin(self) -> None:
            self.fire()

    source, closed = Standing(), threading.Event()

    def listen(notice: Notice) -> None:
        watcher.close()
        closed.set()

    watcher = Watcher([], 0, listen, find_more=lambda: [NoticeSourceConfig(source)])
    watcher.start()
    assert closed.wait(10)
    assert wait_until(lambda: source.is_closed)
