"""The sources of Google Compute Engine, where its server fails or hides things."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from tests.fakes.clock import FakeClock
from tests.notice.rigs import wait_until
from tests.notice.server_rigs import STOP, Heard, is_hanging, quiet_gce
from tfpreempt.notice.gce import GceWatch
from tfpreempt.testing.metadata import FakeGce

pytestmark = pytest.mark.slow  # a real server, with its time-outs


@pytest.fixture
def fake() -> Iterator[FakeGce]:
    with quiet_gce() as server:
        yield server


def test_a_hidden_directory_leaves_the_first_topic_and_polls() -> None:
    with (
        FakeGce(hides_directory=True) as fake,
        Heard(GceWatch(url=fake.url)) as heard,
    ):
        assert is_hanging(fake)
        fake.preempt()
        assert wait_until(lambda: heard.names == ["gce:preempted"])
        assert heard.said[0][1] == "preempted is TRUE"


@pytest.mark.parametrize(
    ("topics", "seconds"),
    [
        (["preempted", "stop-state", "upcoming-maintenance"], "5"),
        (["preempted", "stop-state", "maintenance-event"], "1"),
    ],
)
def test_an_urgent_entry_is_polled_each_second(topics: list[str], seconds: str) -> None:
    clock = FakeClock()
    with FakeGce(longest_hang=0.02, hides_directory=True) as fake:
        watch = GceWatch(topics, url=fake.url, wait=clock.wait, clock=clock)
        with Heard(watch, tuple(topics)):
            clock.wait_for_waiters()
            clock.advance(1.0)
            clock.wait_for_waiters()
        waits = [each for each in fake.requests if "wait_for_change" in each.query]
        assert [each.path for each in waits] == [
            "/computeMetadata/v1/instance/preempted"
        ]
        assert waits[0].query["timeout_sec"] == seconds


@pytest.mark.parametrize("hides_directory", [False, True])
@pytest.mark.parametrize("name", ["preempted", "maintenance-event"])
def test_an_entry_that_is_hidden_is_a_fault_of_its_own(
    name: str, hides_directory: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Every machine has these two entries; without them no notice can be detected."""
    clock, path = FakeClock(), f"instance/{name}"
    with FakeGce(longest_hang=0.02, hides_directory=hides_directory) as fake:

        def look() -> list[str]:
            clock.wait_for_waiters()
            clock.advance(5.0)
            clock.wait_for_waiters()
            return [record.getMessage() for record in caplog.records]

        watch = GceWatch(url=fake.url, wait=clock.wait, clock=clock)
        with Heard(watch) as heard:
            assert look() == []
            fake.remove(path)
            for _ in range(3):
                (told,) = look()
            assert f"gce:{name} failed" in told
            assert "status 404" in told
            assert "Allow the entry in the proxy" in told
            fake.set(STOP, "PENDING_STOP")
            look()
            assert heard.names == ["gce:stop-state"]
            fake.set(path, "NONE")
            assert f"gce:{name} works again" in look()[-1]


def test_a_short_burst_of_503_costs_less_than_a_second(
    fake: FakeGce, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[float] = []

    def wait(stop: threading.Event, seconds: float) -> bool:
        pauses.append(seconds)
        return stop.wait(seconds)

    with Heard(GceWatch(url=fake.url, wait=wait)) as heard:
        assert is_hanging(fake)
        fake.fail(2)
        fake.preempt()  # this answer was under way, the next two fail
        assert wait_until(lambda: len(heard.said) == 1)
        assert is_hanging(fake)
    assert 0.0 < sum(pauses) < 1.0
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "status 503, expected 200" in told[0]
    assert "works again" in told[1]


def test_a_change_during_a_failure_is_seen(fake: FakeGce) -> None:
    with Heard(GceWatch(url=fake.url)) as heard:
        assert is_hanging(fake)
        fake.down()
        fake.preempt()
        fake.up()
        assert wait_until(lambda: heard.names == ["gce:preempted"])


def test_one_topic_that_is_unreadable_leaves_the_others_alone(
    fake: FakeGce, caplog: pytest.LogCaptureFixture
) -> None:
    fake.set(STOP, "A_STATE_OF_NEXT_YEAR")
    with Heard(GceWatch(url=fake.url)) as heard:
        for value in ("TRUE", "FALSE", "TRUE"):
            assert is_hanging(fake)
            asked = len(fake.requests)
            fake.set("instance/preempted", value)
            assert wait_until(lambda asked=asked: len(fake.requests) > asked)
        assert wait_until(lambda: heard.names == ["gce:preempted"] * 2)
    assert len(caplog.records) == 1
    assert "gce:stop-state" in caplog.records[0].getMessage()
    assert "A_STATE_OF_NEXT_YEAR" not in caplog.text


def test_pauses_after_failures_are_short_at_first_and_spread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pauses: list[float] = []
    enough = threading.Event()

    def wait(stop: threading.Event, seconds: float) -> bool:
        pauses.append(seconds)
        if len(pauses) == 11:
            enough.set()
            return stop.wait(10.0)
        return False

    with FakeGce() as fake, caplog.at_level(logging.WARNING):
        fake.fail(100)
        watch = GceWatch(url=fake.url, wait=wait)
        with Heard(watch, ("preempted",)):
            assert enough.wait(10.0)
    longest = [0.1, 0.2, 0.4, 0.8, 1.6, *[2.0] * 6]
    for pause, most in zip(pauses, longest, strict=True):
        assert most / 2 <= pause <= most
    assert pauses[-1] != pauses[-2]
    assert len(caplog.records) == 1
