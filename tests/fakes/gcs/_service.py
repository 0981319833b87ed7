"""The fake's JSON API: from a request to a reply."""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import quote, unquote

from tests.fakes.gcs._objects import Objects, RefusedError, StoredObject
from tfpreempt.testing._server import Reply, Request

# The service keeps a multiple of this size of an unfinished upload.
QUANTUM = 256 << 10
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)")


@dataclasses.dataclass(slots=True, kw_only=True)
class Session:
    """An unfinished resumable upload.

    Attributes:
        bucket: bucket of the object.
        described: resource from the writer.
        query: the preconditions.
        pieces: bytes received so far.
        done: resource of the completed object; the session then has no bytes.
    """

    bucket: str
    described: Mapping[str, Any]
    query: Mapping[str, str]
    pieces: list[bytes] = dataclasses.field(default_factory=list)
    done: Mapping[str, Any] | None = None

    @property
    def received(self) -> int:
        """How many bytes."""
        return sum(len(piece) for piece in self.pieces)


class Service:
    """Buckets, objects and uploads behind one lock.

    Args:
        buckets: names of those that exist.
        max_page: the most entries of a page of a listing.
    """

    def __init__(self, buckets: Iterable[str], max_page: int) -> None:
        self.lock = threading.Lock()
        self.objects = Objects(buckets, max_page)
        self.sessions: dict[str, Session] = {}
        self.leaves_out_zeros = False

    def answer(self, request: Request) -> Reply:
        """Returns the reply; after an interrupted request the reply is lost."""
        try:
            with self.lock:
                return self._routed(request)
        except RefusedError as error:
            return error_reply(error.status, str(error))
        except (ValueError, KeyError) as error:
            return error_reply(400, f"Malformed request: {error!r}")

    def _routed(self, request: Request) -> Reply:
        is_cut = len(request.body) < request.length
        if is_cut and "upload_id" not in request.query:
            raise RefusedError(400, "Half a body is none.")
        for route, act in _ROUTES.items():
            if match := re.fullmatch(route, f"{request.method} {request.path}"):
                return act(self, request, *map(unquote, match.groups()))
        raise RefusedError(404, f"Not found: {request.method} {request.path}")

    # --- buckets and objects ---------------------------------------------------------

    def create_bucket(self, request: Request) -> Reply:
        name = str(json.loads(request.body)["name"])
        self.objects.create_bucket(name)
        return self.show_bucket(request, name)

    def show_bucket(self, request: Request, name: str) -> Reply:
        self.objects.bucket(name)
        shown = {"kind": "storage#bucket", "id": name, "name": name, "location": "US"}
        return _json_reply({**shown, "storageClass": "STANDARD"})

    def list_objects(self, request: Request, bucket: str) -> Reply:
        return _json_reply(self.objects.page(bucket, request.query))

    def delete_object(self, request: Request, bucket: str, name: str) -> Reply:
        self.objects.delete(bucket, name, request.query)
        return Reply(status=204)

    def get_object(self, request: Request, bucket: str, name: str) -> Reply:
        if request.query.get("alt") == "media":
            return self.download(request, bucket, name)
        return self._shown(self.objects.get(bucket, name, request.query))

    def download(self, request: Request, bucket: str, name: str) -> Reply:
        """Returns the bytes of an object, or a range of them."""
        stored = self.objects.get(bucket, name, request.query)
        shown, asked = stored.resource, request.headers.get("range", "")
        start, end = _wanted(asked, stored.size)
        digest = f",md5={shown['md5Hash']}" if "md5Hash" in shown else ""
        headers = {
            "Content-Type": shown["contentType"],
            "ETag": shown["etag"],
            "X-Goog-Generation": shown["generation"],
            "X-Goog-Metageneration": shown["metageneration"],
            "X-Goog-Hash": f"crc32c={shown['crc32c']}{digest}",
            "X-Goog-Stored-Content-Length": shown["size"],
            "X-Goog-Stored-Content-Encoding": "identity",
        }
        if asked:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{shown['size']}"
        return Reply(
            status=206 if asked else 200,
            headers=headers,
            body=stored.read(start, end),
        )

    def compose(self, request: Request, bucket: str, name: str) -> Reply:
        """Makes an object of others."""
        asked = json.loads(request.body)
        described = {**(asked.get("destination") or {}), "name": name}
        sources = asked.get("sourceObjects") or ()
        return self._shown(
            self.objects.compose(bucket, described, sources, request.query)
        )

    # --- uploads ---------------------------------------------------------------------

    def put_object(self, request: Request, bucket: str, name: str) -> Reply:
        """Stores the bytes of an object from one request."""
        described = {
            "name": name,
            "contentType": request.headers.get("content-type"),
            **_hashes(request),
        }
        return self._shown(
            self.objects.put(bucket, described, request.body, request.query)
        )

    def begin_upload(self, request: Request, bucket: str) -> Reply:
        kind = request.query.get("uploadType")
        if kind == "media":
            return self.put_object(request, bucket, request.query["name"])
        if kind == "multipart":
            return self._put_parts(request, bucket)
        if kind != "resumable":
            raise RefusedError(400, f"Unknown uploadType {kind!r}")
        content_type = request.headers.get("x-upload-content-type", "")
        described = _described(request, request.body or b"{}", content_type)
        self.objects.check(bucket, described["name"], request.query)
        upload_id = secrets.token_urlsafe(24)
        self.sessions[upload_id] = Session(
            bucket=bucket, described=described, query=request.query
        )
        location = (
            f"http://{request.headers['host']}/upload/storage/v1/b/"
            f"{quote(bucket, safe='')}/o?uploadType=resumable&upload_id={upload_id}"
        )
        return Reply(headers={"Location": location})

    def _put_parts(self, request: Request, bucket: str) -> Reply:
        """Stores an object with its resource from one request."""
        named = request.headers.get("content-type", "").partition("boundary=")[2]
        boundary = b"--" + named.partition(";")[0].strip('"').encode()
        _, first, rest = request.body.split(boundary + b"\r\n", 2)
        head, _, content = rest.partition(b"\r\n\r\n")
        described = _described(
            request,
            first.partition(b"\r\n\r\n")[2],
            head.decode().partition(":")[2].strip(),
        )
        data = content[: content.rindex(b"\r\n" + boundary + b"--")]
        return self._shown(self.objects.put(bucket, described, data, request.query))

    def continue_upload(self, request: Request, bucket: str) -> Reply:
        """Receives a chunk, or returns the number of received bytes."""
        session = self._session(request)
        if session.done is not None:
            return self._resource_reply(session.done)
        received, body = session.received, request.body
        all_of_it = f"bytes 0-0/{len(body)}"  # where the last byte lies, the body says
        part = request.headers.get("content-range", all_of_it)
        match = _CONTENT_RANGE.fullmatch(part)
        if match is None:
            raise RefusedError(400, f"Invalid Content-Range {part!r}")
        first = received if match[1] is None else int(match[1])
        if first > received:
            raise RefusedError(400, f"Chunk at {first}, expected {received}.")
        end = first + len(body)
        is_whole = len(body) == request.length and match[2] == str(end)
        kept = end if is_whole else end // QUANTUM * QUANTUM
        if kept > received:
            session.pieces.append(body[received - first : kept - first])
            received = kept
        if is_whole and received == end:
            described = {**session.described, **_hashes(request)}
            data = b"".join(session.pieces)
            stored = self.objects.put(session.bucket, described, data, session.query)
            session.done = stored.resource
            session.pieces.clear()
            return self._shown(stored)
        headers = {"Range": f"bytes=0-{received - 1}"} if received else {}
        return Reply(status=308, headers=headers)

    def cancel_upload(self, request: Request, bucket: str) -> Reply:
        self._session(request)
        del self.sessions[request.query["upload_id"]]
        return Reply(status=499)

    def _session(self, request: Request) -> Session:
        if request.query["upload_id"] not in self.sessions:
            raise RefusedError(410, "The upload session is gone.")
        return self.sessions[request.query["upload_id"]]

    def _shown(self, stored: StoredObject) -> Reply:
        return self._resource_reply(stored.resource)

    def _resource_reply(self, resource: Mapping[str, Any]) -> Reply:
        shown = dict(resource)
        if self.leaves_out_zeros and shown["size"] == "0":
            del shown["size"]
        return _json_reply(shown)


