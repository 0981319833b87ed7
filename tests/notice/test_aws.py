"""The sources of Amazon EC2, against a service with its traps."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import time
from collections.abc import Iterator

import pytest

from tests.fakes.clock import FakeClock
from tfpreempt import errors
from tfpreempt.notice.aws import TOPICS, AwsWatch, is_excluded, metadata_url
from tfpreempt.notice.source import TimedSource
from tfpreempt.testing._server import Reply, Request
from tfpreempt.testing.metadata import FakeAws

TOKEN = "/latest/api/token"


class Bench:
    """A watch of all topics on a fake clock, and its notices."""

    def __init__(self, **options: int) -> None:
        self.clock = FakeClock()
        self.fake = FakeAws(monotonic=self.clock.monotonic, **options)
        self.heard: list[tuple[str, str]] = []
        watch = AwsWatch(
            TOPICS, url=self.fake.url, wait=self.clock.wait, clock=self.clock
        )
        self.sources = [watch.source(topic) for topic in TOPICS]
        for source in self.sources:
            source.start(lambda detail, name=source.name: self.hear(name, detail))
        self.clock.wait_for_waiters()

    def hear(self, name: str, detail: str) -> None:
        self.heard.append((name, detail))

    def look(self, seconds: float = 5.0) -> None:
        self.clock.advance(seconds)
        self.clock.wait_for_waiters()

    def close(self) -> None:
        for source in self.sources:
            source.close()
        self.fake.close()

    def asked(self, path: str) -> int:
        return [request.path for request in self.fake.requests].count(path)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def test_each_topic_has_its_notice(bench: Bench) -> None:
    when = datetime.datetime(2026, 11, 21, 20, tzinfo=datetime.timezone.utc)
    bench.fake.recommend_rebalance(when - datetime.timedelta(minutes=2))
    bench.look()
    bench.fake.interrupt("stop", when)
    bench.look()
    bench.fake.set_lifecycle("Warmed:Terminated")
    bench.look()
    bench.look()
    assert bench.heard == [
        ("aws:rebalance", "rebalance is recommended since 2026-11-21T19:58:00Z"),
        (
            "aws:spot-interruption",
            "spot/instance-action is stop at 2026-11-21T20:00:00Z",
        ),
        ("aws:lifecycle", "target-lifecycle-state is Warmed:Terminated"),
    ]


def test_an_interruption_has_its_time_left(bench: Bench) -> None:
    when = datetime.datetime.fromtimestamp(
        bench.clock.wall() + 65, datetime.timezone.utc
    )
    bench.fake.interrupt("terminate", when)
    bench.look()
    (source,) = [each for each in bench.sources if "interruption" in each.name]
    assert isinstance(source, TimedSource)
    assert source.seconds_left() == 60.0


def test_a_recommendation_of_an_earlier_process_is_no_notice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It stays as long as the instance, so a restarted job would exit each time."""
    clock = FakeClock(wall=1_700_000_000.75)
    now = datetime.datetime.fromtimestamp(clock.wall(), datetime.timezone.utc)
    second = datetime.timedelta(seconds=1)
    heard: list[str] = []
    with FakeAws() as fake, caplog.at_level(logging.INFO):
        watch = AwsWatch(TOPICS, url=fake.url, wait=clock.wait, clock=clock)
        source, late = watch.source("rebalance"), watch.source("rebalance")
        fake.recommend_rebalance(now - second)
        source.start(heard.append)
        for _ in range(3):
            clock.wait_for_waiters()
            clock.advance(5.0)
        clock.wait_for_waiters()
        late.start(heard.append)
        assert heard == []
        told = [each for each in caplog.records if each.name.startswith("tfpreempt")]
        assert [each.levelname for each in told] == ["INFO"]
        assert "recommended since 2023-11-14T22:13:19Z" in told[0].getMessage()
        fake.recommend_rebalance(now)  # in the second in which the watch began
        clock.advance(5.0)
        clock.wait_for_waiters()
        assert len(heard) == 2
        source.close()
        late.close()


