"""Failures and silence of S3 and Azure."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import io
import socket
import threading
import urllib.request

import obstore
import obstore.exceptions
import pytest

from tests.contracts.storage_places import MotoServer
from tests.fakes import azure as fake_azure
from tests.fakes.azure import AzureServer
from tests.ports import free_ports
from tfpreempt import errors
from tfpreempt.storage import checksum, obstore_store
from tfpreempt.storage.object_store import summed
from tfpreempt.storage.open_store import open_store

pytestmark = pytest.mark.slow

MIB = 1 << 20
SMALL = b"a small object"
LARGE = bytes(range(251)) * (17 * MIB // 251)


SERVERS = {"s3": MotoServer, "az": AzureServer}


@pytest.fixture(scope="module", params=SERVERS)
def scheme(request):
    return request.param


@pytest.fixture(scope="module")
def server(scheme):
    server = SERVERS[scheme]()
    yield server
    server.close()


@pytest.fixture
def store(server, scheme, monkeypatch, request):
    for name, text in server.environment().items():
        monkeypatch.setenv(name, text)
    return open_store(f"{scheme}://bucket/{abs(hash(request.node.name))}")


def put(store, name, data, timeout=60.0):
    return store.put_if_absent(name, io.BytesIO(data), timeout=timeout)


def get(store, name, **kwargs):
    target = io.BytesIO()
    store.get(name, target, timeout=60.0, **kwargs)
    return target.getvalue()


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
def test_what_passes_by_itself_is_tried_again(server, store, data):
    server.failures = [503, 500]
    assert put(store, "x", data)
    server.failures = [503]
    assert get(store, "x") == data
    server.failures = [503]
    assert store.stat("x").crc32c == checksum.of_bytes(data)
    server.failures = [503]
    assert list(store.list()) == ["x"]
    server.failures = [503]
    store.delete("x")
    assert store.stat("x") is None


def test_a_server_that_ignores_ranges(server, store, monkeypatch):
    put(store, "x", LARGE)
    monkeypatch.setattr(server, "ignores_ranges", True)
    assert get(store, "x") == LARGE
    start, length = 3 * MIB - 7, 10 * MIB + 13
    assert get(store, "x", offset=start, length=length) == LARGE[start:][:length]


def test_a_large_object_goes_up_in_parts_at_a_time(server, store, monkeypatch):
    """Each part waits for another part, so two must be in progress."""
    together = threading.Barrier(2)

    @contextlib.contextmanager
    def in_pairs():
        together.wait(30)
        yield

    monkeypatch.setattr(server, "during_part", in_pairs)
    data = LARGE[: 15 * MIB] + LARGE[: 5 * MIB]  # four parts
    assert put(store, "x", data)
    assert not together.broken
    assert get(store, "x") == data


def test_two_large_objects_share_the_streams(server, store, monkeypatch):
    """Parts in progress are in memory: an upload without a free stream adds one."""
    monkeypatch.setattr(obstore_store, "_STREAMS", 2)
    store = open_store(store.uri)
    counted, under_way, most = threading.Lock(), 0, 0

    @contextlib.contextmanager
    def count():
        nonlocal under_way, most
        with counted:
            under_way += 1
            most = max(most, under_way)
        yield
        with counted:
            under_way -= 1

    monkeypatch.setattr(server, "during_part", count)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        puts = [pool.submit(put, store, name, LARGE) for name in "xy"]
        assert all(each.result(60) for each in puts)
    assert most <= 3
    assert under_way == 0
    assert get(store, "x") == get(store, "y") == LARGE


def test_a_part_that_fails_is_sent_again_alone(server, store, monkeypatch):
    arrived = []

    @contextlib.contextmanager
    def fail_once():
        arrived.append("part")
        if len(arrived) == 2:
            server.failures = [503]  # to the next request
        yield

    monkeypatch.setattr(server, "during_part", fail_once)
    data = LARGE[: 15 * MIB] + LARGE[: 5 * MIB]
    assert put(store, "x", data)
    assert server.failures == []
    assert len(arrived) == 4
    assert get(store, "x") == data


@pytest.fixture
def silent(monkeypatch, server):
    """Returns a server that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for name, text in server.environment().items():
            monkeypatch.setenv(name, text)
        port = listener.getsockname()[1]
        for name in ("AWS_ENDPOINT_URL", "AZURITE_BLOB_STORAGE_URL"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
        yield


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize(
    "operation", ["small", "large", "replace", "get", "stat", "folders"]
)
def test_a_stall_ends_with_the_time(operation, scheme):
    store = open_store(f"{scheme}://bucket/run")
    stalled = {
        "small": lambda: put(store, "x", SMALL, 0.3),
        "large": lambda: put(store, "x", LARGE, 0.3),
        "replace": lambda: store.replace("x", SMALL, timeout=0.3),
        "get": lambda: store.get("x", io.BytesIO(), timeout=0.3),
        "stat": lambda: store.stat("x", timeout=0.3),
        "folders": lambda: list(store.folders(timeout=0.3)),
    }[operation]
    with pytest.raises(errors.CheckpointError, match=r"within 0\.3 s"):
        stalled()


def test_a_caller_with_an_event_loop(store):
    """Such as a notebook."""

    async def main():
        return put(store, "x", SMALL)

    assert asyncio.run(main())


def test_an_object_of_others_has_a_checksum_too(store):
    obstore.put(store._store, store._key("x"), SMALL)
    assert store.stat("x").crc32c is None
    assert summed(store, "x").crc32c == checksum.of_bytes(SMALL)


def test_damage_is_noticed(store):
    put(store, "x", SMALL)
    attributes = {store.crc_key: "00000000"}
    obstore.put(store._store, store._key("x"), SMALL, attributes=attributes)
    with pytest.raises(errors.CheckpointCorruptedError, match="00000000"):
        get(store, "x")


@pytest.mark.parametrize("noted", ["zz", "-1", "", "f" * 900, "0x12"])
def test_a_note_that_is_no_checksum_is_none(store, noted):
    attributes = {store.crc_key: noted}
    obstore.put(store._store, store._key("x"), SMALL, attributes=attributes)
    assert store.stat("x").crc32c is None
    assert get(store, "x") == SMALL


@pytest.mark.usefixtures("store")
def test_a_missing_bucket(scheme):
    store = open_store(f"{scheme}://no-such-bucket/run")
    for each in (lambda: put(store, "x", SMALL), lambda: list(store.list())):
        with pytest.raises(errors.CheckpointError, match="Create the ") as caught:
            each()
        assert "<" not in str(caught.value)  # the service answers in XML
        code = {"s3": "NoSuchBucket", "az": "ContainerNotFound"}[scheme]
        assert code in str(caught.value)
        assert caught.value.is_permanent


@pytest.mark.usefixtures("store")
def test_no_credentials(monkeypatch, scheme):
    """Then the machine's metadata server is asked for a role's."""
    said = "Error performing PUT http://169.254.169.254/latest/api/token in 4ms - 404"

    def nobody(store, prefix):
        raise obstore.exceptions.GenericError(f"Generic error: {said}")

    monkeypatch.setattr(obstore, "list_with_delimiter", nobody)
    store = open_store(f"{scheme}://bucket/run")
    variable = {"s3": "AWS_ACCESS_KEY_ID", "az": "AZURE_STORAGE_ACCOUNT_KEY"}[scheme]
    with pytest.raises(errors.CheckpointError, match=variable) as caught:
        list(store.folders())
    assert "no credentials were found" in str(caught.value)
    assert caught.value.is_permanent


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    "said",
    [
        "PUT http://169.254.169.254/a in 4ms - Server returned error status: 429 Too "
        "Many Requests",
        "GET http://host/bucket/credentials/x in 9s - error sending request",
    ],
)
def test_a_failure_that_is_not_about_credentials_is_temporary(
    monkeypatch, scheme, said
):
    """The metadata server is overloaded; an object's name contains the word."""

    def fails(store, prefix):
        raise obstore.exceptions.GenericError(f"Generic error: {said}")

    monkeypatch.setattr(obstore, "list_with_delimiter", fails)
    with pytest.raises(errors.CheckpointError) as caught:
        list(open_store(f"{scheme}://bucket/run").folders())
    assert not caught.value.is_permanent


