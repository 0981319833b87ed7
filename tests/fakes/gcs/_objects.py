"""The objects of the fake: generations, preconditions, checksums, listings; no HTTP."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfpreempt.storage import checksum
from tfpreempt.storage.object_store import MAX_PARTS

# Larger ones have none, as objects that the service composed have none: it would be
# what an upload costs most.
_MD5_LIMIT = 8 << 20
_CREATED = "2026-01-01T00:00:00.000Z"


class RefusedError(Exception):
    """An error status of the service."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """One generation of an object.

    Attributes:
        pieces: bytes of the object; several pieces after a compose, which copies no
            bytes.
        generation: number greater than the numbers of all earlier generations.
        resource: the object in the form of the JSON API. A composed object, and a large
            object without a checksum of the writer, has no "md5Hash".
    """

    pieces: tuple[bytes, ...]
    generation: int
    resource: Mapping[str, Any]

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(map(len, self.pieces))

    def read(self, start: int, end: int) -> bytes | memoryview:
        """Returns a range of the bytes, without a copy if one piece has the range."""
        found, at = [], 0
        for piece in self.pieces:
            if part := memoryview(piece)[max(start - at, 0) : max(end - at, 0)]:
                found.append(part)
            at += len(piece)
        return found[0] if len(found) == 1 else b"".join(found)


class Objects:
    """The objects of all buckets. Not thread-safe: the service holds a lock."""

    def __init__(self, buckets: Iterable[str], max_page: int) -> None:
        self._max_page = max_page
        self._buckets: dict[str, dict[str, StoredObject]] = {b: {} for b in buckets}
        self._generations = itertools.count(1)

    def create_bucket(self, name: str) -> None:
        if name in self._buckets:
            raise RefusedError(409, "You already own this bucket.")
        self._buckets[name] = {}

    def bucket(self, name: str) -> dict[str, StoredObject]:
        """A bucket's objects by name."""
        if name not in self._buckets:
            raise RefusedError(404, "The specified bucket does not exist.")
        return self._buckets[name]

    def put(
        self,
        bucket: str,
        described: Mapping[str, Any],
        data: bytes,
        query: Mapping[str, str],
    ) -> StoredObject:
        """Creates or replaces an object, if preconditions and checksums hold.

        Args:
            bucket: bucket of the object.
            described: resource from the writer.
            data: bytes of the object.
            query: the preconditions.
        """
        hashes = {"crc32c": _text_of_crc(checksum.of_bytes(data))}
        if len(data) <= _MD5_LIMIT or "md5Hash" in described:
            digest = hashlib.md5(data, usedforsecurity=False).digest()
            hashes["md5Hash"] = _text_of(digest)
        return self._put(bucket, described, (data,), hashes, query)

    def compose(
        self,
        bucket: str,
        described: Mapping[str, Any],
        sources: Sequence[Mapping[str, Any]],
        query: Mapping[str, str],
    ) -> StoredObject:
        """Creates or replaces an object from the bytes of other objects.

        Args:
            bucket: bucket of all objects.
            described: resource from the writer.
            sources: sources in the form of the JSON API, with their preconditions.
            query: the preconditions.
        """
        if not 1 <= len(sources) <= MAX_PARTS:
            raise RefusedError(
                400, f"{len(sources)} source components; 1 to 32 can be."
            )
        parts = []
        for source in sources:
            generation = source.get("generation")
            wanted = {} if generation is None else {"generation": str(generation)}
            conditions = source.get("objectPreconditions") or {}
            wanted |= {kind: str(value) for kind, value in conditions.items()}
            parts.append(self.get(bucket, source["name"], wanted))
        crc = 0
        for part in parts:
            crc = checksum.joined(crc, _crc_of(part.resource["crc32c"]), part.size)
        pieces = tuple(piece for part in parts for piece in part.pieces)
        return self._put(
            bucket, described, pieces, {"crc32c": _text_of_crc(crc)}, query
        )

    def _put(
        self,
        bucket: str,
        described: Mapping[str, Any],
        pieces: tuple[bytes, ...],
        hashes: Mapping[str, str],
        query: Mapping[str, str],
    ) -> StoredObject:
        name = described["name"]
        if not name or len(name.encode()) > 1024 or "\r" in name or "\n" in name:
            raise RefusedError(400, f"Invalid object name: {name!r}")
        self.check(bucket, name, query)
        generation = next(self._generations)
        resource = {
            "kind": "storage#object",
            "id": f"{bucket}/{name}/{generation}",
            "name": name,
            "bucket": bucket,
            "generation": str(generation),
            "metageneration": "1",
            "contentType": described.get("contentType") or "application/octet-stream",
            "size": str(sum(map(len, pieces))),
            "etag": _text_of(generation.to_bytes(8, "big")),
            "timeCreated": _CREATED,
            "updated": _CREATED,
            "storageClass": "STANDARD",
            **hashes,
        }
        if described.get("metadata"):
            resource["metadata"] = dict(described["metadata"])
        for field in ("crc32c", "md5Hash"):
            said = described.get(field)
            if said and said != resource.get(field):
                raise RefusedError(
                    400,
                    f"Provided {field} {said!r} doesn't match {resource.get(field)!r}.",
                )
        stored = StoredObject(pieces=pieces, generation=generation, resource=resource)
        self.bucket(bucket)[name] = stored
        return stored

    def get(self, bucket: str, name: str, query: Mapping[str, str]) -> StoredObject:
        """The object; preconditions are checked."""
        stored = self.bucket(bucket).get(name)
        wanted = query.get("generation")
        if stored is None or (wanted and int(wanted) != stored.generation):
            raise RefusedError(404, f"No such object: {bucket}/{name}")
        self.check(bucket, name, query)
        return stored

    def delete(self, bucket: str, name: str, query: Mapping[str, str]) -> None:
        """Deletes an object, if the preconditions hold."""
        self.get(bucket, name, query)
        del self.bucket(bucket)[name]

    def page(self, bucket: str, query: Mapping[str, str]) -> dict[str, Any]:
        """Returns one page of a listing, folded at the delimiter."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter") or "\0"
        after = base64.b64decode(query.get("pageToken", "")).decode()
        limit = min(int(query.get("maxResults") or self._max_page), self._max_page)
        held = self.bucket(bucket)
        shown: dict[str, bool] = {}  # names, and folders, which are true
        for name in sorted(name for name in held if name.startswith(prefix)):
            head, found, _ = name[len(prefix) :].partition(delimiter)
            shown[prefix + head + found] = bool(found)
        left = [each for each in shown if each > after]
        page = left[:limit]
        reply = {
            "kind": "storage#objects",
            "items": [held[each].resource for each in page if not shown[each]],
            "prefixes": [each for each in page if shown[each]],
            "nextPageToken": _text_of(page[-1].encode()) if page != left else "",
        }
        return {field: value for field, value in reply.items() if value}

    def check(self, bucket: str, name: str, query: Mapping[str, str]) -> None:
        """Raises RefusedError unless the query's preconditions hold."""
        stored = self.bucket(bucket).get(name)
        generation, metageneration = (stored.generation, 1) if stored else (0, 0)
        for kind, now in (
            ("Generation", generation),
            ("Metageneration", metageneration),
        ):
            if int(query.get(f"if{kind}Match", now)) != now:
                raise RefusedError(
                    412,
                    "At least one of the pre-conditions you specified did not hold.",
                )
            if int(query.get(f"if{kind}NotMatch", -1)) == now:
                raise RefusedError(304, "Not modified")


def _text_of(data: bytes) -> str:
    """Bytes as the service writes them."""
    return base64.b64encode(data).decode()


def _text_of_crc(crc32c: int) -> str:
    """A checksum as the service writes it."""
    return _text_of(crc32c.to_bytes(4, "big"))


def _crc_of(text: str) -> int:
    """A checksum that the service has written."""
    return int.from_bytes(base64.b64decode(text), "big")