_BUCKETS = "/storage/v1/b"
_BUCKET = f"{_BUCKETS}/([^/]+)"
_OBJECTS = f"{_BUCKET}/o"
_OBJECT = f"{_OBJECTS}/(.+)"
_UPLOAD = f"(?:/resumable)?/upload{_OBJECTS}"
_PLAIN = "/(?!storage/|upload/|download/)([^/]+)/(.+)"
_ROUTES: Mapping[str, Callable[..., Reply]] = {
    f"POST {_BUCKETS}": Service.create_bucket,
    f"GET {_BUCKET}": Service.show_bucket,
    f"GET {_OBJECTS}": Service.list_objects,
    f"GET (?:/download)?{_OBJECT}": Service.get_object,
    f"DELETE {_OBJECT}": Service.delete_object,
    f"POST {_OBJECT}/compose": Service.compose,
    f"POST {_UPLOAD}": Service.begin_upload,
    f"PUT {_UPLOAD}": Service.continue_upload,
    f"DELETE {_UPLOAD}": Service.cancel_upload,
    f"GET {_PLAIN}": Service.download,
    f"PUT {_PLAIN}": Service.put_object,
}


def error_reply(status: int, message: str) -> Reply:
    """Returns an error in the form of the service."""
    if status == 304:
        return Reply(status=status)
    return _json_reply({"error": {"code": status, "message": message}}, status)


def _json_reply(value: Mapping[str, Any], status: int = 200) -> Reply:
    headers = {"Content-Type": "application/json; charset=UTF-8"}
    return Reply(status=status, headers=headers, body=json.dumps(value).encode())


def _described(request: Request, text: bytes, content_type: str) -> dict[str, Any]:
    """Returns the writer's description of an object."""
    told = {"name": request.query.get("name", ""), "contentType": content_type}
    return {**told, **json.loads(text)}


def _hashes(request: Request) -> dict[str, str]:
    """The checksums that a writer announces, as fields of a resource."""
    told = re.findall("(crc32c|md5)=([^, ]+)", request.headers.get("x-goog-hash", ""))
    return {"md5Hash" if kind == "md5" else kind: text for kind, text in told}


def _wanted(asked: str, size: int) -> tuple[int, int]:
    """Returns the first byte of a range, and the byte after its last byte."""
    if not asked:
        return 0, size
    match = _RANGE.fullmatch(asked)
    if match is None or match[0] == "bytes=-":
        raise RefusedError(400, f"Invalid range {asked!r}")
    if not match[1]:
        return max(size - int(match[2]), 0), size
    start = int(match[1])
    if start >= size:
        raise RefusedError(416, "The requested range cannot be satisfied.")
    return start, min(int(match[2]) + 1, size) if match[2] else size
