"""`tfpreempt simulate --serve` and `--metadata`: a cloud's server and its replies."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.cli.conftest import wait_until
from tfpreempt.cli import main
from tfpreempt.cli.doctor.sources import SourceHealth, probe_sources
from tfpreempt.cli.simulate.server import (
    SimulatedAwsMetadata,
    SimulatedAzureMetadata,
    SimulatedGceMetadata,
    SimulatedMetadata,
)
from tfpreempt.errors import ConfigurationError
from tfpreempt.notice.aws import AwsWatch
from tfpreempt.notice.azure import AzureWatch
from tfpreempt.notice.gce import GceWatch
from tfpreempt.notice.metadata_session import MetadataSession
from tfpreempt.notice.source import NoticeSource
from tfpreempt.notice.watcher import NoticeSourceConfig, Watcher
from tfpreempt.platforms.detect import VARIANTS
from tfpreempt.testing.metadata import FakeGce

pytestmark = pytest.mark.slow  # starts interpreters

ROOT = Path(__file__).parents[2]


def notify(url: str) -> Result:
    return CliRunner().invoke(main, ["simulate", "--metadata", url])


@pytest.fixture(params=["gce", "aws", "azure"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[str, dict[str, str]]]:
    """Starts a cloud's server; returns its name and a job's environment."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tfpreempt", "simulate", "--serve", request.param],
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

    def states() -> list[SourceHealth]:
        config = VARIANTS[variants[cloud]]()
        return [each.state for each in probe_sources(config._notice_sources())]

    assert set(states()) == {SourceHealth.WORKING}
    with ThreadPoolExecutor() as pool:
        announced = pool.submit(notify, url)
        wait_until(lambda: SourceHealth.NOTICE in states(), "the notice")
    assert announced.result().exit_code == 0, announced.result().output
    assert f"{url} has withdrawn the notice" in announced.result().output
    assert set(states()) == {SourceHealth.WORKING}


SERVERS: dict[type[SimulatedMetadata], Callable[[str], NoticeSource]] = {
    SimulatedGceMetadata: lambda url: GceWatch(["preempted"], url=url).source(
        "preempted"
    ),
    SimulatedAwsMetadata: lambda url: AwsWatch(
        ["spot-interruption"], url=url, interval=0.01
    ).source("spot-interruption"),
    SimulatedAzureMetadata: lambda url: AzureWatch(
        ["Preempt"], url=url, interval=0.01
    ).source("Preempt"),
}


@pytest.mark.slow  # each waits for its job
@pytest.mark.parametrize("server", SERVERS)
def test_a_notice_is_up_until_the_job_has_asked(
    server: type[SimulatedMetadata],
) -> None:
    """For any delay of the poll, the job gets the notice."""
    with server() as served:
        for _ in range(2):
            heard = threading.Event()
            source = SERVERS[server](served.url)
            watcher = Watcher(
                [NoticeSourceConfig(source, 5.0)],
                0,
                lambda _: heard.set(),  # noqa: B023
            )
            threading.Timer(0.3, watcher.start).start()
            try:
                result = notify(served.url)
                assert heard.wait(10)
            finally:
                watcher.close()
            assert result.exit_code == 0, result.output
            assert result.output.splitlines() == [
                f"{served.url} announces a preemption until the job has read the "
                "notice (at most 30 s)",
                f"the job has read the notice; {served.url} has withdrawn the notice",
            ]


@pytest.mark.parametrize("server", SERVERS)
def test_a_notice_that_no_client_requested_was_not_delivered(
    server: type[SimulatedMetadata], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfpreempt.cli.simulate.server.ASK_SECONDS", 0.2)
    with server() as served:
        result = notify(served.url)
    assert result.exit_code == 1
    assert f"no job has read the notice of {served.url} within" in result.output
    assert "the notice is withdrawn" in result.output


def test_an_answer_without_the_notice_does_not_count() -> None:
    headers = {"Metadata-Flavor": "Google"}
    with SimulatedGceMetadata() as served, ThreadPoolExecutor() as pool:
        session = MetadataSession(served.url)
        announced = pool.submit(notify, served.url)
        path = "/computeMetadata/v1/instance/"
        wait_until(lambda: bool(served.requests), "the order to give it")
        for name in ("name", "maintenance-event") * 10:
            session.request(f"{path}{name}", headers=headers)
        assert not announced.done()
        session.request(f"{path}?recursive=true", headers=headers)
        assert announced.result(10).exit_code == 0
        session.close()


def test_a_real_metadata_server_is_not_taken_for_one() -> None:
    with FakeGce() as fake:
        result = notify(fake.url)
    assert result.exit_code == 1
    assert "status 403" in result.output
    assert "a real metadata server cannot simulate" in result.output


@pytest.mark.parametrize("server", SERVERS)
def test_a_server_that_is_started_again_may_have_its_old_address(
    server: type[SimulatedMetadata],
) -> None:
    with server() as first:
        port = int(first.url.rpartition(":")[2])
        with pytest.raises(ConfigurationError, match=f"--port {port}: cannot listen"):
            server(port)
    with server(port) as second:
        assert second.url == first.url
        assert second.environment() == first.environment()


def test_no_server_listens() -> None:
    with FakeGce() as fake:
        url = fake.url
    result = notify(url)
    assert result.exit_code == 1
    assert f"no simulated metadata server listens at --metadata {url}" in result.output
    assert notify("https://example.test/x").exit_code == 1
