"""Probes of the platform end in time, on each cloud's fake and on other servers."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from tests.fakes.hostile import KINDS, HostileServer
from tests.notice.rigs import wait_until
from tfpreempt.platforms import metadata_probe
from tfpreempt.platforms.detect import detect_platform
from tfpreempt.platforms.metadata_probe import Probe
from tfpreempt.testing._server import FakeServer, Reply, Request
from tfpreempt.testing.metadata import (
    FakeAws,
    FakeAzure,
    FakeGce,
)

pytestmark = pytest.mark.slow  # real servers, with their time-outs


def test_the_limit_is_at_most_300_ms() -> None:
    assert metadata_probe.LIMIT_SECONDS <= 0.3


def test_servers_that_never_answer_do_not_delay_the_detection(tmp_path: Path) -> None:
    """With the default timeout; the threads of the probes end, too."""
    with FakeGce() as google, FakeAws() as amazon, FakeAzure() as microsoft:
        fakes = (google, amazon, microsoft)
        environment: dict[str, str] = {}
        for fake in fakes:
            fake.stall()
            environment |= fake.environment()
        began = time.monotonic()
        found = detect_platform(environment=environment, root=tmp_path)
        assert time.monotonic() - began < 5.0  # it waits for 0.25 s
        assert found.name == "generic"
        assert wait_until(lambda: all(fake.requests for fake in fakes))
        assert wait_until(lambda: not probe_threads(), limit=5.0)


def probe_threads() -> list[str]:
    names = [each.name for each in threading.enumerate()]
    return [name for name in names if name.startswith("tfpreempt-probe-")]


@pytest.mark.parametrize(
    ("fake_type", "name", "evidence"),
    [
        (FakeAws, "aws", "gives tokens of EC2"),
        (FakeAzure, "azure", "calls this VM 'trainer_0'"),
    ],
)
def test_the_other_clouds_identify_themselves(
    fake_type: type[FakeAws | FakeAzure], name: str, evidence: str, tmp_path: Path
) -> None:
    with fake_type() as fake:
        found = detect_platform(
            environment=fake.environment(),
            root=tmp_path,
            probes={name: metadata_probe.PROBES[name]},
            limit_seconds=10.0,
        )
        assert found.name == name
        assert evidence in found.evidence[0]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_server_of_another_kind_names_nothing(kind: str, tmp_path: Path) -> None:
    """For any reply, the detection ends in time and names no cloud."""
    with HostileServer(kind) as hostile:
        began = time.monotonic()
        found = detect_platform(
            environment=hostile.environment(), root=tmp_path, limit_seconds=0.2
        )
        assert found.name == "generic"
        assert time.monotonic() - began < 5.0


@pytest.mark.parametrize("kind", ["huge", "endless", "negative-chunk"])
def test_every_probe_ends(kind: str) -> None:
    with HostileServer(kind) as hostile:
        environment = hostile.environment()
        assert metadata_probe.probe_all(metadata_probe.PROBES, environment, 0.2) is None
        assert wait_until(lambda: not probe_threads(), limit=5.0)


def test_a_server_that_fails_is_no_evidence(tmp_path: Path) -> None:
    with FakeGce() as fake:
        fake.fail(100)
        assert (
            metadata_probe.probe_all(
                {"gce": metadata_probe.probe_gce}, fake.environment(), 10.0
            )
            is None
        )
        fake.fail(0)
        fake.down()
        assert (
            metadata_probe.probe_all(
                {"gce": metadata_probe.probe_gce}, fake.environment(), 10.0
            )
            is None
        )


@pytest.mark.parametrize(
    ("headers", "body", "is_gce"),
    [
        ({"metadata-flavor": "Google"}, b'{"id": 1}', True),
        ({}, b'{"id": 1}', False),
        ({"metadata-flavor": "Other"}, b'{"id": 1}', False),
        ({"metadata-flavor": "Google"}, b"{}", False),
        ({"metadata-flavor": "Google"}, b"[]", False),
    ],
)
def test_gce_is_known_by_its_header_and_the_instance_s_id(
    headers: dict[str, str], body: bytes, is_gce: bool
) -> None:
    class Server(FakeServer):
        def answer(self, request: Request) -> Reply:
            return Reply(headers=headers, body=body)

    with Server() as server:
        environment = {"GCE_METADATA_HOST": server.host}
        assert (metadata_probe.probe_gce(environment, 5.0) is not None) is is_gce


def test_the_end_of_an_ipv6_address_is_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def connect(address: object, *more: object) -> None:
        asked.append(address)
        raise OSError("not here")

    monkeypatch.setattr(socket, "create_connection", connect)
    environment = {"AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE": "IPv6"}
    probes = {"aws": metadata_probe.probe_aws}
    assert metadata_probe.probe_all(probes, environment, 5.0) is None
    assert asked == [("fd00:ec2::254", 80)]


@pytest.mark.parametrize(
    ("fake_type", "name", "forbids"),
    [
        (FakeGce, "gce", {"NO_GCE_CHECK": "true"}),
        (FakeAws, "aws", {"AWS_EC2_METADATA_DISABLED": "true"}),
    ],
)
def test_a_variable_can_forbid_to_ask(
    fake_type: type[FakeGce | FakeAws], name: str, forbids: dict[str, str]
) -> None:
    probes = {name: metadata_probe.PROBES[name]}
    with fake_type() as fake:
        assert metadata_probe.probe_all(probes, fake.environment(), 5.0) is not None
        asked = len(fake.requests)
        environment = {**fake.environment(), **forbids}
        assert metadata_probe.probe_all(probes, environment, 5.0) is None
        assert len(fake.requests) == asked


@pytest.mark.parametrize("probe", metadata_probe.PROBES.values())
def test_an_address_that_is_none_is_no_evidence(probe: Probe) -> None:
    names = (
        "GCE_METADATA_HOST",
        "AWS_EC2_METADATA_SERVICE_ENDPOINT",
        "TFPREEMPT_AZURE_METADATA",
    )
    environment = dict.fromkeys(names, "https://example.test")
    asked = {"one": probe}
    assert metadata_probe.probe_all(asked, environment, 0.2) is None