def test_a_conflict_without_an_object_is_an_error(server, store):
    """The service refuses the creation, for example while it deletes the container.

    On Azure obstore repeats the request.
    """
    server.failures = [409]
    with contextlib.suppress(errors.CheckpointError):
        assert put(store, "x", SMALL)


def test_a_refusal_says_what_is_needed(server, scheme, store):
    needed = {"s3": "s3:PutObject", "az": "Storage Blob Data Contributor"}[scheme]
    for operation in (
        lambda: put(store, "x", SMALL),
        lambda: store.stat("x"),
        lambda: list(store.list()),
        lambda: list(store.folders()),
        lambda: store.delete("x"),
    ):
        server.failures = [403]
        with pytest.raises(errors.CheckpointError, match=needed) as caught:
            operation()
        assert caught.value.is_permanent


# --- Azure alone ---------------------------------------------------------------------

azure = pytest.mark.parametrize("scheme", ["az"], indirect=True)


@azure
def test_a_deletion_that_is_refused(server, store, monkeypatch):
    """The service answers the batch with success, and refuses the one in it."""
    put(store, "x", SMALL)
    monkeypatch.setattr(server, "may_delete", False)
    with pytest.raises(errors.SaveError, match="Data Contributor") as caught:
        store.delete("x")
    assert caught.value.is_permanent


