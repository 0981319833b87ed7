"""Sources of all clouds with slow, wrong or hostile servers."""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping

import pytest

from tests.fakes.clock import FakeClock
from tests.fakes.hostile import KINDS, HostileServer
from tests.notice.rigs import wait_until
from tests.notice.server_rigs import QUICK_SECONDS, hurry
from tfpreempt.notice import aws, azure, gce
from tfpreempt.notice.polling import Wait
from tfpreempt.notice.source import NoticeSource
from tfpreempt.platforms import metadata_probe
from tfpreempt.testing._server import FakeServer, Reply, Request
from tfpreempt.testing.metadata import (
    FakeAws,
    FakeAzure,
    FakeGce,
)

pytestmark = pytest.mark.slow  # real servers with timeouts


@dataclasses.dataclass(frozen=True)
class Cloud:
    """One cloud's source, and the fake of its real service."""

    name: str
    source: Callable[[str, Wait], NoticeSource]
    fake: Callable[[], FakeServer]
    variable: str  # names the server

    def is_known(self, environment: Mapping[str, str], seconds: float = 5.0) -> bool:
        """Whether the cloud's own probe, asked alone, takes a server for its own."""
        probes = {self.name: metadata_probe.PROBES[self.name]}
        return metadata_probe.probe_all(probes, environment, seconds) is not None


CLOUDS = [
    Cloud(
        "gce",
        lambda url, wait: gce.GceWatch(url=url, wait=wait).source("preempted"),
        FakeGce,
        gce.HOST_VARIABLES[0],
    ),
    Cloud(
        "aws",
        lambda url, wait: aws.AwsWatch(url=url, wait=wait).source("lifecycle"),
        FakeAws,
        aws.ENDPOINT_VARIABLE,
    ),
    Cloud(
        "azure",
        lambda url, wait: azure.AzureWatch(url=url, wait=wait).source("Preempt"),
        FakeAzure,
        azure.HOST_VARIABLE,
    ),
]
each_cloud = pytest.mark.parametrize("cloud", CLOUDS, ids=lambda cloud: cloud.name)


@each_cloud
@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_server_is_no_notice_and_one_warning(
    cloud: Cloud,
    kind: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "drip" in kind:
        hurry(monkeypatch)
    clock, heard = FakeClock(), []
    with HostileServer(kind) as hostile:
        source = cloud.source(hostile.url, clock.wait)
        source.start(heard.append)
        clock.wait_for_waiters()
        clock.advance(60.0)
        clock.wait_for_waiters()
        source.close()
    assert heard == []
    told = [each.getMessage() for each in caplog.records]
    assert len(told) == 1, told
    assert cloud.name in told[0]
    assert len(json.dumps(told[0])) < 1000


@each_cloud
@pytest.mark.parametrize("page", ["<html>'{n}'</html>", '["{n}"]', "[{n}]", '"{n}"'])
def test_a_page_that_is_always_new_is_one_fault(
    cloud: Cloud,
    page: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where only the entries are replaced, and names and tokens are not."""
    clock, numbers = FakeClock(), itertools.count(1)
    with cloud.fake() as fake:
        answer = fake.answer

        def replace(request: Request) -> Reply:
            reply = answer(request)
            if "token" in request.path or request.path.endswith("/name"):
                return reply
            body = page.replace("{n}", f"{next(numbers)}" * 300).encode()
            return Reply(body=body, headers={**reply.headers, "ETag": ""})

        monkeypatch.setattr(fake, "answer", replace)
        source = cloud.source(fake.url, clock.wait)
        source.start(lambda detail: None)
        for _ in range(5):
            clock.wait_for_waiters()
            clock.advance(60.0)
        clock.wait_for_waiters()
        assert len(caplog.records) == 1
        # Another fault is reported, although the first fault has not ended.
        fake.down()
        for _ in range(2):
            clock.advance(60.0)
            clock.wait_for_waiters()
        source.close()
    assert len(caplog.records) == 2


@each_cloud
def test_a_redirect_leads_nowhere(cloud: Cloud) -> None:
    with cloud.fake() as elsewhere:
        with HostileServer("redirect", elsewhere=f"{elsewhere.url}/") as hostile:
            source = cloud.source(hostile.url, threading.Event.wait)
            source.start(lambda detail: None)
            assert wait_until(lambda: len(hostile.requests) > 1)
            source.close()
        assert elsewhere.requests == []


@each_cloud
def test_a_timeout_is_logged_once_and_polling_continues(
    cloud: Cloud, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    clock = FakeClock()
    with cloud.fake() as fake:
        fake.stall()
        source = cloud.source(fake.url, clock.wait)
        source.start(lambda detail: None)
        clock.wait_for_waiters()
        clock.advance(60.0)
        clock.wait_for_waiters()
        fake.up()
        clock.advance(60.0)
        assert wait_until(lambda: "works again" in caplog.text)
        source.close()
    told = [each.getMessage() for each in caplog.records]
    assert len(told) == 2, told
    assert "not complete in time" in told[0]


@each_cloud
def test_a_closed_port_does_not_delay_the_start(cloud: Cloud) -> None:
    with cloud.fake() as fake:
        url = fake.url
    source = cloud.source(url, threading.Event.wait)
    began = time.monotonic()
    source.start(lambda detail: None)
    source.close()
    assert time.monotonic() - began < 1.5


# --- detection -----------------------------------------------------------------------


@each_cloud
def test_each_service_is_known_by_its_own_probe_alone(cloud: Cloud) -> None:
    with cloud.fake() as fake:
        answers = {
            each.name: each.is_known({each.variable: fake.url}) for each in CLOUDS
        }
        assert answers == {each.name: each is cloud for each in CLOUDS}
        assert cloud.is_known(fake.environment())


def test_services_that_are_excluded_are_not_asked() -> None:
    gce_cloud, aws_cloud, _ = CLOUDS
    with FakeGce() as google, FakeAws() as amazon:
        environment = {
            **google.environment(),
            **amazon.environment(),
            "NO_GCE_CHECK": "true",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        assert not gce_cloud.is_known(environment)
        assert not aws_cloud.is_known(environment)
        assert google.requests == amazon.requests == []


@each_cloud
@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_server_is_no_cloud(cloud: Cloud, kind: str) -> None:
    with HostileServer(kind) as hostile:
        seconds = QUICK_SECONDS if "drip" in kind else 5.0
        assert not cloud.is_known({cloud.variable: hostile.url}, seconds)
