"""Requests to metadata servers end in time and stay small, for any reply."""

from __future__ import annotations

import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator

import pytest

from tests.fakes.hostile import HostileServer
from tests.fakes.replies import BrokenReply
from tests.notice.rigs import wait_until
from tfpreempt import errors
from tfpreempt.notice.metadata_session import (
    Answer,
    MetadataSession,
    checked_base_url,
    epoch_seconds,
)
from tfpreempt.testing._server import FakeServer, Reply, Request
from tfpreempt.testing.metadata import FakeGce

pytestmark = pytest.mark.slow  # real servers, with their time-outs

FLAVOR = {"Metadata-Flavor": "Google"}
NAME = "/computeMetadata/v1/instance/name?alt=json"
QUICK = 0.3  # seconds


@pytest.fixture
def fake() -> Iterator[FakeGce]:
    with FakeGce() as server:
        yield server


@pytest.fixture
def session(fake: FakeGce) -> Iterator[MetadataSession]:
    made = MetadataSession(fake.url)
    yield made
    made.close()


def connections() -> int:
    names = [each.name for each in threading.enumerate()]
    return names.count("fake-metadata-connection")


def test_an_answer_has_status_headers_and_body(session: MetadataSession) -> None:
    answer = session.request(NAME, headers=FLAVOR)
    assert (answer.status, answer.json()) == (200, "trainer-0")
    assert answer.headers["metadata-flavor"] == "Google"
    assert answer.text() == '"trainer-0"'


def test_a_connection_ends_with_its_request(session: MetadataSession) -> None:
    for _ in range(3):
        session.request(NAME, headers=FLAVOR)
    assert wait_until(lambda: connections() == 0)


def test_a_request_is_cheap(session: MetadataSession) -> None:
    """Azure is polled each second. `http.client` called nearly 500 functions."""
    session.request(NAME, headers=FLAVOR)
    count = 0

    def hook(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(hook)
    try:
        session.request(NAME, headers=FLAVOR)
    finally:
        sys.setprofile(None)
    assert count < 150


def test_proxies_and_netrc_are_not_used(
    fake: FakeGce,
    session: MetadataSession,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    netrc = tmp_path_factory.mktemp("home") / "netrc"
    netrc.write_text("default login me password secret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert session.request(NAME, headers=FLAVOR).status == 200
    assert "authorization" not in fake.requests[-1].headers


def test_a_redirect_is_an_answer_and_not_followed(fake: FakeGce) -> None:
    with HostileServer("redirect", elsewhere=fake.url) as hostile:
        session = MetadataSession(hostile.url)
        answer = session.request("/", headers=FLAVOR)
        session.close()
    assert (answer.status, answer.headers["location"]) == (302, fake.url)
    assert fake.requests == []


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("huge", "longer than expected"),
        ("endless", "longer than expected"),
        ("negative-chunk", None),
        ("drip", "not complete in time"),
        ("drip-head", "not complete in time"),
        ("cut", "in the middle of the answer"),
        ("noise", None),
    ],
)
def test_a_hostile_answer_ends_in_time_and_stays_small(
    kind: str, reason: str | None
) -> None:
    with HostileServer(kind) as hostile:
        session = MetadataSession(hostile.url)
        with pytest.raises(errors.NoticeError, match=reason):
            # Imports and connects, so that only the answer is measured below.
            session.request("/", seconds=QUICK)
        tracemalloc.start()  # the fake's own 10 MB were made before
        began = time.monotonic()
        with pytest.raises(errors.NoticeError, match=reason):
            session.request("/", seconds=QUICK)
        took = time.monotonic() - began
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        session.close()
    assert took < 5.0  # it would never end
    assert peak < 2_000_000


def test_a_compressed_body_is_not_decompressed() -> None:
    with HostileServer("bomb") as hostile:
        session = MetadataSession(hostile.url)
        answer = session.request("/")
        session.close()
    assert answer.body == b"\x1f\x8b\x08\x00" * 100


class Saying(FakeServer):
    """Answers with these bytes, and closes the connection."""

    def __init__(self, said: bytes) -> None:
        self._said = said
        super().__init__()

    def answer(self, request: Request) -> Reply:
        return BrokenReply(body=self._said, is_raw=True)


def ask(said: bytes, body_bytes: int = 100) -> Answer:
    """Returns the result of a session for a reply."""
    with Saying(said) as server:
        session = MetadataSession(server.url)
        try:
            return session.request("/", seconds=5.0, body_bytes=body_bytes)
        finally:
            session.close()


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: Chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("said", "body"),
    [
        (OK + b"Content-Length: 2\r\n\r\nokay", b"ok"),
        (OK + b"\r\nto the end", b"to the end"),
        (b"HTTP/1.0 200\r\n\r\nno reason", b"no reason"),
        (b"HTTP/1.1 204 No Content\r\n\r\nnothing", b""),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"\r\nlater", b"later"),
        (CHUNKED + b"3;a=b\r\none\r\nA\r\n, two, six\r\n0\r\n\r\n", b"one, two, six"),
        (CHUNKED + b"1\r\nx\r\n0\r\nTrailer: y\r\nOther: z\r\n\r\n", b"x"),
        (CHUNKED + b"0\r\n\r\n", b""),
    ],
)
def test_the_head_determines_the_end_of_the_body(said: bytes, body: bytes) -> None:
    assert ask(said).body == body


