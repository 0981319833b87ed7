"""Results of `tfpreempt doctor` for each kind of source."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tfpreempt.cli.doctor.sources import SourceHealth, probe_sources
from tfpreempt.notice.callable import CallableSource
from tfpreempt.notice.file import FileSource
from tfpreempt.notice.metadata_watch import ActiveNotice, MetadataWatch
from tfpreempt.notice.signals import SignalSource
from tfpreempt.notice.watcher import NoticeSourceConfig
from tfpreempt.testing.notice import ScriptedSource


class ScriptedWatch(MetadataWatch):
    """Returns the given answers, or waits."""

    name = "scripted"
    _known = ("quiet", "up", "Preempt")

    def __init__(self, answers: dict[str, str | None], *, hangs: bool = False) -> None:
        super().__init__(self._known, 1.0, url="http://nobody")
        self._answers = answers
        self._closed = threading.Event()
        self._hangs = hangs

    def poll(self) -> float:
        if self._hangs:
            self._closed.wait(30)
        for topic, level in self._answers.items():
            self.report(topic, None if level is None else ActiveNotice(level))
        return 1.0

    def failure(self, topic: str) -> str:
        return f"no {topic}" if topic == "unread" else ""

    def close(self) -> None:
        self._closed.set()


def states(
    *sources: Any, limit: float = 10.0, **watches: ScriptedWatch
) -> list[SourceHealth]:
    watched = [NoticeSourceConfig(source, 5.0) for source in sources]
    makers: Any = {
        kind: functools.partial(lambda watch, topics: watch, watch)
        for kind, watch in watches.items()
    }
    found = probe_sources(watched, makers, limit_seconds=limit)
    assert [each.name for each in found] == [source.name for source in sources]
    assert {each.grace_seconds for each in found} == {5.0}
    return [each.state for each in found]


def test_each_topic_has_its_own_state() -> None:
    sources = [ScriptedSource(f"gce:{topic}") for topic in ("quiet", "up", "unread")]
    watch = ScriptedWatch({"quiet": None, "up": "it goes"})
    assert states(*sources, gce=watch) == [
        SourceHealth.WORKING,
        SourceHealth.NOTICE,
        SourceHealth.FAILED,
    ]


def test_an_answer_that_takes_long_is_slow() -> None:
    source = ScriptedSource("azure:Preempt")
    assert states(source, limit=0.05, azure=ScriptedWatch({}, hangs=True)) == [
        SourceHealth.NO_ANSWER
    ]


def test_two_sources_of_one_name_are_two() -> None:
    pair = [ScriptedSource("azure:Preempt") for _ in range(2)]
    watch = ScriptedWatch({"Preempt": None})
    assert states(*pair, azure=watch) == [SourceHealth.WORKING] * 2


def test_a_notice_file(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    assert states(FileSource(stop)) == [SourceHealth.WORKING]
    stop.touch()
    assert states(FileSource(stop)) == [SourceHealth.NOTICE]
    assert states(FileSource(tmp_path / "no" / "stop")) == [SourceHealth.NO_ANSWER]


def test_a_function_of_the_program_is_not_called() -> None:
    def watcher() -> bool:
        pytest.fail("called")

    assert states(CallableSource(watcher)) == [SourceHealth.WORKING]


@pytest.fixture
def _blocked_usr2() -> Iterator[None]:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    yield
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})


@pytest.mark.usefixtures("_blocked_usr2")
def test_a_blocked_signal_is_named_and_received() -> None:
    blocked, other = probe_sources(
        [NoticeSourceConfig(SignalSource(name)) for name in ("USR2", "USR1")]
    )
    assert (blocked.state, other.state) == (SourceHealth.WORKING, SourceHealth.WORKING)
    assert "SIGUSR2 is blocked in this shell" in blocked.detail
    assert other.detail == "not blocked"
