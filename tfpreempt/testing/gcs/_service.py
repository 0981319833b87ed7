"""The fake's JSON API: from a request to a reply."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, unquote

from tfpreempt.testing.gcs._objects import Objects, RefusedError, StoredObject
from tfpreempt.testing.gcs._uploads import Session, Uploads, hashes_of

_OBJECT = re.compile(r"(?:/download)?/storage/v1/b/([^/]+)/o/(.+)")
_OBJECTS = re.compile(r"/storage/v1/b/([^/]+)/o")
_BUCKET = re.compile(r"/storage/v1/b/([^/]+)")
_BUCKETS = re.compile(r"/storage/v1/b")
_UPLOAD = re.compile(r"(?:/resumable)?/upload/storage/v1/b/([^/]+)/o")
_PLAIN = re.compile(r"/(?!storage/|upload/|download/)([^/]+)/(.+)")
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as the server got it.

    Attributes:
        number: counted from 0, in the order of arrival.
        method: GET, PUT, POST or DELETE.
        path: without the query, still quoted.
        query: the query's fields.
        headers: by lower-case names.
        length: of the body, in bytes.
    """

    number: int
    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    length: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer; `length` bytes of `pieces` follow its head."""

    status: int
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    length: int = 0
    pieces: Iterable[bytes | memoryview] = ()


class Service:
    """Buckets, objects and uploads behind one lock.

    Args:
        buckets: names of those that exist.
        url: where the server listens; sessions have addresses.
        max_page: the most entries of a page of a listing.
    """

    def __init__(self, buckets: Iterable[str], url: str, max_page: int) -> None:
        self.lock = threading.Lock()
        self.objects = Objects(buckets, max_page)
        self.uploads = Uploads(self.objects)
        self.leaves_out_zeros = False
        self._url = url

    def answer(
        self, request: Request, body: tuple[bytes, ...], *, is_cut: bool = False
    ) -> Reply:
        """The reply; what a cut body leaves is taken in, and nobody hears the reply."""
        try:
            with self.lock:
                if is_cut and "upload_id" not in request.query:
                    return Reply(status=400)
                return self._routed(request, body, is_cut)
        except RefusedError as error:
            return error_reply(error.status, str(error))
        except (ValueError, KeyError) as error:
            return error_reply(400, f"Malformed request: {error!r}")

    def _routed(self, request: Request, body: tuple[bytes, ...], is_cut: bool) -> Reply:
        path, method = request.path, request.method
        if match := _UPLOAD.fullmatch(path):
            return self._upload(unquote(match[1]), request, body, is_cut)
        if match := _OBJECT.fullmatch(path):
            return self._object(unquote(match[1]), unquote(match[2]), request)
        if (match := _OBJECTS.fullmatch(path)) and method == "GET":
            return json_reply(self.objects.page(unquote(match[1]), request.query))
        if (match := _BUCKET.fullmatch(path)) and method == "GET":
            self.objects.bucket(unquote(match[1]))
            return json_reply(_bucket_resource(unquote(match[1])))
        if _BUCKETS.fullmatch(path) and method == "POST":
            name = str(json.loads(b"".join(body))["name"])
            self.objects.create_bucket(name)
            return json_reply(_bucket_resource(name))
        if match := _PLAIN.fullmatch(path):
            return self._plain(unquote(match[1]), unquote(match[2]), request, body)
        raise RefusedError(404, f"Not found: {method} {path}")

    def _object(self, bucket: str, name: str, request: Request) -> Reply:
        if request.method == "DELETE":
            self.objects.delete(bucket, name, request.query)
            return Reply(status=204)
        stored = self.objects.get(bucket, name, request.query)
        if request.query.get("alt") == "media":
            return media_reply(stored, request.headers.get("range", ""))
        return self._shown(stored)

    def _upload(
        self, bucket: str, request: Request, body: tuple[bytes, ...], is_cut: bool
    ) -> Reply:
        kind = request.query.get("uploadType")
        if upload_id := request.query.get("upload_id"):
            return self._session(upload_id, request, body, is_cut)
        content_type = request.headers.get("content-type", "")
        if kind == "resumable":
            announced = request.headers.get("x-upload-content-type", "")
            upload_id = self.uploads.begin(
                bucket, b"".join(body), request.query, announced
            )
            location = (
                f"{self._url}/upload/storage/v1/b/{quote(bucket, safe='')}/o"
                f"?uploadType=resumable&upload_id={upload_id}"
            )
            return Reply(status=200, headers={"Location": location})
        if kind == "multipart":
            joined = b"".join(body)
            stored = self.uploads.multipart(bucket, joined, content_type, request.query)
            return self._shown(stored)
        if kind == "media":
            return self._put(bucket, request.query["name"], request, body)
        raise RefusedError(400, f"Unknown uploadType {kind!r}")

    def _session(
        self, upload_id: str, request: Request, body: tuple[bytes, ...], is_cut: bool
    ) -> Reply:
        if request.method == "DELETE":
            self.uploads.cancel(upload_id)
            return Reply(status=499)
        session = self.uploads.take(
            upload_id,
            body,
            request.headers.get("content-range", ""),
            hashes_of(request.headers.get("x-goog-hash", "")),
            is_cut=is_cut,
        )
        if session.done is not None:
            return self._shown(session.done)
        return _progress(session)

    def _put(
        self, bucket: str, name: str, request: Request, body: tuple[bytes, ...]
    ) -> Reply:
        hashes = hashes_of(request.headers.get("x-goog-hash", ""))
        resource = {
            "name": name,
            "contentType": request.headers.get("content-type"),
            "crc32c": hashes.get("crc32c"),
        }
        if "md5" in hashes:
            resource["md5Hash"] = hashes["md5"]
        stored = self.objects.put(bucket, resource, body, request.query)
        return self._shown(stored)

    def _plain(
        self, bucket: str, name: str, request: Request, body: tuple[bytes, ...]
    ) -> Reply:
        if request.method == "PUT":
            return self._put(bucket, name, request, body)
        if request.method == "GET":
            stored = self.objects.get(bucket, name, request.query)
            return media_reply(stored, request.headers.get("range", ""))
        raise RefusedError(405, f"{request.method} is not served here.")

    def _shown(self, stored: StoredObject) -> Reply:
        resource = stored.resource()
        if self.leaves_out_zeros and not stored.size:
            del resource["size"]
        return json_reply(resource)


def json_reply(value: Mapping[str, Any], status: int = 200) -> Reply:
    data = json.dumps(value).encode()
    headers = {"Content-Type": "application/json; charset=UTF-8"}
    return Reply(status=status, headers=headers, length=len(data), pieces=(data,))


def error_reply(status: int, message: str) -> Reply:
    """An error as the service words it."""
    if status == 304:
        return Reply(status=status)
    return json_reply({"error": {"code": status, "message": message}}, status)


def media_reply(stored: StoredObject, asked: str) -> Reply:
    """An object's bytes, or a range of them."""
    start, end = _wanted(asked, stored.size)
    hashes = f"crc32c={stored.crc32c}" + (f",md5={stored.md5}" if stored.md5 else "")
    headers = {
        "Content-Type": stored.content_type,
        "ETag": stored.etag,
        "X-Goog-Generation": str(stored.generation),
        "X-Goog-Metageneration": "1",
        "X-Goog-Hash": hashes,
        "X-Goog-Stored-Content-Length": str(stored.size),
        "X-Goog-Stored-Content-Encoding": "identity",
    }
    if asked:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{stored.size}"
    return Reply(
        status=206 if asked else 200,
        headers=headers,
        length=end - start,
        pieces=stored.read(start, end),
    )


def _wanted(asked: str, size: int) -> tuple[int, int]:
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


def _progress(session: Session) -> Reply:
    headers = {}
    if session.received:
        headers["Range"] = f"bytes=0-{session.received - 1}"
    return Reply(status=308, headers=headers)


def _bucket_resource(name: str) -> dict[str, Any]:
    return {
        "kind": "storage#bucket",
        "id": name,
        "name": name,
        "location": "US",
        "storageClass": "STANDARD",
    }