def test_headers_have_lower_case_names_and_no_space_around() -> None:
    said = OK + b"X-Name:  a: b \r\nETAG:\r\nContent-Length: 0\r\n\r\n"
    assert ask(said).headers == {"x-name": "a: b", "etag": "", "content-length": "0"}


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"", "closed without an answer"),
        (b"HTTP/1.1 200 OK\r\nContent-", "in the middle"),
        (OK + b"Content-Length: 9\r\n\r\nshort", "in the middle"),
        (CHUNKED + b"9\r\nshort", "in the middle"),
        (CHUNKED + b"2\r\nok\r\n", "in the middle"),
        (CHUNKED + b"0\r\nTrailer: y", "in the middle"),
        (b"HTTP/2 200\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 99 Low\r\n\r\n", "not HTTP"),
        (OK + b"no colon\r\n\r\n", "not HTTP"),
        (OK + b"Content-Length: -1\r\n\r\n", "not HTTP"),
        (OK + b"Content-Length: 1_0\r\n\r\n", "not HTTP"),
        (CHUNKED + b"-3\r\none\r\n", "not HTTP"),
        (CHUNKED + b"0x3\r\none\r\n", "not HTTP"),
        (CHUNKED + b"\r\n", "not HTTP"),
        (CHUNKED + b"2\r\none\r\n", "not HTTP"),
        (OK + b"Content-Length: 101\r\n\r\n", "longer than expected"),
        (OK + b"\r\n" + b"x" * 101, "longer than expected"),
        (CHUNKED + b"60\r\n" + b"x" * 96 + b"\r\n5\r\n", "longer than expected"),
    ],
)
def test_an_answer_that_is_none_is_refused(said: bytes, reason: str) -> None:
    with pytest.raises(errors.NoticeError, match=reason):
        ask(said)


def test_a_body_is_sent_with_its_length(
    fake: FakeGce, session: MetadataSession
) -> None:
    session.request(NAME, method="POST", headers=FLAVOR, body=b"{}")
    session.request(NAME, method="PUT", headers=FLAVOR)
    posted, put = fake.requests
    assert (posted.method, posted.body, posted.length) == ("POST", b"{}", 2)
    assert (put.method, put.headers["content-length"]) == ("PUT", "0")
    assert posted.headers["host"] == fake.host


def test_a_body_over_the_limit_is_refused(session: MetadataSession) -> None:
    with pytest.raises(errors.NoticeError, match="longer than expected"):
        session.request(NAME, headers=FLAVOR, body_bytes=3)
    assert session.request(NAME, headers=FLAVOR).status == 200


def test_a_silent_server_is_abandoned_at_the_deadline(
    fake: FakeGce, session: MetadataSession
) -> None:
    fake.stall()
    began = time.monotonic()
    with pytest.raises(errors.NoticeError, match="not complete in time"):
        session.request(NAME, headers=FLAVOR, seconds=QUICK)
    assert 0.25 < time.monotonic() - began < 3.0
    fake.up()
    assert session.request(NAME, headers=FLAVOR).status == 200


def test_a_dropped_connection_and_a_closed_port_are_named(fake: FakeGce) -> None:
    session = MetadataSession(fake.url)
    fake.down()
    messages = []
    for _ in range(2):
        with pytest.raises(errors.NoticeError) as caught:
            session.request(NAME, headers=FLAVOR)
        messages.append(str(caught.value))
    fake.close()
    with pytest.raises(errors.NoticeError, match="Connection refused"):
        session.request(NAME, headers=FLAVOR)
    session.close()
    assert messages[0] == messages[1]  # the same fault, reported once
    assert messages[0].startswith(f"GET {fake.url}/computeMetadata/v1/instance/name: ")


def test_close_ends_a_request_that_waits(
    fake: FakeGce, session: MetadataSession
) -> None:
    fake.stall()
    raised: list[BaseException] = []

    def ask() -> None:
        try:
            session.request(NAME, headers=FLAVOR, seconds=30.0)
        except errors.NoticeError as error:
            raised.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert wait_until(lambda: len(fake.requests) == 1)
    began = time.monotonic()
    session.close()
    thread.join(10.0)
    assert time.monotonic() - began < 1.5
    assert len(raised) == 1
    with pytest.raises(errors.NoticeError, match="after the session was closed"):
        session.request(NAME)


def test_close_ends_a_request_with_an_endless_answer() -> None:
    """Also a reply that lasts until the end of its connection."""
    with HostileServer("drip") as hostile:
        session = MetadataSession(hostile.url)

        def ask() -> None:
            with pytest.raises(errors.NoticeError, match="session was closed"):
                session.request("/", seconds=60.0)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        assert wait_until(lambda: len(hostile.requests) == 1)
        hostile.pause(0.2)  # the head has come, and some of the body
        session.close()
        thread.join(10.0)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("169.254.169.254", "http://169.254.169.254"),
        ("localhost:8080", "http://localhost:8080"),
        ("http://localhost:8080/", "http://localhost:8080"),
        ("http://[fd00:ec2::254]", "http://[fd00:ec2::254]"),
    ],
)
def test_addresses(text: str, expected: str) -> None:
    assert checked_base_url(text, "url") == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "https://host",
        "file:///etc/passwd",
        "host/path",
        "host?query",
        "host#part",
        "user:secret@host",
        "host:port",
        "two hosts",
        "host\r\nX: y",
        "[::1",
    ],
)
def test_an_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(errors.ConfigurationError, match="VARIABLE="):
        checked_base_url(text, "VARIABLE")


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-22T10:00:00Z",
        "2026-11-22T10:00:00",
        "2026-11-22T12:00:00.0+02:00",
        "2026-11-22T10:00:00.000000000Z",
        "Sun, 22 Nov 2026 10:00:00 GMT",
    ],
)
def test_times_are_read_as_clouds_write_them(text: str) -> None:
    assert epoch_seconds(text) == 1795341600.0


@pytest.mark.parametrize("text", ["", "soon", "2026-13-01T00:00:00Z", None, 5])
def test_an_invalid_time_is_none(text: object) -> None:
    assert epoch_seconds(text) is None
