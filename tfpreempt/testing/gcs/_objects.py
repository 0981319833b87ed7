"""The objects of the fake: generations, preconditions, checksums, listings; no HTTP."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import google_crc32c

# Larger ones have none, as objects that the service composed have none: it would be
# what an upload costs most.
_MD5_LIMIT = 8 << 20
_CREATED = "2026-01-01T00:00:00.000Z"


class RefusedError(Exception):
    """What the service answers with an error status."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """One generation of an object.

    Attributes:
        bucket: its bucket.
        name: its name.
        pieces: its bytes.
        size: how many.
        crc32c: of them, as the service writes it.
        md5: likewise; "" for a large one whose writer sent none.
        generation: greater than that of all before it.
        metadata: what the writer attached.
        content_type: likewise.
    """

    bucket: str
    name: str
    pieces: tuple[bytes, ...]
    size: int
    crc32c: str
    md5: str
    generation: int
    metadata: Mapping[str, str]
    content_type: str

    def read(self, start: int, end: int) -> Iterator[memoryview]:
        """The bytes from `start` to before `end`, uncopied."""
        at = 0
        for piece in self.pieces:
            first, last = max(start - at, 0), min(end - at, len(piece))
            if first < last:
                yield memoryview(piece)[first:last]
            at += len(piece)

    def resource(self) -> dict[str, Any]:
        """The object as the JSON API shows it."""
        shown: dict[str, Any] = {
            "kind": "storage#object",
            "id": f"{self.bucket}/{self.name}/{self.generation}",
            "name": self.name,
            "bucket": self.bucket,
            "generation": str(self.generation),
            "metageneration": "1",
            "contentType": self.content_type,
            "size": str(self.size),
            "crc32c": self.crc32c,
            "etag": self.etag,
            "timeCreated": _CREATED,
            "updated": _CREATED,
            "storageClass": "STANDARD",
        }
        if self.md5:
            shown["md5Hash"] = self.md5
        if self.metadata:
            shown["metadata"] = dict(self.metadata)
        return shown

    @property
    def etag(self) -> str:
        return base64.b64encode(self.generation.to_bytes(8, "big")).decode()


class Objects:
    """All buckets. Not thread-safe: the server holds its lock."""

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
        resource: Mapping[str, Any],
        pieces: Iterable[bytes],
        query: Mapping[str, str],
    ) -> StoredObject:
        """Creates or replaces an object, if preconditions and checksums agree."""
        name = str(resource.get("name") or query.get("name") or "")
        if not name or len(name.encode()) > 1024 or "\r" in name or "\n" in name:
            raise RefusedError(400, f"Invalid object name: {name!r}")
        held = self.bucket(bucket)
        self.check(held.get(name), query)
        kept = tuple(pieces)
        size = sum(len(piece) for piece in kept)
        stored = StoredObject(
            bucket=bucket,
            name=name,
            pieces=kept,
            size=size,
            crc32c=crc32c(kept),
            md5=md5(kept) if size <= _MD5_LIMIT or "md5Hash" in resource else "",
            generation=next(self._generations),
            metadata=dict(resource.get("metadata") or {}),
            content_type=resource.get("contentType") or "application/octet-stream",
        )
        check_hashes(stored, resource.get("crc32c"), resource.get("md5Hash"))
        held[name] = stored
        return stored

    def get(self, bucket: str, name: str, query: Mapping[str, str]) -> StoredObject:
        """The object; preconditions are checked."""
        stored = self.bucket(bucket).get(name)
        wanted = query.get("generation")
        if stored is None or (wanted and int(wanted) != stored.generation):
            raise RefusedError(404, f"No such object: {bucket}/{name}")
        self.check(stored, query)
        return stored

    def delete(self, bucket: str, name: str, query: Mapping[str, str]) -> None:
        """Deletes an object, if the preconditions hold."""
        self.get(bucket, name, query)
        del self.bucket(bucket)[name]

    def page(self, bucket: str, query: Mapping[str, str]) -> dict[str, Any]:
        """One page of a listing, folded at the delimiter."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = base64.b64decode(query.get("pageToken", "")).decode()
        limit = min(int(query.get("maxResults") or self._max_page), self._max_page)
        held = self.bucket(bucket)
        items: list[dict[str, Any]] = []
        folders: list[str] = []
        last = ""
        for name in sorted(held, key=str.encode):
            head, found, _ = name[len(prefix) :].partition(delimiter or "\0")
            shown = prefix + head + found if found else name
            if not name.startswith(prefix) or shown <= after or shown in folders[-1:]:
                continue
            if len(items) + len(folders) == limit:
                token = base64.b64encode(last.encode()).decode()
                break
            last = shown
            if found:
                folders.append(shown)
            else:
                items.append(held[name].resource())
        else:
            token = ""
        reply: dict[str, Any] = {"kind": "storage#objects"}
        reply |= {"items": items} if items else {}
        reply |= {"prefixes": folders} if folders else {}
        reply |= {"nextPageToken": token} if token else {}
        return reply

    @staticmethod
    def check(stored: StoredObject | None, query: Mapping[str, str]) -> None:
        """Raises RefusedError unless the query's preconditions hold."""
        generation = stored.generation if stored else 0
        metageneration = 1 if stored else 0
        for field, now in (
            ("ifGenerationMatch", generation),
            ("ifMetagenerationMatch", metageneration),
        ):
            if field in query and int(query[field]) != now:
                raise RefusedError(
                    412,
                    "At least one of the pre-conditions you specified did not hold.",
                )
        for field, now in (
            ("ifGenerationNotMatch", generation),
            ("ifMetagenerationNotMatch", metageneration),
        ):
            if field in query and int(query[field]) == now:
                raise RefusedError(304, "Not modified")


def crc32c(pieces: Iterable[bytes]) -> str:
    """The checksum as the service writes it: base64 of four bytes, big end first."""
    value = 0
    for piece in pieces:
        value = google_crc32c.extend(value, piece)
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def md5(pieces: Iterable[bytes]) -> str:
    """Likewise."""
    digest = hashlib.md5(usedforsecurity=False)
    for piece in pieces:
        digest.update(piece)
    return base64.b64encode(digest.digest()).decode()


def check_hashes(stored: StoredObject, crc: str | None, digest: str | None) -> None:
    """Raises RefusedError if the writer announced other checksums."""
    if crc and crc != stored.crc32c:
        raise RefusedError(
            400, f"Provided CRC32C {crc!r} doesn't match {stored.crc32c!r}"
        )
    if digest and digest != stored.md5:
        raise RefusedError(400, f"Provided MD5 hash {digest!r} doesn't match.")
