"""A server of Azure Blob Storage on the loopback interface, for the requests of
obstore.

The server has Put Blob with conditions, blocks and block lists, downloads with ranges
and ETags, HEAD, deletions one by one and in a batch, and listings in pages. Signatures
are not checked. tests/contracts runs the same contract against Azurite, Microsoft's
emulator, if Azurite is installed.
"""

from __future__ import annotations

import dataclasses
import email.utils
import http
import http.server
import itertools
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from urllib.parse import unquote
from xml.sax.saxutils import escape

from tfpreempt.testing._server import FakeServer, Reply, Request, _Handler

_IDENTIFIER = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_SUBREQUEST = re.compile(
    rb"Content-ID: (\d+)\r\n.*?DELETE (\S+) HTTP/1.1\r\n", re.DOTALL
)
# Azure's error codes of the statuses that a test orders.
CODES = {
    403: "AuthorizationPermissionMismatch",
    500: "InternalError",
    503: "ServerBusy",
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Blob:
    data: bytes
    headers: Mapping[str, str]  # ETag, Last-Modified, type and metadata


class _HeadReply(Reply):
    """The headers of an answer, and the length of a body that is not sent."""

    def send(self, to: http.server.BaseHTTPRequestHandler) -> None:
        to.send_response(self.status)
        for name, text in self.headers.items():
            to.send_header(name, text)
        to.send_header("Content-Length", str(len(self.body)))
        to.end_headers()


class _HeadHandler(_Handler):
    do_HEAD = _Handler.do_GET  # noqa: N815  (a name that http.server calls)


class _RefusedError(Exception):
    """Args: the HTTP status, and Azure's error code."""


class AzureServer(FakeServer):
    """One account with the container "bucket"; blobs live in memory.

    Args:
        max_page: the most entries of a page of a listing.

    Attributes:
        failures: statuses of the next answers, the last one first.
        ignores_ranges: whether downloads of a range get the whole blob.
        may_delete: whether the account may delete.
        lost_replies: for each next PUT of the kind ("blob", "block", "blocklist"), the
            reply is lost after the request was served.
        during_part: entered while a block of an upload is read.
    """

    _name = "fake-azure"

    def __init__(self, max_page: int = 5000) -> None:
        self.failures: list[int] = []
        self.ignores_ranges = False
        self.may_delete = True
        self.lost_replies: list[str] = []
        self.during_part: Callable[[], AbstractContextManager[object]] = nullcontext
        self._max_page = max_page
        self._lock = threading.Lock()
        self._blobs: dict[str, _Blob] = {}
        self._blocks: dict[str, dict[str, bytes]] = {}  # uncommitted, by name and id
        self._tags = itertools.count(1)
        super().__init__()
        self.RequestHandlerClass = _HeadHandler

    def environment(self) -> dict[str, str]:
        return {
            "AZURE_STORAGE_USE_EMULATOR": "true",
            "AZURITE_BLOB_STORAGE_URL": self.url,
        }

    def put(self, name: str, data: bytes, **metadata: str) -> None:
        """Stores a blob as another program does."""
        with self._lock:
            self._store(name, data, {f"x-ms-meta-{k}": v for k, v in metadata.items()})

    def serve(self, head: Request, read: Callable[[int], bytes]) -> Reply | None:
        reply = super().serve(head, read)
        kind = head.query.get("comp", "blob")
        if head.method == "PUT" and kind in self.lost_replies:
            self.lost_replies.remove(kind)
            return None
        return reply

    def answer(self, request: Request) -> Reply:
        try:
            if self.failures:
                status = self.failures.pop()
                raise _RefusedError(status, CODES[status])
            is_part = request.query.get("comp") == "block"
            with self.during_part() if is_part else nullcontext(), self._lock:
                reply = self._routed(request)
        except _RefusedError as error:
            status, code = error.args
            text = f"\ufeff<?xml version='1.0'?><Error><Code>{code}</Code></Error>"
            headers = {"x-ms-error-code": code, "Content-Type": "application/xml"}
            reply = Reply(status=status, headers=headers, body=text.encode())
        if request.method == "HEAD":
            return _HeadReply(
                status=reply.status, headers=reply.headers, body=reply.body
            )
        return reply

    def _routed(self, request: Request) -> Reply:
        _, _, path = request.path.lstrip("/").partition("/")  # the account
        container, _, name = path.partition("/")
        if container != "bucket":
            raise _RefusedError(404, "ContainerNotFound")
        name = unquote(name)
        match request.method, request.query.get("comp"):
            case "GET", "list":
                return self._listing(request.query)
            case "POST", "batch":
                return self._batch(request)
            case "PUT", "block":
                blocks = self._blocks.setdefault(name, {})
                blocks[request.query["blockid"]] = request.body
                return Reply(status=201)
            case "PUT", "blocklist":
                return self._put_blocks(name, request)
            case "PUT", None:
                return self._put(name, request)
            case "GET" | "HEAD", None:
                return self._get(name, request.headers)
            case "DELETE", None:
                return self._delete(name)
        raise _RefusedError(400, "UnsupportedQueryParameter")

    def _store(self, name: str, data: bytes, sent: Mapping[str, str]) -> Reply:
        kept = {k: v for k, v in sent.items() if k.startswith("x-ms-meta-")}
        if not all(_IDENTIFIER.fullmatch(k[len("x-ms-meta-") :]) for k in kept):
            raise _RefusedError(400, "InvalidMetadata")
        version = {
            "ETag": f'"0x{next(self._tags):X}"',
            "Last-Modified": email.utils.formatdate(usegmt=True),
        }
        kind = sent.get("x-ms-blob-content-type", "application/octet-stream")
        self._blobs[name] = _Blob(data, {**version, "Content-Type": kind, **kept})
        self._blocks.pop(name, None)  # also blocks of other writers
        return Reply(status=201, headers=version)

    def _put(self, name: str, request: Request) -> Reply:
        found = self._blobs.get(name)
        if request.headers.get("if-none-match") == "*" and found is not None:
            raise _RefusedError(409, "BlobAlreadyExists")
        expected = request.headers.get("if-match")
        if expected and (found is None or found.headers["ETag"] != expected):
            raise _RefusedError(412, "ConditionNotMet")
        return self._store(name, request.body, request.headers)

    def _put_blocks(self, name: str, request: Request) -> Reply:
        blocks = self._blocks.get(name, {})
        ids = re.findall("<Uncommitted>(.*?)</Uncommitted>", request.body.decode())
        if not all(each in blocks for each in ids):
            raise _RefusedError(400, "InvalidBlockList")
        return self._store(name, b"".join(map(blocks.get, ids)), request.headers)

    def _get(self, name: str, asked: Mapping[str, str]) -> Reply:
        if (found := self._blobs.get(name)) is None:
            raise _RefusedError(404, "BlobNotFound")
        if asked.get("if-match", found.headers["ETag"]) != found.headers["ETag"]:
            raise _RefusedError(412, "ConditionNotMet")
        wanted = _RANGE.fullmatch(asked.get("range", ""))
        if wanted is None or self.ignores_ranges:
            return Reply(headers=found.headers, body=found.data)
        size = len(found.data)
        start, end = int(wanted[1]), min(int(wanted[2] or size), size - 1)
        if start >= size:
            raise _RefusedError(416, "InvalidRange")
        place = {"Content-Range": f"bytes {start}-{end}/{size}"}
        body = found.data[start : end + 1]
        return Reply(status=206, headers={**found.headers, **place}, body=body)

    def _delete(self, name: str) -> Reply:
        if not self.may_delete:
            raise _RefusedError(403, CODES[403])
        if self._blobs.pop(name, None) is None:
            raise _RefusedError(404, "BlobNotFound")
        return Reply(status=202)

    def _batch(self, request: Request) -> Reply:
        parts = []
        for number, target in _SUBREQUEST.findall(request.body):
            _, _, name = unquote(target.decode()).lstrip("/").split("/", 2)
            try:
                status = self._delete(name).status
            except _RefusedError as error:
                status = error.args[0]
            reason = http.HTTPStatus(status).phrase
            parts.append(
                "--batchresponse\r\nContent-Type: application/http\r\n"
                f"Content-ID: {number.decode()}\r\n\r\n"
                f"HTTP/1.1 {status} {reason}\r\nx-ms-version: 2023-11-03\r\n\r\n"
            )
        body = "".join([*parts, "--batchresponse--\r\n"]).encode()
        kind = {"Content-Type": "multipart/mixed; boundary=batchresponse"}
        return Reply(status=202, headers=kind, body=body)

    def _listing(self, query: Mapping[str, str]) -> Reply:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        entries: dict[str, str] = {}
        for name, blob in sorted(self._blobs.items()):
            if not name.startswith(prefix):
                continue
            below, mark, _ = name[len(prefix) :].partition(delimiter or "\0")
            if mark:
                entries.setdefault(
                    folder := prefix + below + mark,
                    f"<BlobPrefix><Name>{escape(folder)}</Name></BlobPrefix>",
                )
            else:
                entries[name] = _entry(name, blob)
        keys = sorted(each for each in entries if each >= query.get("marker", ""))
        limit = min(int(query.get("maxresults", self._max_page)), self._max_page)
        blobs = "".join(entries[each] for each in keys[:limit])
        marker = escape("".join(keys[limit : limit + 1]))
        text = (
            '\ufeff<?xml version="1.0" encoding="utf-8"?><EnumerationResults>'
            f"<Blobs>{blobs}</Blobs><NextMarker>{marker}</NextMarker>"
            "</EnumerationResults>"
        )
        return Reply(headers={"Content-Type": "application/xml"}, body=text.encode())


def _entry(name: str, blob: _Blob) -> str:
    return (
        f"<Blob><Name>{escape(name)}</Name><Properties>"
        f"<Last-Modified>{blob.headers['Last-Modified']}</Last-Modified>"
        f"<Etag>{escape(blob.headers['ETag'])}</Etag>"
        f"<Content-Length>{len(blob.data)}</Content-Length>"
        f"<Content-Type>{escape(blob.headers['Content-Type'])}</Content-Type>"
        "<BlobType>BlockBlob</BlobType></Properties></Blob>"
    )
