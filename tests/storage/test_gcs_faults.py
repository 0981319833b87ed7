"""Failures of Google Cloud Storage: each request lost, before or after its service."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import io
import random
import re
import socket
import threading

import pytest
import requests

from tests.fakes.gcs import GcsServer
from tfpreempt import errors
from tfpreempt.storage import checksum, gcs_client
from tfpreempt.storage.gcs_client import Retry
from tfpreempt.storage.object_store import ObjectNotFoundError
from tfpreempt.storage.open_store import open_store
from tfpreempt.storage.request_deadline import RETRY_SECONDS, Deadline
from tfpreempt.testing._server import FakeServer, Reply

pytestmark = pytest.mark.slow

MIB = 1 << 20
SMALL = b"a small object"
LARGE = bytes(range(251)) * (9 * MIB // 251)  # more than goes in one request
LONG, SHORT = 60.0, 0.2  # seconds: more than anything here takes; soon over
LEFT_IN_TIME = pytest.mark.timeout(30)  # half of the timeout of a request


@pytest.fixture
def server(monkeypatch):
    """A bucket whose client makes short pauses before it retries a request."""
    monkeypatch.setattr(gcs_client, "FIRST_PAUSE", 0.01)
    with GcsServer() as server:
        for name, text in server.environment().items():
            monkeypatch.setenv(name, text)
        yield server


@pytest.fixture
def store(server):
    return open_store("gs://bucket/run")


def put(store, name, data, timeout=LONG):
    return store.put_if_absent(name, io.BytesIO(data), timeout=timeout)


def get(store, name, **kwargs):
    target = io.BytesIO()
    store.get(name, target, timeout=LONG, **kwargs)
    return target.getvalue()


def act(store, operation, data):
    """Makes an operation on a store with an object; returns the expected result."""
    if operation == "put":
        return put(store, "new", data) and get(store, "new") == data
    if operation == "compose":
        made = store.compose("new", ["there", "there"], timeout=LONG)
        return made and get(store, "new") == data * 2
    if operation == "replace":
        store.replace("there", data, timeout=LONG)
        return get(store, "there") == data
    if operation == "get":
        return get(store, "there") == data
    if operation == "stat":
        return store.stat("there", timeout=LONG).crc32c == checksum.of_bytes(data)
    if operation == "delete":
        store.delete("there", timeout=LONG)
        return store.stat("there") is None
    return list(store.list()) == ["there"]


def requests_of(operation, data):
    """How many requests an operation makes if nothing fails."""
    return 2 if operation == "put" and data is LARGE else 1


CASES = [
    pytest.param(operation, data, ahead, id=f"{operation}-{len(data)}-{ahead}")
    for operation in ("put", "compose", "replace", "get", "stat", "delete", "list")
    for data in (SMALL, LARGE)
    for ahead in range(requests_of(operation, data))
]


@pytest.mark.parametrize("fault", ["before", "after", "503", "cut"])
@pytest.mark.parametrize(("operation", "data", "ahead"), CASES)
def test_a_lost_request_changes_nothing(server, store, operation, data, ahead, fault):
    put(store, "there", data)
    if fault == "503":
        server.fail(1)
    elif fault == "cut":
        server.cut_upload(len(data) // 3)
        server.cut_download(len(data) // 3)
    else:
        server.drop_request(ahead, when=fault)
    assert act(store, operation, data)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("ahead", range(2))
def test_an_uploader_killed_at_a_request_leaves_no_half_object(
    server, store, ahead, when
):
    """The process ends at its failing request, without a retry."""
    server.drop_request(ahead, when=when)
    source = _Mortal(LARGE, server, dies_after=server.request_count + ahead + 1)
    with contextlib.suppress(_KilledError):
        store.put_if_absent("x", source, timeout=LONG)
    if server.names():
        assert get(store, "x") == LARGE
    server.clear_faults()
    put(store, "x", LARGE)  # the next run finishes it, or finds it
    assert get(store, "x") == LARGE


class _KilledError(BaseException):
    pass


class _Mortal(io.BytesIO):
    def __init__(self, data, server, dies_after):
        super().__init__(data)
        self.server, self.dies_after = server, dies_after

    def read(self, size=-1):
        if self.server.request_count >= self.dies_after:
            raise _KilledError
        return super().read(size)


def test_a_download_goes_on_where_it_was_cut(server, store):
    put(store, "x", LARGE)
    for after in (MIB + 5, 2 * MIB, 7):
        server.cut_download(after)
    assert get(store, "x") == LARGE
    ranges = [r.headers["range"] for r in server.requests if "range" in r.headers]
    starts = [int(each.partition("=")[2].partition("-")[0]) for each in ranges]
    assert starts == sorted(starts)
    assert len(starts) == 3
    assert starts[-1] <= 3 * MIB + 12


def test_a_cut_download_goes_on_in_an_answer_that_is_the_whole(server, store):
    """A server may ignore that only a part was asked for."""
    put(store, "x", LARGE)
    server.cut_download(3 * MIB + 5)
    server.ignore_ranges(2)
    assert get(store, "x") == LARGE
    server.ignore_ranges(1)
    assert get(store, "x", offset=5 * MIB, length=MIB) == LARGE[5 * MIB : 6 * MIB]


def test_an_upload_sends_only_what_is_missing(server, store):
    for after in (5 * MIB + 7, 3 * MIB):
        server.cut_upload(after)
    put(store, "x", LARGE)
    assert get(store, "x") == LARGE
    chunks = [r.headers["content-range"] for r in server.requests if r.method == "PUT"]
    assert chunks[0::2] == [
        f"bytes {start * MIB}-{len(LARGE) - 1}/{len(LARGE)}" for start in (0, 5, 8)
    ]
    assert set(chunks[1::2]) == {f"bytes */{len(LARGE)}"}


def test_an_answer_that_got_lost_is_asked_for(server, store):
    server.drop_request(1, when="after")
    put(store, "x", LARGE)
    assert [r.length for r in server.requests if r.method == "PUT"] == [len(LARGE), 0]


def test_what_arrives_changed_is_deleted_again(server, store):
    server.corrupt_uploads()
    with pytest.raises(errors.SaveError, match="was deleted"):
        put(store, "x", LARGE)
    assert server.names() == []


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
def test_an_upload_that_another_overtakes_has_lost(server, store, data):
    other = open_store("gs://bucket/run")

    class Slow(io.BytesIO):
        def read(self, size=-1):
            put(other, "x", b"the other's")
            return super().read(size)

    assert store.put_if_absent("x", Slow(data), timeout=LONG) is False
    assert get(store, "x") == b"the other's"


def test_a_forgotten_upload_begins_anew(server, store):
    assert store.put_if_absent("x", _Forgetful(LARGE, server), timeout=LONG)
    assert get(store, "x") == LARGE


class _Forgetful(io.BytesIO):
    """Makes the server forget the upload once, in the middle."""

    def __init__(self, data, server):
        super().__init__(data)
        self.server, self.is_done = server, False

    def read(self, size=-1):
        if not self.is_done:
            self.is_done = True
            self.server.forget_uploads()
        return super().read(size)


@LEFT_IN_TIME
@pytest.mark.parametrize(
    "operation", ["put", "compose", "replace", "get", "stat", "delete", "folders"]
)
@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
def test_a_stall_ends_with_the_time(server, store, operation, data):
    put(store, "there", data)
    server.stall()
    stalled = {
        "put": lambda: put(store, "new", data, SHORT),
        "compose": lambda: store.compose("new", ["there"], timeout=SHORT),
        "replace": lambda: store.replace("there", data, timeout=SHORT),
        "get": lambda: store.get("there", io.BytesIO(), timeout=SHORT),
        "stat": lambda: store.stat("there", timeout=SHORT),
        "delete": lambda: store.delete("there", timeout=SHORT),
        "folders": lambda: list(store.folders(timeout=SHORT)),
    }[operation]
    with pytest.raises(errors.CheckpointError, match=r"within 0\.2 s"):
        stalled()


@LEFT_IN_TIME
def test_a_stall_in_the_middle_of_a_download_ends_with_the_time(server, store):
    put(store, "x", LARGE)
    server.cut_download(3 * MIB, stalls=True)
    with pytest.raises(errors.CheckpointError, match=r"within 0\.2 s"):
        store.get("x", io.BytesIO(), timeout=SHORT)


@pytest.fixture
def let_calls_end():
    """Waits for the calls of this test that continued after their timeout."""
    others = set(threading.enumerate())

    def wait():
        for thread in set(threading.enumerate()) - others:
            if thread.name == "tfpreempt-bounded":
                thread.join(60)

    return wait


@LEFT_IN_TIME
def test_what_arrives_after_the_deadline_is_written_nowhere(
    server, store, let_calls_end
):
    put(store, "x", LARGE)
    server.cut_download(3 * MIB, stalls=True)
    target = io.BytesIO()
    with pytest.raises(errors.CheckpointError, match=r"within 0\.2 s"):
        store.get("x", target, timeout=SHORT)
    written = target.getvalue()
    server.up()
    let_calls_end()
    assert target.getvalue() == written == LARGE[: len(written)]


@LEFT_IN_TIME
def test_an_upload_that_was_left_ends_with_its_file(server, store, let_calls_end):
    class Stalling(io.BytesIO):
        def read(self, size=-1):
            if self.tell() > 3 * MIB:
                release.wait(60)
            return super().read(size)

    release = threading.Event()
    with (
        Stalling(LARGE) as source,
        pytest.raises(errors.SaveError, match=r"within 0\.2 s"),
    ):
        store.put_if_absent("x", source, timeout=SHORT)
    release.set()
    let_calls_end()
    assert server.names() == []


def test_a_server_that_fails_for_too_long_is_reported(server, store):
    server.fail(1000)
    with pytest.raises(errors.SaveError, match=r"Could not upload .* retry"):
        put(store, "x", SMALL, 1.0)


def test_the_client_gives_up_before_its_caller():
    assert Retry(Deadline(10.0)).seconds < 9.5
    assert Retry(Deadline(60.0)).seconds == RETRY_SECONDS
    assert Retry(Deadline(None)).seconds == RETRY_SECONDS


def test_nobody_there(monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, so no other process listens there
        port = unused.getsockname()[1]
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        with pytest.raises(errors.SaveError, match="the network") as caught:
            put(open_store("gs://bucket/run"), "x", SMALL, SHORT)
    assert "refused" in str(caught.value)
    assert str(port) in str(caught.value)
    assert re.search(r"failed for \d+\.\d s", str(caught.value))
    assert not caught.value.is_permanent


def test_an_answer_that_is_no_http_is_reported(server, store, monkeypatch):
    """The client retries, and finally names the reply."""

    def garbled(*args, **kwargs):
        raise http.client.BadStatusLine("\x15\x03")

    monkeypatch.setattr(requests.Session, "request", garbled)
    with pytest.raises(errors.CheckpointError, match=r"BadStatusLine.* retry later"):
        store.stat("x", timeout=SHORT)


class OtherServer(FakeServer):
    """A server of another API: every request gets the same JSON."""

    def __init__(self, body):
        self._body = body
        super().__init__()

    def environment(self):
        return {"STORAGE_EMULATOR_HOST": self.url}

    def answer(self, request):
        return Reply(body=self._body)


@pytest.mark.parametrize(
    "body",
    [
        b"[1]",
        b"null",
        b'"x"',
        b"[" * 100_000,
        b'{"items": 3, "prefixes": 3, "size": [], "nextPageToken": 3}',
        b'{"items": [{}], "prefixes": [null], "size": "x"}',
        b'{"items": [null], "prefixes": [5], "size": "%s"}' % (b"9" * 5000),
    ],
)
def test_an_answer_of_another_service_is_reported(monkeypatch, body):
    """A start with local commits logs such an error, and restores a local commit."""
    with OtherServer(body) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        store = open_store("gs://bucket/run")
        for call in (
            lambda: list(store.list()),
            lambda: list(store.folders(timeout=LONG)),
            lambda: put(store, "x", LARGE),
            lambda: store.stat("x"),
        ):
            with pytest.raises(errors.CheckpointError, match="not in the form"):
                call()


def test_an_error_of_the_program_is_not_attributed_to_the_service(store, monkeypatch):
    """Each ValueError of a call was reported as a malformed response."""

    def faulty(*args, **kwargs):
        raise ValueError("an error in the client")

    monkeypatch.setattr(requests.Session, "request", faulty)
    with pytest.raises(ValueError, match="an error in the client"):
        store.stat("x", timeout=LONG)


def test_corrupted_bytes_are_noticed(server, store):
    put(store, "x", LARGE)
    server.corrupt_downloads()
    with pytest.raises(errors.CheckpointCorruptedError, match="crc32c"):
        get(store, "x")
    assert get(store, "x") == LARGE


def test_they_are_where_more_was_asked_for_than_there_is(server, store):
    """A reader of small objects limits the size, in case the object is large."""
    put(store, "x", SMALL)
    server.corrupt_downloads()
    with pytest.raises(errors.CheckpointCorruptedError, match="crc32c"):
        get(store, "x", length=len(SMALL) + 1)


def test_a_damaged_object_is_noticed(server, store):
    put(store, "x", LARGE)
    server.damage("bucket", "run/x", offset=5 * MIB)
    with pytest.raises(errors.CheckpointCorruptedError, match="is corrupt"):
        get(store, "x")


def test_a_missing_bucket(server):
    store = open_store("gs://no-such-bucket/run")
    for each in (
        lambda: put(store, "x", SMALL),
        lambda: put(store, "x", LARGE),
        lambda: store.compose("x", ["y"]),
        lambda: store.replace("x", SMALL),
        lambda: get(store, "x"),
        lambda: store.stat("x"),
        lambda: store.delete("x"),
        lambda: list(store.list()),
        lambda: list(store.folders()),
    ):
        with pytest.raises(errors.CheckpointError, match="Create the bucket") as caught:
            each()
        assert not isinstance(caught.value, ObjectNotFoundError)
        assert caught.value.is_permanent


@pytest.mark.parametrize(
    ("status", "advice"), [(403, "storage.objectUser"), (401, "auth application")]
)
def test_refusals_say_what_to_do(server, store, status, advice):
    for each in (lambda: put(store, "x", LARGE), lambda: list(store.list())):
        server.fail(1, status=status)
        with pytest.raises(errors.CheckpointError, match=advice):
            each()


def test_no_credentials(monkeypatch, tmp_path):
    for name in ("STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GCE_METADATA_IP", "127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    store = open_store("gs://bucket/run")  # a local commit may do without
    for each in (
        lambda: put(store, "x", SMALL),
        lambda: get(store, "x"),
        lambda: list(store.folders()),
    ):
        with pytest.raises(
            errors.CheckpointError, match="no credentials were found"
        ) as caught:
            each()
        assert "gcloud auth" in str(caught.value)
        assert caught.value.is_permanent
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    with pytest.raises(errors.SaveError, match="network") as caught:  # found by now
        put(store, "x", SMALL, SHORT)
    assert not caught.value.is_permanent


def test_no_request_that_nobody_asked_for(server, store):
    put(store, "x", SMALL)
    get(store, "x")
    assert [r.method for r in server.requests] == ["POST", "GET"]


@pytest.mark.parametrize("size", [1, 1 << 20, 9 << 20])
def test_python_s_own_generator_is_left_alone(server, store, size):
    """Otherwise pauses of retries would change the random numbers of training."""
    before = random.getstate()
    for work in (
        lambda: store.put_if_absent("x", io.BytesIO(bytes(size))),
        lambda: store.get("x", io.BytesIO()),
        lambda: store.stat("x"),
        lambda: list(store.list()),
        lambda: store.compose("z", ["x", "x"]),
        lambda: store.replace("y", b"note"),
        lambda: store.delete("x"),
    ):
        server.fail(2)
        work()
    assert random.getstate() == before


TEN = b"0123456789"
ANSWERS = {  # to a question for the bytes from 4 on
    "all": (200, None, TEN),
    "some that nobody counts": (206, "bytes 4-9/*", TEN[4:]),
}
LIES = {
    "from an earlier byte": (206, "bytes 2-9/10", TEN[2:]),
    "from a later byte": (206, "bytes 5-9/10", TEN[5:]),
    "up to an earlier byte": (206, "bytes 0-2/10", TEN[:3]),
    "who knows which": (206, None, TEN),
    "seconds": (206, "seconds 4-9/10", TEN[4:]),
}


@contextlib.contextmanager
def answering(monkeypatch, *answers):
    """Returns a server that sends the given replies to any requests."""

    class Answering(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            status, part, data = left.pop(0)
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            if part:
                self.send_header("Content-Range", part)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    left = list(answers)
    with http.server.HTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        yield open_store("gs://bucket/run")
        server.shutdown()


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize("length", [3, None])
def test_bytes_that_nobody_asked_for_are_passed_over(monkeypatch, answer, length):
    """Only the requested bytes are used, from the right offset."""
    end = None if length is None else 4 + length
    with answering(monkeypatch, answer) as store:
        assert get(store, "x", offset=4, length=length) == TEN[4:end]


@pytest.mark.parametrize("length", [5, 6, 9, None])
def test_what_an_answer_leaves_out_is_asked_for(monkeypatch, length):
    """A server, or a proxy, may send less of a part than was asked for."""
    parts = (206, "bytes 4-5/10", b"45"), (206, "bytes 6-9/10", b"6789")
    end = None if length is None else 4 + length
    with answering(monkeypatch, *parts) as store:
        assert get(store, "x", offset=4, length=length) == TEN[4:end]


def test_an_answer_without_a_byte_is_the_last(monkeypatch):
    parts = (206, "bytes 4-5/10", b"45"), (206, "bytes 6-5/10", b"")
    with answering(monkeypatch, *parts) as store:
        assert get(store, "x", offset=4) == b"45"


@pytest.mark.parametrize("answer", LIES.values(), ids=LIES)
def test_an_answer_that_cannot_be_placed_is_refused(monkeypatch, answer):
    with (
        answering(monkeypatch, answer) as store,
        pytest.raises(errors.CheckpointError, match="asked for the bytes from 4 on"),
    ):
        get(store, "x", offset=4)


def test_an_empty_object_whose_range_is_refused(server, store):
    put(store, "x", b"")
    assert get(store, "x", offset=0, length=9) == b""
    server.leave_out_zeros()
    assert store.stat("x").size == 0
    server.drop_request(0, when="after")
    assert put(store, "y", b"")  # the one in the way is ours
