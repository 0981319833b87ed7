"""The fake metadata servers: their traps, and other clients with them.

A fake that only its author's client uses may have the errors of this client. Therefore
google-auth and botocore, which work with the real services, are clients here.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from tests.fakes.clock import FakeClock
from tests.fakes.hostile import HostileServer
from tests.notice.rigs import wait_until
from tfpreempt.testing._server import FakeServer
from tfpreempt.testing.metadata import (
    FakeAws,
    FakeAzure,
    FakeGce,
    Reply,
    Request,
)

pytestmark = pytest.mark.slow  # real servers, and interpreters

GOOGLE = {"Metadata-Flavor": "Google"}
TTL = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
AZURE = {"Metadata": "true"}
EVENTS = "/metadata/scheduledevents"


@pytest.fixture
def gce() -> Iterator[FakeGce]:
    with FakeGce() as fake:
        yield fake


@pytest.fixture
def aws() -> Iterator[FakeAws]:
    with FakeAws() as fake:
        yield fake


@pytest.fixture
def azure() -> Iterator[FakeAzure]:
    with FakeAzure() as fake:
        yield fake


def ask(
    fake: FakeServer,
    target: str,
    headers: dict[str, str] | None = None,
    method: str = "GET",
    body: str | None = None,
) -> requests.Response:
    return requests.request(
        method,
        fake.url + target,
        headers=headers,
        data=body,
        allow_redirects=False,
        timeout=10,
    )


def gce_get(fake: FakeGce, path: str, **query: str) -> requests.Response:
    text = "&".join(f"{name}={value}" for name, value in query.items())
    return ask(fake, f"/computeMetadata/v1/{path}?{text}", GOOGLE)


# --- other people's clients ----------------------------------------------------------
# Each is imported by its tests: to collect this file needs none of them.


def google_auth_gets(gce: FakeGce, path: str, **options: Any) -> Any:
    from google.auth.compute_engine import _metadata
    from google.auth.transport.requests import Request as GoogleRequest

    root = f"{gce.url}/computeMetadata/v1/"
    return _metadata.get(GoogleRequest(), path, root=root, **options)


def botocore_fetcher(kind: str, **options: Any) -> Any:
    from botocore import utils

    return getattr(utils, kind)(timeout=5, **options)


def test_google_auth_finds_the_server_by_its_variables(gce: FakeGce) -> None:
    code = (
        "from google.auth.compute_engine import _metadata as m; "
        "from google.auth.transport.requests import Request; r = Request(); "
        "assert m.ping(r) and m.is_on_gce(r); "
        "print(m.get_project_id(r), m.get_service_account_info(r)['email'])"
    )
    environment = {**os.environ, **gce.environment()}
    environment.pop("NO_GCE_CHECK", None)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    project, email = done.stdout.split()
    assert project == "example-project"
    assert email == "trainer@example-project.iam.gserviceaccount.com"


def test_google_auth_reads_entries_and_directories(gce: FakeGce) -> None:
    assert google_auth_gets(gce, "instance/preempted") == "FALSE"
    tree = google_auth_gets(gce, "instance/", recursive=True)
    assert tree["maintenanceEvent"] == "NONE"
    assert "startup-script" in tree["attributes"]  # the user's names stay
    gce.preempt()
    assert google_auth_gets(gce, "instance/preempted") == "TRUE"


def test_google_auth_waits_for_a_change(gce: FakeGce) -> None:
    etag = gce_get(gce, "instance/preempted").headers["ETag"]
    timer = threading.Timer(0.1, gce.preempt)
    timer.start()
    value = google_auth_gets(
        gce,
        "instance/preempted",
        params={"wait_for_change": "true", "last_etag": etag, "timeout_sec": "5"},
    )
    timer.join()
    assert value == "TRUE"


@pytest.mark.slow
def test_google_auth_lives_through_a_burst_of_503(gce: FakeGce) -> None:
    gce.fail(1)
    assert google_auth_gets(gce, "project/project-id")
    assert len(gce.requests) == 2


def test_botocore_gets_credentials_with_a_token(aws: FakeAws) -> None:
    fetcher = botocore_fetcher(
        "InstanceMetadataFetcher", base_url=f"{aws.url}/", env=aws.environment()
    )
    found = fetcher.retrieve_iam_role_credentials()
    assert (found["role_name"], found["access_key"]) == ("trainer", "EXAMPLE")
    assert aws.requests[0].method == "PUT"
    assert "x-aws-ec2-metadata-token" in aws.requests[-1].headers


def test_botocore_learns_the_region(aws: FakeAws) -> None:
    endpoint = aws.environment()["AWS_EC2_METADATA_SERVICE_ENDPOINT"]
    config = {"ec2_metadata_service_endpoint": endpoint}
    fetcher = botocore_fetcher("InstanceMetadataRegionFetcher", config=config, env={})
    assert fetcher.retrieve_region() == "eu-central-1"


def test_botocore_is_refused_when_it_has_no_token(aws: FakeAws) -> None:
    aws.fail(1, status=403)  # the answer to its PUT: it then asks as in version 1
    fetcher = botocore_fetcher(
        "InstanceMetadataRegionFetcher", base_url=f"{aws.url}/", env={}
    )
    assert fetcher.retrieve_region() is None


# --- Google's traps ------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers", [{}, {"Metadata-Flavor": "x"}, {**GOOGLE, "X-Forwarded-For": "10.0.0.1"}]
)
def test_gce_refuses_requests_of_other_clients(
    gce: FakeGce, headers: dict[str, str]
) -> None:
    answer = ask(gce, "/computeMetadata/v1/instance/preempted", headers)
    assert answer.status_code == 403


def test_gce_directories(gce: FakeGce) -> None:
    redirect = gce_get(gce, "instance")
    assert redirect.status_code == 301
    assert redirect.headers["Location"].endswith("/computeMetadata/v1/instance/")
    listing = gce_get(gce, "instance/")
    assert "preempted\n" in listing.text
    assert "scheduling/\n" in listing.text
    assert gce_get(gce, "instance/", wait_for_change="true").status_code == 400
    assert gce_get(gce, "instance/upcoming-maintenance/").status_code == 404


def test_gce_wait_ends_with_the_value_that_is_there(gce: FakeGce) -> None:
    etag = gce_get(gce, "instance/preempted").headers["ETag"]
    answer = gce_get(
        gce,
        "instance/preempted",
        wait_for_change="true",
        timeout_sec="0",
        last_etag=etag,
    )
    assert (answer.status_code, answer.text) == (200, "FALSE")
    assert answer.headers["ETag"] == etag
    assert answer.headers["Metadata-Flavor"] == "Google"


def test_gce_stale_etag_returns_at_once_and_a_content_has_one_etag(
    gce: FakeGce,
) -> None:
    etags = []
    for value in ("FALSE", "TRUE", "FALSE"):
        gce.set("instance/preempted", value)
        answer = gce_get(
            gce, "instance/preempted", wait_for_change="true", last_etag="0"
        )
        etags.append(answer.headers["ETag"])
    assert etags[0] == etags[2] != etags[1]


def test_gce_wait_without_an_etag_misses_earlier_changes(gce: FakeGce) -> None:
    gce.preempt()
    answers: list[str] = []
    thread = threading.Thread(
        target=lambda: answers.append(
            gce_get(gce, "instance/preempted", wait_for_change="true").text
        )
    )
    thread.start()
    assert wait_until(lambda: gce.hanging == 1)
    assert answers == []
    gce.set("instance/preempted", "FALSE")
    thread.join(10.0)
    assert answers == ["FALSE"]


# --- Amazon's traps ------------------------------------------------------------------


def test_aws_tokens() -> None:
    clock = FakeClock()
    with FakeAws(monotonic=clock.monotonic) as aws:
        assert ask(aws, "/latest/meta-data/instance-id").status_code == 401
        assert ask(aws, "/latest/api/token", method="PUT").status_code == 400
        assert ask(aws, "/latest/api/token", TTL).status_code == 405
        forwarded = {**TTL, "X-Forwarded-For": "10.0.0.1"}
        assert ask(aws, "/latest/api/token", forwarded, "PUT").status_code == 403
        token = ask(aws, "/latest/api/token", TTL, "PUT")
        assert token.headers["X-Aws-Ec2-Metadata-Token-Ttl-Seconds"] == "60"
        headers = {"X-aws-ec2-metadata-token": token.text}
        assert ask(aws, "/latest/meta-data/instance-id", headers).ok
        missing = ask(aws, "/latest/meta-data/spot/instance-action", headers)
        assert missing.status_code == 404
        clock.advance(61.0)
        assert ask(aws, "/latest/meta-data/instance-id", headers).status_code == 401


def test_aws_interruption(aws: FakeAws) -> None:
    aws.interrupt("hibernate")
    headers = {
        "X-aws-ec2-metadata-token": ask(aws, "/latest/api/token", TTL, "PUT").text
    }
    said = ask(aws, "/latest/meta-data/spot/instance-action", headers).json()
    assert said["action"] == "hibernate"
    assert said["time"].endswith("Z")


# --- Azure's traps -------------------------------------------------------------------


def test_azure_refuses_without_header_and_version(azure: FakeAzure) -> None:
    version = "?api-version=2020-07-01"
    assert ask(azure, EVENTS + version).status_code == 400
    assert ask(azure, EVENTS, AZURE).status_code == 400
    forwarded = {**AZURE, "X-Forwarded-For": "10.0.0.1"}
    assert ask(azure, EVENTS + version, forwarded).status_code == 400
    document = ask(azure, EVENTS + version, AZURE).json()
    assert document == {"DocumentIncarnation": 1, "Events": []}


def test_azure_acknowledgements(azure: FakeAzure) -> None:
    target = f"{EVENTS}?api-version=2020-07-01"
    identity = azure.schedule("Reboot", resources=["other"])
    for body in ("", "{}", '{"StartRequests": [{"EventId": "unknown"}]}'):
        assert ask(azure, target, AZURE, "POST", body).status_code == 400
    good = json.dumps({"StartRequests": [{"EventId": identity}]})
    assert ask(azure, target, AZURE, "POST", good).status_code == 200
    event = ask(azure, target, AZURE).json()["Events"][0]
    assert (event["EventStatus"], event["NotBefore"]) == ("Started", "")
    assert event["Resources"] == ["other"]


# --- all of them ---------------------------------------------------------------------


class Echo(FakeServer):
    def answer(self, request: Request) -> Reply:
        return Reply(body=request.body)


def test_failures_are_counted_and_end() -> None:
    with Echo() as fake:
        fake.fail(2, status=500)
        assert [ask(fake, "/").status_code for _ in range(3)] == [500, 500, 200]
        fake.fail(100)
        fake.fail(0)
        assert ask(fake, "/", body="x").text == "x"


def test_a_stalled_request_gets_other_requested_faults() -> None:
    with Echo() as fake:
        fake.fail(1)
        fake.stall(2)
        said: list[int] = []
        thread = threading.Thread(
            target=lambda: said.append(ask(fake, "/").status_code)
        )
        thread.start()
        assert wait_until(lambda: len(fake.requests) == 1)
        assert said == []
        fake.up()  # also for the second one, which has not come yet
        thread.join(10.0)
        assert said == [503]
        assert ask(fake, "/").status_code == 200


def test_down_drops_and_up_serves() -> None:
    with Echo() as fake:
        connection = http.client.HTTPConnection(fake.host, timeout=10)
        connection.request("GET", "/")
        assert connection.getresponse().read() == b""
        fake.down()
        connection.close()
        with pytest.raises(requests.ConnectionError):
            ask(fake, "/")
        fake.up()
        assert ask(fake, "/").status_code == 200


@pytest.mark.parametrize("kind", [FakeGce, FakeAws, FakeAzure])
def test_closing_ends_threads_and_waiting_requests(kind: type[FakeServer]) -> None:
    before = set(threading.enumerate())
    fake = kind()
    fake.stall()
    errors: list[Exception] = []

    def wait() -> None:
        try:
            ask(fake, "/computeMetadata/v1/instance/preempted", GOOGLE)
        except requests.RequestException as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert wait_until(lambda: len(fake.requests) == 1)
    began = time.monotonic()
    fake.close()
    fake.close()
    thread.join(10.0)
    assert time.monotonic() - began < 5.0
    assert len(errors) == 1
    assert wait_until(lambda: set(threading.enumerate()) <= before)


def test_an_unknown_kind_of_hostile_server_names_the_kinds() -> None:
    with pytest.raises(ValueError, match=r"expected one of.*endless"):
        HostileServer("friendly")
