"""The promises of every notice source, on all sources and on the fake."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.notice.rigs import (
    CallableRig,
    FileRig,
    NativeRig,
    Rig,
    ScriptedRig,
    SignalRig,
    wait_until,
)
from tests.notice.server_rigs import (
    AwsInterruptionRig,
    AwsLifecycleRig,
    AwsRebalanceRig,
    AzureRig,
    GceMaintenanceRig,
    GcePreemptedRig,
    GceStopRig,
    GceUpcomingRig,
    ServerRig,
    hurry,
)
from tfpreempt import errors
from tfpreempt.notice.source import NoticeSource

RIGS: dict[str, Callable[[Path], Rig]] = {
    "signal": lambda folder: SignalRig(),
    "file": FileRig,
    "callable": lambda folder: CallableRig(),
    "native": lambda folder: NativeRig(),
    "scripted": lambda folder: ScriptedRig(),
    "aws-spot-interruption": lambda folder: AwsInterruptionRig(),
    "aws-rebalance": lambda folder: AwsRebalanceRig(),
    "aws-lifecycle": lambda folder: AwsLifecycleRig(),
    "azure": lambda folder: AzureRig(),
    "gce-preempted": lambda folder: GcePreemptedRig(),
    "gce-maintenance-event": lambda folder: GceMaintenanceRig(),
    "gce-upcoming-maintenance": lambda folder: GceUpcomingRig(),
    "gce-stop-state": lambda folder: GceStopRig(),
}


# Real servers take their time; one of each cloud is enough in `make test-fast`.
QUICK = {"aws-spot-interruption", "azure", "gce-preempted"}
SERVERS = {name for name in RIGS if name.startswith(("aws", "azure", "gce"))}


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.slow if name in SERVERS - QUICK else ())
        for name in sorted(RIGS)
    ]
)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    made = RIGS[request.param](tmp_path)
    yield made
    made.stop()


@pytest.fixture
def source(rig: Rig) -> Iterator[NoticeSource]:
    made = rig.make()
    yield made
    made.close()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns the log lines of sources; threads of other tests may log too."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("tfpreempt.notice")
    ]


def test_has_a_stable_name(source: NoticeSource) -> None:
    assert source.name
    assert source.name == source.name


def test_a_quiet_source_reports_nothing(rig: Rig, source: NoticeSource) -> None:
    heard: list[str] = []
    source.start(heard.append)
    source.rearm()
    rig.settle()
    assert heard == []


def test_a_notice_is_reported_once(rig: Rig, source: NoticeSource) -> None:
    heard: list[str] = []
    source.start(heard.append)
    rig.give()
    rig.settle()
    rig.settle()
    assert len(heard) == 1
    assert isinstance(heard[0], str)
    assert heard[0]


def test_a_notice_after_rearm_is_reported_once(rig: Rig, source: NoticeSource) -> None:
    heard: list[str] = []
    source.start(heard.append)
    source.rearm()
    source.rearm()
    rig.give()
    rig.settle()
    assert len(heard) == 1


def test_withdrawn_and_back_is_a_new_notice(rig: Rig, source: NoticeSource) -> None:
    if not rig.has_level:
        pytest.skip("this one cannot be withdrawn")
    heard: list[str] = []
    source.start(heard.append)
    for expected in (1, 2, 3):
        rig.give()
        rig.settle()
        assert len(heard) == expected
        rig.withdraw()
        rig.settle()
        assert len(heard) == expected


def test_another_arrival_is_another_notice(rig: Rig, source: NoticeSource) -> None:
    if rig.has_level or not rig.keeps_going_after_notice:
        pytest.skip("this one has a level, or comes once")
    heard: list[str] = []
    source.start(heard.append)
    for expected in (1, 2, 3):
        rig.give()
        rig.settle()
        assert len(heard) == expected


def test_garbage_is_a_notice_with_a_short_detail(
    rig: Rig, source: NoticeSource
) -> None:
    if not rig.trusts_garbage:
        pytest.skip("this one asks a server that anything may have answered for")
    heard: list[str] = []
    source.start(heard.append)
    rig.garbage()
    rig.settle()
    assert len(heard) == 1
    assert isinstance(heard[0], str)
    assert len(heard[0].encode()) <= 4096


def test_garbage_from_a_server_is_logged_once_and_no_notice(
    rig: Rig, source: NoticeSource, caplog: pytest.LogCaptureFixture
) -> None:
    if rig.trusts_garbage:
        pytest.skip("this one's sender is trusted")
    heard: list[str] = []
    source.start(heard.append)
    rig.garbage()
    for _ in range(3):
        rig.settle()
    assert heard == []
    (line,) = said(caplog)
    assert len(line) < 1000
    rig.recover()
    rig.give()
    rig.settle()
    assert len(heard) == 1


def test_a_server_that_stops_and_resumes_answering(
    rig: Rig, source: NoticeSource, caplog: pytest.LogCaptureFixture
) -> None:
    if not isinstance(rig, ServerRig):
        pytest.skip("this one asks no server")
    heard: list[str] = []
    source.start(heard.append)
    rig.give()
    rig.settle()
    caplog.clear()
    rig.break_off()
    for _ in range(3):
        rig.settle()
    rig.recover()
    rig.settle()
    assert len(heard) == 1  # the notice existed all the time
    told = said(caplog)
    assert len(told) == 2, told
    assert "works again" in told[1]


@pytest.mark.slow  # waits until the source gives up
def test_a_server_that_never_answers_and_then_does(
    rig: Rig,
    source: NoticeSource,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not isinstance(rig, ServerRig):
        pytest.skip("this one asks no server")
    heard: list[str] = []
    with monkeypatch.context() as impatient:
        hurry(impatient)
        source.start(heard.append)
        rig.settle()
        rig.stall()
        rig.settle()
        rig.give()
        rig.settle()
    assert heard == []
    rig.recover()  # an answer may take its time
    rig.settle()
    assert len(heard) == 1
    told = said(caplog)
    assert len(told) == 2, told
    assert "not complete in time" in told[0]
    assert "works again" in told[1]


def test_failing_then_recovering(rig: Rig, source: NoticeSource) -> None:
    if not rig.can_fail:
        pytest.skip("this one has nothing that can fail and come back")
    heard: list[str] = []
    source.start(heard.append)
    rig.fail()
    for _ in range(3):
        rig.settle()
    assert heard == []
    rig.recover()
    rig.give()
    rig.settle()
    assert len(heard) == 1


def test_a_failing_listener_does_not_end_the_source(
    rig: Rig, source: NoticeSource, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []

    def listen(detail: str) -> None:
        calls.append(detail)
        raise ValueError("the listener's fault")

    source.start(listen)
    rig.give()
    rig.settle()
    assert len(calls) == 1
    assert "the listener's fault" in caplog.text
    if rig.keeps_going_after_notice:
        if rig.has_level:
            rig.withdraw()
            rig.settle()
        rig.give()
        rig.settle()
        assert len(calls) == 2


def test_close_while_waiting_is_quick(rig: Rig, source: NoticeSource) -> None:
    source.start(lambda detail: None)
    rig.settle()
    began = time.monotonic()
    source.close()
    source.close()
    assert time.monotonic() - began < 1.5  # less than the limit that warns


def test_a_listener_may_close_the_source(
    rig: Rig, source: NoticeSource, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[str] = []

    def listen(detail: str) -> None:
        heard.append(detail)
        source.close()

    source.start(listen)
    rig.give()
    assert wait_until(lambda: rig.step() or bool(heard))
    assert wait_until(lambda: not source_threads())
    assert len(heard) == 1
    told = said(caplog)
    # A signal's handler can only be put back on the main thread.
    assert [each for each in told if "off the main thread" not in each] == []


def source_threads() -> list[str]:
    """Returns the threads of polling sources; signals share threads."""
    names = [each.name for each in threading.enumerate()]
    kinds = ("tfpreempt-gce", "tfpreempt-aws", "tfpreempt-azure", "tfpreempt-file")
    return [name for name in names if name.startswith((*kinds, "tfpreempt-callable"))]


def test_close_leaves_no_thread_behind(rig: Rig, source: NoticeSource) -> None:
    if isinstance(rig, NativeRig):
        pytest.skip("its one thread is never joined, by design")
    before = rig.own_threads()
    source.start(lambda detail: None)
    source.close()
    assert rig.own_threads() <= before


def test_nothing_is_reported_after_close(rig: Rig, source: NoticeSource) -> None:
    heard: list[str] = []
    source.start(heard.append)
    source.close()
    rig.give()
    if not rig.has_level:  # a closed poller looks at nothing: no need to settle
        rig.settle()
    assert heard == []


def test_close_without_start(source: NoticeSource) -> None:
    source.close()


def test_a_second_start_is_refused(source: NoticeSource) -> None:
    source.start(lambda detail: None)
    with pytest.raises(errors.UsageError, match="make a new source"):
        source.start(lambda detail: None)


def test_a_start_after_close_is_refused(source: NoticeSource) -> None:
    source.close()
    with pytest.raises(errors.UsageError, match="closed"):
        source.start(lambda detail: None)


def test_two_sources_hear_the_same_notice(rig: Rig) -> None:
    sources = [rig.make(), rig.make()]
    heard: list[list[str]] = [[], []]
    if rig.has_level:
        pytest.skip("each polls for itself; one rig drives one")
    try:
        for source, into in zip(sources, heard, strict=True):
            source.start(into.append)
        rig.give()
        rig.settle()
        assert [len(each) for each in heard] == [1, 1]
    finally:
        for source in sources:
            source.close()
