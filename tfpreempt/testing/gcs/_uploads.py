"""Uploads of the fake: in one request, in two parts, and in many chunks."""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfpreempt.testing.gcs._objects import Objects, RefusedError, StoredObject

# What the service keeps of an upload that goes on is a multiple of this.
QUANTUM = 256 << 10
_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")


@dataclasses.dataclass(slots=True, kw_only=True)
class Session:
    """A resumable upload on its way.

    Attributes:
        bucket: where the object goes.
        resource: what the writer says of it.
        query: the preconditions.
        pieces: what was received.
        received: how many bytes.
        done: what became of it.
    """

    bucket: str
    resource: Mapping[str, Any]
    query: Mapping[str, str]
    pieces: list[bytes] = dataclasses.field(default_factory=list)
    received: int = 0
    done: StoredObject | None = None


class Uploads:
    """The sessions. Not thread-safe: the server holds its lock."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._sessions: dict[str, Session] = {}

    def begin(
        self, bucket: str, body: bytes, query: Mapping[str, str], content_type: str
    ) -> str:
        """Opens a session; returns its id."""
        resource = json.loads(body or b"{}")
        resource.setdefault("contentType", content_type)
        name = str(resource.get("name") or query.get("name") or "")
        self._objects.check(self._objects.bucket(bucket).get(name), query)
        upload_id = secrets.token_urlsafe(24)
        self._sessions[upload_id] = Session(
            bucket=bucket, resource=resource, query=dict(query)
        )
        return upload_id

    @property
    def open_count(self) -> int:
        """Sessions that are neither finished nor given up."""
        return sum(each.done is None for each in self._sessions.values())

    def forget(self) -> None:
        """Gives all sessions up."""
        self._sessions.clear()

    def cancel(self, upload_id: str) -> None:
        """Gives a session up."""
        self._session(upload_id)
        del self._sessions[upload_id]

    def take(
        self,
        upload_id: str,
        pieces: Sequence[bytes],
        content_range: str,
        hashes: Mapping[str, str],
        *,
        is_cut: bool = False,
    ) -> Session:
        """Receives a chunk, or tells how much there is.

        Args:
            upload_id: of the session.
            pieces: the body.
            content_range: "bytes 0-524287/*", "bytes */1000", or "" for all there is.
            hashes: what the writer announced, by "crc32c" or "md5".
            is_cut: the body broke off; what came of it may be kept.

        Returns:
            The session; its `done` is set if the object is complete.
        """
        session = self._session(upload_id)
        if session.done is not None:
            return session
        length = sum(len(piece) for piece in pieces)
        first, total = _parsed(content_range, length)
        if first is None:
            first = session.received
        if first > session.received:
            raise RefusedError(400, f"Chunk at {first}, expected {session.received}.")
        ends = not is_cut and total == first + length
        usable = first + length if ends else (first + length) // QUANTUM * QUANTUM
        for piece in _between(pieces, session.received - first, usable - first):
            session.pieces.append(piece)
            session.received += len(piece)
        if ends and session.received == total:
            session.done = self._objects.put(
                session.bucket,
                {**session.resource, **_hash_fields(hashes)},
                session.pieces,
                session.query,
            )
            session.pieces = []
        return session

    def multipart(
        self, bucket: str, body: bytes, content_type: str, query: Mapping[str, str]
    ) -> StoredObject:
        """An object with its resource in one request."""
        match = re.search(r'boundary="?([^";]+)"?', content_type)
        if match is None:
            raise RefusedError(400, "Missing boundary")
        boundary = b"--" + match[1].encode()
        _, described, rest = body.split(boundary + b"\r\n", 2)
        resource = json.loads(described.partition(b"\r\n\r\n")[2])
        head, _, content = rest.partition(b"\r\n\r\n")
        end = content.rfind(b"\r\n" + boundary + b"--")
        if end < 0:
            raise RefusedError(400, "Malformed multipart body.")
        kind = head.decode().partition(":")[2].strip()
        resource.setdefault("contentType", kind)
        return self._objects.put(bucket, resource, [content[:end]], query)

    def _session(self, upload_id: str) -> Session:
        if upload_id not in self._sessions:
            raise RefusedError(410, "The upload session is gone.")
        return self._sessions[upload_id]


def hashes_of(header: str) -> dict[str, str]:
    """What an x-goog-hash header announces."""
    pairs = (each.strip().partition("=") for each in header.split(",") if each)
    return {kind: text for kind, _, text in pairs}


def _hash_fields(hashes: Mapping[str, str]) -> dict[str, str]:
    fields = {"crc32c": "crc32c", "md5": "md5Hash"}
    return {fields[kind]: text for kind, text in hashes.items() if kind in fields}


def _parsed(content_range: str, length: int) -> tuple[int | None, int | None]:
    """First byte (None: none is sent) and size of the whole (None: not known yet)."""
    if not content_range:
        return 0, length
    match = _RANGE.fullmatch(content_range.strip())
    if match is None:
        raise RefusedError(400, f"Invalid Content-Range {content_range!r}")
    first = None if match[1] is None else int(match[1])
    return first, None if match[3] == "*" else int(match[3])


def _between(pieces: Iterable[bytes], start: int, end: int) -> Iterable[bytes]:
    """The bytes from `start` to before `end`; whole pieces aren't copied."""
    at = 0
    for piece in pieces:
        first, last = max(start - at, 0), min(end - at, len(piece))
        if first < last:
            yield piece[first:last]
        at += len(piece)
