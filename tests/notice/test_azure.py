"""Azure's Scheduled Events, against a service with its traps."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from tests.fakes.clock import FakeClock
from tests.notice.rigs import wait_until
from tfpreempt import errors
from tfpreempt.notice.azure import (
    ACKNOWLEDGE_SECONDS,
    DEFAULT_KINDS,
    FIRST_REQUEST_SECONDS,
    AzureWatch,
    metadata_url,
)
from tfpreempt.notice.metadata_session import readable
from tfpreempt.notice.source import TimedSource
from tfpreempt.notice.watcher import NoticeSourceConfig
from tfpreempt.testing.metadata import FakeAzure, Reply, Request


class Bench:
    """A watch on a fake clock, and the notices of its sources."""

    def __init__(self, **options: object) -> None:
        self.clock = FakeClock()
        self.fake = FakeAzure()
        self.heard: list[str] = []
        self.watch = AzureWatch(
            url=self.fake.url,
            clock=self.clock,
            wait=self.clock.wait,
            **options,  # type: ignore[arg-type]  # each test's own
        )
        kinds = options.get("kinds", DEFAULT_KINDS)
        assert isinstance(kinds, list | tuple)
        self.sources = {kind: self.watch.source(kind) for kind in kinds}
        for source in self.sources.values():
            source.start(self.heard.append)
        self.clock.wait_for_waiters()

    def look(self) -> None:
        self.clock.advance(1.0)
        self.clock.wait_for_waiters()

    def close(self) -> None:
        for source in self.sources.values():
            source.close()
        self.fake.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Reboot", "Redeploy"])
def test_an_event_for_this_machine_is_a_notice(bench: Bench, kind: str) -> None:
    identity = bench.fake.schedule(kind, not_before="2026-11-21T20:00:00Z")
    bench.look()
    bench.look()
    assert bench.heard == [
        f"{kind} is scheduled, not before 2026-11-21T20:00:00Z (event {identity})"
    ]


def test_events_for_others_are_no_notice(bench: Bench) -> None:
    bench.fake.schedule(resources=["trainer_1", "trainer_00", ""])
    bench.look()
    assert bench.heard == []
    bench.fake.schedule(resources=["trainer_1", "TRAINER_0"])
    bench.look()
    assert len(bench.heard) == 1


def test_a_freeze_is_a_notice_only_if_wanted(bench: Bench) -> None:
    bench.fake.schedule("Freeze")
    bench.look()
    assert bench.heard == []
    other = Bench(kinds=["Freeze"])
    other.fake.schedule("Freeze")
    other.look()
    other.fake.schedule("Reboot")
    other.look()
    other.close()
    assert [detail.split()[0] for detail in other.heard] == ["Freeze"]


def test_another_event_is_another_notice_and_a_start_is_none(bench: Bench) -> None:
    reboot = bench.fake.schedule("Reboot")
    bench.look()
    bench.fake.schedule("Preempt")
    bench.look()
    assert [detail.split()[0] for detail in bench.heard] == ["Reboot", "Preempt"]
    bench.watch.acknowledge()
    assert bench.fake.status(reboot) == "Started"
    bench.look()
    bench.fake.withdraw(reboot)
    bench.look()
    assert len(bench.heard) == 2


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("Mon, 19 Sep 2016 18:29:47 GMT", ", not before 2016-09-19T18:29:47Z"),
        ("2016-09-19T18:29:47Z", ", not before 2016-09-19T18:29:47Z"),
        ("2016-09-19T18:29:47", ", not before 2016-09-19T18:29:47Z"),
        ("", ""),
        ("soon", ""),
    ],
)
def test_the_time_comes_in_many_forms(bench: Bench, sent: str, shown: str) -> None:
    bench.fake.schedule(not_before=sent, status="Started")
    bench.look()
    assert bench.heard[0].startswith(f"Preempt has started{shown} (event ")


def test_the_earliest_event_determines_the_time_left() -> None:
    bench = Bench()
    now = bench.clock.wall()
    for ahead in (300, 31, 900):
        bench.fake.schedule(not_before=readable(now + ahead))
    bench.look()
    source = bench.sources["Preempt"]
    assert isinstance(source, TimedSource)
    assert source.seconds_left() == 30.0
    bench.close()


@pytest.mark.parametrize("not_before", ["", "2036-11-21T20:00:00Z"])
def test_an_event_that_has_started_leaves_nothing(
    bench: Bench, not_before: str
) -> None:
    bench.fake.schedule(not_before=readable(bench.clock.wall() + 300))
    bench.fake.schedule(not_before=not_before, status="Started")
    bench.look()
    assert NoticeSourceConfig(bench.sources["Preempt"], 300.0).grace_now() == 0.0


def test_an_acknowledgement_starts_only_events_of_this_machine() -> None:
    """The acknowledgement reads the events itself, without an open source."""
    with FakeAzure() as fake:
        watch = AzureWatch(["Preempt", "Reboot"], url=fake.url)
        assert watch.acknowledge() == ()
        mine = fake.schedule()
        others = fake.schedule(resources=["trainer_1"]), fake.schedule("Redeploy")
        assert watch.acknowledge() == (mine,)
        assert fake.status(mine) == "Started"
        assert {fake.status(other) for other in others} == {"Scheduled"}
        post = fake.requests[-1]
        assert (post.method, post.headers["metadata"]) == ("POST", "true")
        assert watch.acknowledge() == ()
    assert ACKNOWLEDGE_SECONDS <= 10


def test_the_kinds_share_one_question(bench: Bench) -> None:
    asked = len(bench.fake.requests)
    bench.look()
    assert len(bench.fake.requests) == asked + 1


def test_each_kind_has_a_time_of_its_own(bench: Bench) -> None:
    now = bench.clock.wall()
    bench.fake.schedule("Reboot", not_before=readable(now + 901))
    bench.fake.schedule("Preempt", not_before=readable(now + 31))
    bench.look()
    left = {
        name: NoticeSourceConfig(source, 1000.0).grace_now()
        for name, source in bench.sources.items()
    }
    assert left["Preempt"] == 30.0
    assert left["Reboot"] == 900.0


def test_a_notice_that_is_up_counts_as_started_once_it_has(bench: Bench) -> None:
    bench.fake.schedule(not_before=readable(bench.clock.wall() + 300))
    bench.look()
    bench.watch.acknowledge()
    bench.look()
    assert NoticeSourceConfig(bench.sources["Preempt"], 300.0).grace_now() == 0.0
    assert len(bench.heard) == 1


def test_the_first_machine_that_an_event_names_acknowledges_it(bench: Bench) -> None:
    theirs = bench.fake.schedule(resources=["trainer_1", "trainer_0"])
    ours = bench.fake.schedule("Reboot", resources=["TRAINER_0", "trainer_1"])
    bench.look()
    assert len(bench.heard) == 2
    assert bench.watch.acknowledge() == (ours,)
    assert bench.fake.status(theirs) == "Scheduled"


def test_an_acknowledgement_that_is_refused_raises(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = bench.fake.answer

    def refuse(request: Request) -> Reply:
        return Reply(status=503) if request.method == "POST" else answer(request)

    monkeypatch.setattr(bench.fake, "answer", refuse)
    bench.fake.schedule()
    with pytest.raises(errors.NoticeError, match=r"503.*expected 200 for StartReq"):
        bench.watch.acknowledge()


def test_all_requests_of_an_acknowledgement_share_one_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three slow answers must not take three times as long as documented."""
    monkeypatch.setattr("tfpreempt.notice.azure.ACKNOWLEDGE_SECONDS", 1.0)
    with FakeAzure() as fake:
        answer = fake.answer

        def answer_late(request: Request) -> Reply:
            time.sleep(0.7)
            return answer(request)

        monkeypatch.setattr(fake, "answer", answer_late)
        fake.schedule()
        began = time.monotonic()
        with pytest.raises(errors.NoticeError, match=r"timed out|in time"):
            AzureWatch(["Preempt"], url=fake.url).acknowledge()
        assert time.monotonic() - began < 1.5