def test_404_is_the_normal_answer(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        bench.look()
    assert bench.heard == []
    assert caplog.records == []


@pytest.mark.parametrize("state", ["Warmed:Stopped", "Warmed:Hibernated"])
def test_a_warm_pool_takes_the_instance_away_too(bench: Bench, state: str) -> None:
    bench.fake.set_lifecycle(state)
    bench.look()
    assert bench.heard == [("aws:lifecycle", f"target-lifecycle-state is {state}")]


@pytest.mark.parametrize("state", ["InService", "Standby", "Warmed:Running"])
def test_other_states_are_no_end(bench: Bench, state: str) -> None:
    bench.fake.set_lifecycle(state)
    bench.look()
    assert bench.heard == []


def test_one_token_serves_until_shortly_before_its_end() -> None:
    bench = Bench(longest_ttl=100)
    for _ in range(17):
        bench.look()
    assert bench.asked(TOKEN) == 1  # 85 s
    bench.look()
    assert bench.asked(TOKEN) == 2  # 90 s: renewed before anything was refused
    bench.close()
    asked = [request for request in bench.fake.requests if request.path == TOKEN]
    assert asked[0].method == "PUT"
    assert asked[0].headers["x-aws-ec2-metadata-token-ttl-seconds"] == "21600"


@pytest.mark.parametrize("lifetime", ["9" * 400, "9" * 5000, "-1", "soon"])
def test_a_lifetime_that_is_none_is_taken_for_the_one_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, lifetime: str
) -> None:
    answer = FakeAws._answer_token

    def answer_token(fake: FakeAws, request: Request) -> Reply:
        told = answer(fake, request)
        headers = dict.fromkeys(told.headers, lifetime) | {"Content-Type": "text/plain"}
        return dataclasses.replace(told, headers=headers)

    monkeypatch.setattr(FakeAws, "_answer_token", answer_token)
    bench = Bench()
    bench.fake.set_lifecycle("Terminated")
    bench.look()
    bench.close()
    assert bench.asked(TOKEN) == 1
    assert [name for name, _ in bench.heard] == ["aws:lifecycle"]


def test_a_token_that_is_refused_is_replaced_at_once(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.fake.interrupt()
    bench.fake.expire_tokens()
    bench.look()
    assert [name for name, _ in bench.heard] == ["aws:spot-interruption"]
    assert bench.asked(TOKEN) == 2
    assert caplog.records == []


def test_a_service_that_refuses_every_token_is_asked_twice(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    before = len(bench.fake.requests)
    bench.fake.fail(1_000, status=401)
    bench.look()
    # A get, a new token that is refused as well, and no more.
    assert len(bench.fake.requests) - before == 2
    assert len(caplog.records) == 1
    assert "expected a token" in caplog.records[0].getMessage()


def test_one_topic_that_fails_leaves_the_others_alone(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.fake.set("events/recommendations/rebalance", "<html>")
    bench.look()
    bench.look()
    bench.fake.interrupt()
    bench.look()
    assert [name for name, _ in bench.heard] == ["aws:spot-interruption"]
    assert len(caplog.records) == 1
    assert "aws:rebalance failed" in caplog.records[0].getMessage()
    assert "expected JSON" in caplog.records[0].getMessage()


@pytest.mark.parametrize(
    "value", [{}, [], {"action": None}, {"action": 7}, {"action": "no word!"}, "NaN"]
)
def test_an_action_without_sense_is_no_notice(bench: Bench, value: object) -> None:
    bench.fake.set("spot/instance-action", value)
    bench.look()
    assert bench.heard == []


def test_close_is_quick_while_the_service_is_silent() -> None:
    with FakeAws() as fake:
        fake.stall()
        source = AwsWatch(url=fake.url).source("spot-interruption")
        source.start(lambda detail: None)
        began = time.monotonic()
        source.close()
        assert time.monotonic() - began < 1.5


def test_the_address_comes_from_the_environment() -> None:
    endpoint = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://localhost:1338/"}
    mode = {"AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE": "IPv6"}
    assert metadata_url({**endpoint, **mode}) == "http://localhost:1338"
    assert metadata_url(mode) == "http://[fd00:ec2::254]"
    assert metadata_url({}) == "http://169.254.169.254"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_EC2_METADATA_SERVICE_ENDPOINT", "https://localhost"),
        ("AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE", "IPv5"),
    ],
)
def test_variables_without_sense_are_refused(name: str, value: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=f"{name}='{value}'"):
        metadata_url({name: value})


def test_the_service_can_be_forbidden() -> None:
    assert is_excluded({"AWS_EC2_METADATA_DISABLED": "True"})
    assert not is_excluded({"AWS_EC2_METADATA_DISABLED": "false"})
    assert not is_excluded({})


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(errors.ConfigurationError, match="positive, finite"):
        AwsWatch(interval=0)
    with pytest.raises(errors.ConfigurationError, match="expected some of"):
        AwsWatch(["spot"])
    with pytest.raises(errors.ConfigurationError, match="'rebalance'"):
        AwsWatch().source("rebalance")