@pytest.mark.parametrize("name", ["a//b", "a/../b"])
def test_the_error_about_an_odd_name_says_what_to_do(scheme, server, store, name):
    """Other programs write objects with such names, for example by an empty folder."""
    key = f"{store._prefix}{name}"
    if scheme == "az":
        server.put(key, b"")
    else:
        url = f"{server.environment()['AWS_ENDPOINT_URL']}/bucket/{key}"
        request = urllib.request.Request(url, data=b"", method="PUT")
        urllib.request.urlopen(request, timeout=60).close()
    with pytest.raises(errors.CheckpointError, match="Delete or move") as caught:
        list(store.list())
    assert name in str(caught.value)
    assert caught.value.is_permanent


@azure
def test_a_wrong_key(server, store, monkeypatch):
    monkeypatch.setattr(fake_azure, "CODES", {403: "AuthenticationFailed"})
    server.failures = [403]
    with pytest.raises(errors.SaveError, match="AZURE_STORAGE_ACCOUNT_KEY") as caught:
        put(store, "x", SMALL)
    assert "AuthenticationFailed" in str(caught.value)


@azure
@pytest.mark.parametrize("is_reached", [True, False])
def test_no_error_quotes_the_signature_of_a_sas(is_reached, server, store, monkeypatch):
    """A shared access signature is part of each URL, also of a URL that fails."""
    monkeypatch.setattr(obstore_store, "RETRY_SECONDS", 0.1)
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=2023-11-03&sp=rwdl&sig=SECRET")
    if not is_reached:
        (port,) = free_ports(1)
        monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", f"http://127.0.0.1:{port}")
    store = open_store(store.uri)
    operations = {
        "put": lambda: put(store, "x", SMALL),
        "large": lambda: put(store, "x", LARGE),
        "replace": lambda: store.replace("x", SMALL),
        "get": lambda: get(store, "x"),
        "list": lambda: list(store.list()),
        "folders": lambda: list(store.folders()),
        "stat": lambda: store.stat("x"),
        "delete": lambda: store.delete("x"),
    }
    for operation in operations.values():
        server.failures = [403] if is_reached else []
        with pytest.raises(errors.CheckpointError) as caught:
            operation()
        assert "SECRET" not in str(caught.value)


@azure
def test_of_two_uploads_of_one_large_object_the_contents_do_not_mix(store):
    """Each block has a random id; the list of one upload drops the other's blocks."""
    contents = [bytes([each]) * (12 * MIB) for each in (1, 2)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        puts = [pool.submit(put, store, "x", each) for each in contents]
    assert any(each.result() for each in puts)
    assert get(store, "x") in contents


@azure
@pytest.mark.parametrize(
    ("lost", "data"), [("blob", SMALL), ("block", LARGE), ("blocklist", LARGE)]
)
def test_a_lost_reply_to_an_upload_is_no_failure(lost, data, server, store):
    """The service refuses the repeated request, because the blob exists."""
    server.lost_replies = [lost]
    assert put(store, "x", data)
    assert server.lost_replies == []
    assert get(store, "x") == data
    assert not put(store, "x", data[::-1])


@azure
def test_a_large_object_that_another_writer_completes_first(server, store, monkeypatch):
    @contextlib.contextmanager
    def overtaken():
        yield  # the block is stored
        server.put(store._key("x"), SMALL)

    monkeypatch.setattr(server, "during_part", overtaken)
    assert not put(store, "x", LARGE[: 12 * MIB])
    assert get(store, "x") == SMALL