def test_a_name_that_is_given_is_not_requested() -> None:
    bench = Bench(vm_name="trainer_7")
    bench.fake.schedule(resources=["trainer_7"])
    bench.look()
    bench.close()
    assert len(bench.heard) == 1
    assert {request.path for request in bench.fake.requests} == {
        "/metadata/scheduledevents"
    }


def test_the_name_is_requested_once(bench: Bench) -> None:
    for _ in range(3):
        bench.look()
    paths = [request.path for request in bench.fake.requests]
    assert paths.count("/metadata/instance/compute/name") == 1


def test_a_slow_first_request_delays_no_thread_but_the_poller() -> None:
    assert FIRST_REQUEST_SECONDS > 120
    with FakeAzure(first_call_seconds=60.0) as fake:
        source = AzureWatch(url=fake.url).source("Preempt")
        began = time.monotonic()
        source.start(lambda detail: None)
        assert time.monotonic() - began < 1.5
        assert wait_until(lambda: len(fake.requests) == 2)
        closing = time.monotonic()
        source.close()
        assert time.monotonic() - closing < 1.5


@pytest.mark.parametrize(
    "document",
    [
        "<html>",
        "[]",
        "{}",
        '{"Events": {}}',
        '{"Events": [7]}',
        '{"Events": [{"EventId": "1", "EventStatus": "Started"}]}',
        json.dumps({"Events": "x" * 100_000}),
    ],
)
def test_garbage_is_logged_once_and_no_notice(
    bench: Bench, document: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench.fake.set_document(document)
    for _ in range(3):
        bench.look()
    assert bench.heard == []
    assert len(caplog.records) == 1
    assert len(caplog.records[0].getMessage()) < 1000


def test_an_event_without_sense_hides_no_other(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    good = {
        "EventId": "2",
        "EventType": "Preempt",
        "EventStatus": "Scheduled",
        "Resources": ["trainer_0"],
        "NotBefore": "0001-01-01T00:00:00+14:00",
    }
    over = {"EventId": "3", "EventStatus": "Canceled"}
    bench.fake.set_document(json.dumps({"Events": [7, over, good]}))
    bench.look()
    bench.look()
    assert len(bench.heard) == 1
    assert len(caplog.records) == 1
    assert "lists an event without EventId" in caplog.records[0].getMessage()


def test_the_address_comes_from_the_environment() -> None:
    assert metadata_url({"TFPREEMPT_AZURE_METADATA": "h:80"}) == "http://h:80"
    assert metadata_url({}) == "http://169.254.169.254"


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(errors.ConfigurationError, match=r"kinds=\('Explode',\)"):
        AzureWatch(["Explode"])
    with pytest.raises(errors.ConfigurationError, match="positive, finite"):
        AzureWatch(interval=-1)
