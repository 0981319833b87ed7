"""Fake object stores in this process, and a network link to them with random faults."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Protocol
from unittest import mock

from tests.fakes.gcs import GcsServer
from tests.fakes.replies import BrokenReply
from tfpreempt.testing import _server
from tfpreempt.testing._server import FakeServer, Reply, Request

Weather = Mapping[str, float]
"""Probability of each of `TROUBLES` for one request."""

TROUBLES = (
    "503",  # the service is overloaded
    "401",  # the credentials have expired
    "never came",
    "came in part",
    "came changed",
    "late",
    "no answer",  # the request is processed, the reply is lost
    "half an answer",
    "a changed answer",
    "all of it",  # the request was for a range
)


class Cloud(Protocol):
    """An object store. Any thread may use it.

    Attributes:
        scheme: scheme of the store's URIs.
        takes_parts: whether the store keeps the received part of an interrupted
            request.
    """

    scheme: str
    takes_parts: bool

    def environment(self, url: str) -> dict[str, str]:
        """Returns the variables that make clients use the server at `url`."""
        ...

    def answer(self, request: Request) -> Reply:
        """Returns the reply of the service."""
        ...

    def failure(self, status: int) -> Reply:
        """Returns a reply with an error status."""
        ...

    def objects(self) -> dict[str, bytes]:
        """Returns all objects of the bucket, as of one instant."""
        ...

    def close(self) -> None:
        """Releases the store."""
        ...


class Gcs:
    """Google Cloud Storage: the fake server of the tests."""

    scheme = "gs"
    takes_parts = True

    def __init__(self) -> None:
        self._server = GcsServer(max_page=7)
        self._lock = threading.RLock()
        self.failure = self._server.failure
        self.close = self._server.close

    def environment(self, url: str) -> dict[str, str]:
        return {"STORAGE_EMULATOR_HOST": url}

    def answer(self, request: Request) -> Reply:
        with self._lock:
            return self._server.answer(request)

    def objects(self) -> dict[str, bytes]:
        with self._lock:
            return {name: self._content(name) for name in self._server.names()}

    def _content(self, name: str) -> bytes:
        path = f"/bucket/{name}"
        asked = Request(method="GET", path=path, query={}, headers={})
        return bytes(self._server.answer(asked).body)


class S3:
    """Amazon S3: the fake of moto. Like S3, it refuses a body with a wrong checksum.

    Only one instance may exist at a time: moto's buckets belong to the process.
    """

    scheme = "s3"
    takes_parts = False

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.test import Client

        self._client = Client(DomainDispatcherApplication(create_backend_app))
        self._lock = threading.RLock()
        put = Request(method="PUT", path="/bucket", query={}, headers={"host": "s3"})
        assert self.answer(put).status == 200

    def environment(self, url: str) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }

    def answer(self, request: Request) -> Reply:
        signed = request.headers.get("x-amz-content-sha256", "UNSIGNED")
        if not signed.isupper() and signed != hashlib.sha256(request.body).hexdigest():
            return self.failure(400, "XAmzContentSHA256Mismatch")
        with self._lock:
            said = self._client.open(
                request.path,
                method=request.method,
                query_string=dict(request.query),
                headers=dict(request.headers),
                data=request.body,
                base_url="http://127.0.0.1",
            )
        headers = dict(said.headers.items())
        body = said.data
        length = headers.pop("Content-Length", None)
        if request.method == "HEAD" and length is not None:
            headers |= {"Content-Length": length, "Connection": "close"}
            return BrokenReply(status=said.status_code, headers=headers)
        return Reply(status=said.status_code, headers=headers, body=body)

    def failure(self, status: int, code: str = "") -> Reply:
        code = code or {401: "ExpiredToken", 503: "SlowDown"}[status]
        text = f"<Error><Code>{code}</Code><Message>Ordered.</Message></Error>"
        status = 400 if code == "ExpiredToken" else status
        headers = {"Content-Type": "application/xml"}
        return Reply(status=status, body=text.encode(), headers=headers)

    def objects(self) -> dict[str, bytes]:
        from moto.s3.models import s3_backends

        with self._lock:
            bucket = s3_backends["123456789012"]["aws"].buckets["bucket"]
            return {name: key.value for name, key in bucket.keys.items()}

    def close(self) -> None:
        from moto.s3.models import s3_backends

        s3_backends["123456789012"]["aws"].reset()


class _Handler(_server._Handler):
    """Handler that also serves HEAD requests, which clients of S3 send."""

    do_HEAD = _server._Handler.do_GET  # noqa: N815  (a name that http.server calls)


class Link(FakeServer):
    """The network between one machine and an object store, with random faults.

    Args:
        cloud: the object store.
        rng: source of the random numbers.
        after_change: called after each request that may have changed an object.

    Attributes:
        met: number of requests for each trouble.
    """

    _name = "link"

    def __init__(
        self, cloud: Cloud, rng: random.Random, after_change: Callable[[], None]
    ) -> None:
        self._cloud, self._rng = cloud, rng
        self._after_change = after_change
        self._weather: Weather = {}
        self.met: collections.Counter[str] = collections.Counter()
        self.failure = cloud.failure  # type: ignore[method-assign]
        super().__init__()
        self.RequestHandlerClass = _Handler

    def environment(self) -> dict[str, str]:
        return self._cloud.environment(self.url)

    @property
    def failed(self) -> int:
        """Number of requests that failed. A delay is not a failure."""
        return self.met.total() - self.met["late"]

    def answer(self, request: Request) -> Reply:
        reply = self._cloud.answer(request)
        if request.method not in ("GET", "HEAD"):
            self._after_change()
        return reply

    def begin(self, weather: Weather) -> None:
        """Starts the faults, with the given probabilities."""
        self._weather = weather

    def serve(self, head: Request, read: Callable[[int], bytes]) -> Reply | None:
        trouble = self._drawn()
        if trouble in ("503", "401", "never came", "came in part"):
            part = (
                self._rng.randrange(head.length + 1)
                if trouble == "came in part"
                else head.length
            )
            head = dataclasses.replace(head, body=read(part))
            if trouble == "came in part" and self._cloud.takes_parts and part:
                self.answer(head)
            return self.failure(int(trouble)) if trouble.isdigit() else None
        if trouble == "late":
            self.pause(self._rng.uniform(0.0, 0.03))
        if trouble == "all of it":
            headers = {
                name: text for name, text in head.headers.items() if name != "range"
            }
            head = dataclasses.replace(head, headers=headers)
        if trouble == "came changed":
            sound = read

            def read(count: int) -> bytes:
                return _changed(head, sound(count))

        reply = super().serve(head, read)
        if reply is None or trouble == "no answer":
            return None
        if trouble == "half an answer" and len(reply.body) > 1:
            headers = {**reply.headers, "Content-Length": str(len(reply.body))}
            half = reply.body[: self._rng.randrange(len(reply.body))]
            return BrokenReply(status=reply.status, headers=headers, body=half)
        if trouble == "a changed answer" and _is_content(head) and reply.status < 300:
            return dataclasses.replace(reply, body=_flipped(bytes(reply.body), None))
        return reply

    def _drawn(self) -> str:
        drawn = self._rng.random()
        for trouble, likely in self._weather.items():
            drawn -= likely
            if drawn < 0:
                self.met[trouble] += 1
                return trouble
        return ""


def _is_content(head: Request) -> bool:
    """Returns whether a request asks for the bytes of an object."""
    is_listing = "list-type" in head.query
    is_resource = head.path.startswith("/storage/") and head.query.get("alt") != "media"
    return head.method == "GET" and not is_listing and not is_resource


def _changed(head: Request, body: bytes) -> bytes:
    """Flips a bit of an object in the body of a request, if the body has an object."""
    if "boundary=" in head.headers.get("content-type", ""):
        at = body.rindex(b"\r\n--") - 1
        return body if body[at - 1 : at + 1] == b"\r\n" else _flipped(body, at)
    return _flipped(body, None) if head.method == "PUT" else body


def _flipped(data: bytes, at: int | None) -> bytes:
    changed = bytearray(data)
    if changed:
        changed[len(changed) // 2 if at is None else at] ^= 1
    return bytes(changed)


@contextlib.contextmanager
def small() -> Iterator[None]:
    """Context manager: shrinks sizes and pauses, so kilobytes act like gigabytes."""
    from moto.s3 import models
    from obstore.store import S3Store

    from tests.fakes.gcs import _service
    from tfpreempt.checkpoint.mirror import download_target, mirror, upload
    from tfpreempt.checkpoint.mirror import mirror_status as mirror_status
    from tfpreempt.storage import gcs_client, gcs_transfer, obstore_store, s3

    def client(bucket: str, **more: Any) -> Any:
        more["retry_config"] = {
            "retry_timeout": timedelta(seconds=0.2),
            "backoff": {
                "init_backoff": timedelta(seconds=0.002),
                "max_backoff": timedelta(seconds=0.02),
                "base": 2,
            },
        }
        return S3Store(bucket, **more)

    def uploads(*args: Any, **more: Any) -> upload.Upload:
        return real_upload(*args, threads=4, smallest_part=5000, **more)

    real_upload = upload.Upload
    changes: list[tuple[Any, str, Any]] = [
        (gcs_client, "RETRY_SECONDS", 0.2),
        (gcs_client, "FIRST_PAUSE", 0.002),
        (gcs_client, "LONGEST_PAUSE", 0.02),
        (gcs_transfer, "_SINGLE", 3000),
        (gcs_transfer, "_PIECE", 1000),
        (_service, "QUANTUM", 1000),
        (s3, "Client", client),
        (obstore_store, "PIECE", 6000),
        (obstore_store, "_PART", 2000),
        (models, "S3_UPLOAD_PART_MIN_SIZE", 1),
        (mirror_status, "FIRST_PAUSE", 0.002),
        (mirror_status, "LONGEST_PAUSE", 0.05),
        (mirror, "HURRIED_PAUSE", 0.01),
        (download_target, "_SMALLEST", 4000),
        (download_target, "_LARGEST", 8000),
        (upload, "Upload", uploads),
    ]
    with contextlib.ExitStack() as stack:
        for module, name, value in changes:
            stack.enter_context(mock.patch.object(module, name, value))
        yield
