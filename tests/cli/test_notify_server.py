"""`tfpreempt notify --serve` and `--metadata`: a cloud's server, and what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tfpreempt.cli import main
from tfpreempt.cli._doctor_facts import Liveness
from tfpreempt.cli._doctor_sources import probe_sources
from tfpreempt.cli._notify_server import (
    RehearsalAws,
    RehearsalAzure,
    RehearsalGce,
    tell,
)
from tfpreempt.notice._http import MetadataSession
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
        return [each.liveness for each in probe_sources(config.watched_sources())]

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


@pytest.mark.parametrize(
    ("server", "topic", "path", "text"),
    [
        (
            RehearsalGce,
            "maintenance-event",
            "/computeMetadata/v1/instance/maintenance-event",
            "TERMINATE",
        ),
        (
            RehearsalAws,
            "rebalance",
            "/latest/meta-data/events/recommendations/rebalance",
            "noticeTime",
        ),
        (
            RehearsalAzure,
            "Reboot",
            "/metadata/scheduledevents?api-version=2020-07-01",
            "Reboot",
        ),
    ],
)
def test_other_topics(
    server: type[RehearsalGce | RehearsalAws | RehearsalAzure],
    topic: str,
    path: str,
    text: str,
) -> None:
    with server() as served:
        session = MetadataSession(served.url)

        def says() -> bool:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
            token = session.request("/latest/api/token", method="PUT", headers=ttl)
            headers = {"Metadata-Flavor": "Google", "Metadata": "true"}
            if server is RehearsalAws:
                headers["X-aws-ec2-metadata-token"] = token.text()
            return text in session.request(path, headers=headers).text()

        assert not says()
        assert tell(served.url, topic, is_up=True) == topic
        assert says()
        tell(served.url, topic, is_up=False)
        assert not says()
        session.close()


def test_a_real_metadata_server_is_not_taken_for_one() -> None:
    with FakeGce() as fake:
        result = notify(fake.url)
    assert result.exit_code == 1
    assert "expected a server of `tfpreempt notify --serve`" in result.output


def test_nobody_listens() -> None:
    with FakeGce() as fake:
        url = fake.url
    result = notify(url)
    assert result.exit_code == 1
    assert f"no rehearsal server listens at --metadata {url}" in result.output
    assert notify("https://example.test/x").exit_code == 1
