"""`tfpreempt notify --serve` and `--metadata`: a cloud's server, and what it says."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tfpreempt.cli import main
from tfpreempt.cli.doctor.sources import Liveness, probe_sources
from tfpreempt.cli.notify.server import (
    Rehearsal,
    RehearsalAws,
    RehearsalAzure,
    RehearsalGce,
    control,
)
from tfpreempt.errors import ConfigurationError
from tfpreempt.notice.aws import AwsWatch
from tfpreempt.notice.azure import AzureWatch
from tfpreempt.notice.gce import GceWatch
from tfpreempt.notice.metadata import MetadataSession
from tfpreempt.notice.source import NoticeSource
from tfpreempt.notice.watcher import WatchedSource, Watcher
from tfpreempt.platforms.detect import VARIANTS
from tfpreempt.testing.metadata import FakeGce

ROOT = Path(__file__).parents[2]


def notify(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["notify", "--metadata", url, *arguments])


@pytest.fixture(params=["gce", "aws", "azure"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, dict[str, str]]]:
    """A cloud's server in a process of its own: its name, what a job needs for it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tfpreempt", "notify", "--serve", request.param],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    told = {}
    for line in process.stdout:
        if line.startswith("export "):
            name, _, value = line.removeprefix("export ").strip().partition("=")
            told[name] = value
        if "--metadata" in line:
            told["URL"] = line.split()[-1]
            break
    yield request.param, told
    process.terminate()
    assert process.wait(10) == 0


def test_a_server_gives_a_notice_and_takes_it_back(
    served: tuple[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud, told = served
    url = told.pop("URL")
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    variants = {"gce": "gce-spot", "aws": "aws", "azure": "azure"}

    def states() -> list[Liveness]:
        config = VARIANTS[variants[cloud]]()
        return [each.state for each in probe_sources(config.watched_sources())]

    assert set(states()) == {Liveness.LIVE}
    result = notify(url, "--hold", "0")
    assert result.exit_code == 0, result.output
    assert Liveness.NOTICE in states()
    result = notify(url, "--hold", "0.01")
    assert f"{url} is quiet again" in result.output
    assert set(states()) == {Liveness.LIVE}
    result = notify(url, "--topic", "nothing")
    assert result.exit_code == 1
    assert '--topic "nothing": expected one of' in result.output


TOPICS = [
    (server, topic)
    for server in (RehearsalGce, RehearsalAws, RehearsalAzure)
    for topic in server.topics
]


def watch(server: type[Rehearsal], topic: str, url: str) -> NoticeSource:
    """What a job has that watches this topic."""
    if server is RehearsalGce:
        return GceWatch([topic], url=url, maintenance_lead_seconds=600).source(topic)
    if server is RehearsalAws:
        return AwsWatch([topic], url=url, interval=0.01).source(topic)
    return AzureWatch([topic], url=url, interval=0.01).source(topic)


@pytest.mark.slow  # each waits for its job
@pytest.mark.parametrize(("server", "topic"), TOPICS)
def test_every_topic_is_held_until_its_client_has_asked(
    server: type[Rehearsal], topic: str
) -> None:
    """Whenever that is; and the notice reaches it."""
    heard = threading.Event()
    with server() as served:
        source = watch(server, topic, served.url)
        watcher = Watcher([WatchedSource(source, 5.0)], 0, lambda _: heard.set())
        if topic == "rebalance":  # one from before the job's start is no notice
            watcher.start()
        else:
            threading.Timer(0.3, watcher.start).start()
        try:
            result = notify(served.url, "--topic", topic)
            assert heard.wait(10)
        finally:
            watcher.close()
        assert result.exit_code == 0, result.output
        assert result.output.splitlines() == [
            f"{served.url} says {topic}, until the job has asked",
            f"the job was told {topic}",
            f"{served.url} is quiet again",
        ]
        assert control(served.url) == "0"


@pytest.mark.parametrize("server", [RehearsalGce, RehearsalAws, RehearsalAzure])
def test_what_nobody_has_asked_for_was_not_told(
    server: type[Rehearsal], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfpreempt.cli.notify.command._ASK_SECONDS", 0.2)
    with server() as served:
        result = notify(served.url)
    assert result.exit_code == 1
    assert "is quiet again" in result.output
    assert f"nobody has asked {served.url} for {next(iter(server.topics))} within" in (
        result.output
    )


def test_an_answer_without_the_notice_does_not_count() -> None:
    with RehearsalGce() as served:
        session = MetadataSession(served.url)
        control(served.url, topic="maintenance-event", is_up=1)
        headers = {"Metadata-Flavor": "Google"}
        session.request("/computeMetadata/v1/instance/preempted", headers=headers)
        assert control(served.url) == "0"
        path = "/computeMetadata/v1/instance/?recursive=true"
        session.request(path, headers=headers)
        assert control(served.url) == "1"
        session.close()


def test_the_help_names_every_topic() -> None:
    text = CliRunner().invoke(main, ["notify", "--help"]).output
    assert [topic for _, topic in TOPICS if topic not in "".join(text.split())] == []


def test_a_real_metadata_server_is_not_taken_for_one() -> None:
    with FakeGce() as fake:
        result = notify(fake.url)
    assert result.exit_code == 1
    assert "expected a server of `tfpreempt notify --serve`" in result.output


@pytest.mark.parametrize("server", [RehearsalGce, RehearsalAws, RehearsalAzure])
def test_a_server_that_is_started_again_may_have_its_old_address(
    server: type[Rehearsal],
) -> None:
    with server() as first:
        port = int(first.url.rpartition(":")[2])
        with pytest.raises(ConfigurationError, match=f"--port {port}: cannot listen"):
            server(port)
    with server(port) as second:
        assert second.url == first.url
        assert second.environment() == first.environment()


def test_nobody_listens() -> None:
    with FakeGce() as fake:
        url = fake.url
    result = notify(url)
    assert result.exit_code == 1
    assert f"no rehearsal server listens at --metadata {url}" in result.output
    assert notify("https://example.test/x").exit_code == 1
