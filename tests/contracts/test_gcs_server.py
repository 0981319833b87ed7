"""The loopback server of Google Cloud Storage, by google-cloud-storage's own client."""

from __future__ import annotations

import base64
import io
import threading
import tracemalloc

import google_crc32c
import pytest
import requests
from google.api_core import exceptions as api
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from google.cloud.storage.exceptions import DataCorruption

from tests.fakes.gcs import GcsServer

pytestmark = pytest.mark.slow

MIB = 1 << 20
CHUNK = 256 << 10
LARGE = bytes(range(251)) * (9 * MIB // 251)


@pytest.fixture
def server():
    with GcsServer() as server:
        yield server


@pytest.fixture
def bucket(server, monkeypatch):
    for name, text in server.environment().items():
        monkeypatch.setenv(name, text)
    client = storage.Client(project="p", credentials=AnonymousCredentials())
    client._bucket_metadata_cache = None
    return client.bucket("bucket")


def crc_of(data):
    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()


@pytest.mark.parametrize("data", [b"", b"hello", LARGE], ids=["0", "5", "9 MiB"])
@pytest.mark.parametrize("checksum", ["md5", "crc32c", None])
def test_uploaded_bytes_are_downloaded(bucket, data, checksum):
    blob = bucket.blob("a/b c.bin")
    blob.metadata = {"writer": "me"}
    blob.upload_from_string(data, content_type="text/plain", checksum=checksum)
    found = bucket.get_blob("a/b c.bin")
    assert (found.size, found.crc32c) == (len(data), crc_of(data))
    assert found.metadata == {"writer": "me"}
    assert found.content_type == "text/plain"
    assert found.download_as_bytes(checksum="crc32c") == data


def test_chunks_without_a_known_size(bucket):
    blob = bucket.blob("x", chunk_size=CHUNK)
    for data in (LARGE, b"1" * CHUNK, b""):
        blob.upload_from_file(io.BytesIO(data))
        assert bucket.blob("x").download_as_bytes() == data
    with blob.open("wb", chunk_size=CHUNK) as file:
        file.write(b"2" * (CHUNK + 1))
    assert bucket.blob("x").download_as_bytes() == b"2" * (CHUNK + 1)


def test_ranges(bucket):
    bucket.blob("x").upload_from_string(LARGE)
    got = bucket.blob("x").download_as_bytes(start=5 * MIB - 3, end=5 * MIB + 3)
    assert got == LARGE[5 * MIB - 3 : 5 * MIB + 4]
    assert bucket.blob("x").download_as_bytes(start=-5) == LARGE[-5:]
    assert bucket.blob("x", chunk_size=CHUNK).download_as_bytes() == LARGE
    with pytest.raises(api.RequestRangeNotSatisfiable):
        bucket.blob("x").download_as_bytes(start=len(LARGE))


@pytest.mark.parametrize("size", [1, 9 * MIB], ids=["at once", "resumable"])
def test_preconditions(bucket, size):
    blob = bucket.blob("x")
    blob.upload_from_string(b"1" * size, if_generation_match=0)
    first = blob.generation
    with pytest.raises(api.PreconditionFailed):
        bucket.blob("x").upload_from_string(b"2" * size, if_generation_match=0)
    with pytest.raises(api.PreconditionFailed):
        blob.delete(if_generation_match=first + 1)
    blob.upload_from_string(b"3" * size, if_generation_match=first)
    assert blob.generation > first
    assert bucket.blob("x", generation=first).exists() is False
    blob.delete(if_generation_match=blob.generation)
    with pytest.raises(api.NotFound):
        blob.delete()


def test_a_precondition_is_read_when_an_upload_ends(server, bucket):
    url = bucket.blob("x").create_resumable_upload_session(
        size=2, if_generation_match=0
    )
    assert server.open_uploads == 1
    bucket.blob("x").upload_from_string(b"other")
    assert requests.put(url, data=b"me", timeout=10).status_code == 412
    assert bucket.blob("x").download_as_bytes() == b"other"


def test_of_racing_creators_one_wins(bucket):
    barrier, won = threading.Barrier(8), []

    def race(number):
        barrier.wait()
        try:
            bucket.blob("x").upload_from_string(b"%d" % number, if_generation_match=0)
        except api.PreconditionFailed:
            return
        won.append(number)

    threads = [threading.Thread(target=race, args=(i,)) for i in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert len(won) == 1


def test_a_resumable_upload_step_by_step(bucket):
    """Status query, partial persistence, overlap, a repeated end, a wrong checksum."""
    data = LARGE[: 3 * CHUNK + 5]
    size = len(data)
    url = bucket.blob("x").create_resumable_upload_session(size=size)

    def send(part, content_range, **headers):
        return requests.put(
            url,
            data=part,
            headers={"Content-Range": f"bytes {content_range}/{size}", **headers},
            timeout=10,
        )

    reply = send(b"", "*")
    assert (reply.status_code, reply.headers.get("Range")) == (308, None)
    reply = send(data[: CHUNK + 9], f"0-{CHUNK + 8}")
    assert (reply.status_code, reply.headers["Range"]) == (308, f"bytes=0-{CHUNK - 1}")
    reply = send(data[: 2 * CHUNK], f"0-{2 * CHUNK - 1}")  # half of it is there
    assert reply.headers["Range"] == f"bytes=0-{2 * CHUNK - 1}"
    reply = send(data[3 * CHUNK :], f"{3 * CHUNK}-{size - 1}")
    assert reply.status_code == 400  # a hole
    end = (data[2 * CHUNK :], f"{2 * CHUNK}-{size - 1}")
    reply = send(*end, **{"X-Goog-Hash": "crc32c=AAAAAA=="})
    assert reply.status_code == 400
    assert bucket.blob("x").exists() is False


def test_a_complete_upload_reports_its_completion_again(bucket):
    url = bucket.blob("x").create_resumable_upload_session(size=3)
    for body, content_range in ((b"abc", "bytes 0-2/3"), (b"", "bytes */3")):
        headers = {"Content-Range": content_range}
        reply = requests.put(url, data=body, headers=headers, timeout=10)
        assert (reply.status_code, reply.json()["size"]) == (200, "3")


def test_deleted_objects_need_no_memory(bucket):
    """Not as the end of an upload, which the server can still be asked about."""
    tracemalloc.start()
    try:
        for _ in range(4):
            blob = bucket.blob("x", chunk_size=32 * CHUNK)
            blob.upload_from_string(LARGE)
            blob.delete()
        assert tracemalloc.get_traced_memory()[0] < len(LARGE)
    finally:
        tracemalloc.stop()


def test_an_upload_given_up(server, bucket):
    url = bucket.blob("x").create_resumable_upload_session(size=3)
    assert requests.delete(url, timeout=10).status_code == 499
    assert requests.put(url, data=b"abc", timeout=10).status_code == 410
    assert server.open_uploads == 0


def composed(bucket, name, *contents, **kwargs):
    parts = [bucket.blob(f"{name}-{number}") for number in range(len(contents))]
    for part, data in zip(parts, contents, strict=True):
        part.upload_from_string(data)
    blob = bucket.blob(name)
    blob.compose(parts, **kwargs)
    return blob


def test_composed_objects(bucket):
    blob = composed(bucket, "x", b"one", LARGE, b"three")
    found = bucket.get_blob("x")
    assert (found.size, found.crc32c) == (
        8 + len(LARGE),
        crc_of(b"one" + LARGE + b"three"),
    )
    assert found.md5_hash is None
    assert blob.generation == found.generation
    assert found.download_as_bytes(checksum="crc32c") == b"one" + LARGE + b"three"
    assert found.download_as_bytes(start=1, end=3) == b"ne" + LARGE[:1]
    assert bucket.blob("x-0").download_as_bytes() == b"one"


def test_preconditions_of_composing(bucket):
    blob = composed(bucket, "x", b"1", if_generation_match=0)
    parts = [bucket.get_blob("x-0")]
    with pytest.raises(api.PreconditionFailed):
        bucket.blob("x").compose(parts, if_generation_match=0)
    with pytest.raises(api.PreconditionFailed):
        bucket.blob("y").compose(
            parts, if_source_generation_match=[parts[0].generation + 1]
        )
    bucket.blob("x").compose(
        parts,
        if_generation_match=blob.generation,
        if_source_generation_match=[parts[0].generation],
    )
    bucket.blob("x-0").upload_from_string(b"2")
    with pytest.raises(api.NotFound):  # the generation that was seen is gone
        bucket.blob("y").compose(parts)


def test_invalid_compositions_are_refused(bucket):
    with pytest.raises(api.NotFound):
        bucket.blob("x").compose([bucket.blob("nothing")])
    with pytest.raises(api.BadRequest, match="0 source"):
        bucket.blob("x").compose([])
    bucket.blob("part").upload_from_string(b"1")
    parts = [bucket.blob("part")] * 33
    with pytest.raises(api.BadRequest, match="33 source"):
        bucket.blob("x").compose(parts)
    bucket.blob("x").compose(parts[:32])
    assert bucket.blob("x").download_as_bytes() == b"1" * 32


def test_listing(bucket):
    names = [f"a/{i:02}" for i in range(10)] + ["a/b/c", "a/b/d", "b", "ü"]
    for name in reversed(names):
        bucket.blob(name).upload_from_string(b"")
    client = bucket.client
    assert [each.name for each in client.list_blobs(bucket, page_size=3)] == names
    found = client.list_blobs(bucket, prefix="a/", delimiter="/", page_size=4)
    pages = [([b.name for b in page], page.prefixes) for page in found.pages]
    assert [each for items, _ in pages for each in items] == names[:10]
    assert [each for _, prefixes in pages for each in prefixes] == ["a/b/"]
    assert len(pages) == 3
    assert [b.name for b in client.list_blobs(bucket, max_results=2)] == names[:2]


def test_a_bucket(bucket):
    client = bucket.client
    assert client.get_bucket("bucket").name == "bucket"
    assert client.lookup_bucket("another") is None
    client.create_bucket("another")
    assert client.lookup_bucket("another").name == "another"
    with pytest.raises(api.NotFound, match="bucket does not exist"):
        client.bucket("no-such").blob("x").upload_from_string(b"")


def test_simple_uploads_and_plain_addresses(server):
    """The requests of a raw HTTP client, such as the bench's baseline."""
    url = f"{server.url}/upload/storage/v1/b/bucket/o?uploadType=media&name=x"
    assert requests.post(url, data=b"1", timeout=10).json()["name"] == "x"
    assert requests.put(f"{server.url}/bucket/y", data=b"2", timeout=10).ok
    assert requests.get(f"{server.url}/bucket/y", timeout=10).content == b"2"
    assert server.names() == ["x", "y"]


def test_corruption_is_seen_by_the_client(server, bucket):
    bucket.blob("x").upload_from_string(b"hello")
    server.corrupt_downloads()
    with pytest.raises(DataCorruption):
        bucket.blob("x").download_as_bytes(checksum="crc32c")
    server.damage("bucket", "x")
    with pytest.raises(DataCorruption):
        bucket.blob("x").download_as_bytes(checksum="crc32c")


def test_faults_are_ordered_by_request(server, bucket):
    bucket.blob("x").upload_from_string(LARGE[:MIB])
    server.fail(1, status=404)
    assert bucket.blob("x").exists() is False
    dropped = server.drop_request(1)
    assert [bucket.blob("x").exists() for _ in range(2)] == [True, True]
    assert server.request_count == len(server.requests) == dropped + 2
    server.cut_download(100_000)
    assert bucket.blob("x").download_as_bytes() == LARGE[:MIB]
    assert server.requests[-1].headers["range"].startswith("bytes=9")


def test_a_stall_ends_at_up(server, bucket):
    bucket.blob("x").upload_from_string(b"hello")
    server.stall(1)
    got = []
    reader = threading.Thread(
        target=lambda: got.append(bucket.blob("x").download_as_bytes())
    )
    reader.start()
    with server.changed:
        assert server.changed.wait_for(lambda: len(server.requests) == 2, 30)
    assert got == []
    server.up()
    reader.join(30)
    assert got == [b"hello"]


@pytest.mark.timeout(30)
def test_a_stall_that_ended_before_a_request_has_no_effect(server, bucket):
    """A request may arrive late, when the test has ended the stall."""
    bucket.blob("x").upload_from_string(LARGE)
    server.cut_download(3 * MIB, stalls=True)
    server.up()
    assert bucket.blob("x").download_as_bytes() == LARGE
