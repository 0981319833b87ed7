"""ObjectStore in S3, or in what speaks its protocol, by obstore.

An object of up to 8 MiB is created by one request that S3 refuses if there is one of
that name (`If-None-Match: *`); a token in its metadata tells whether it was refused
because of itself, after the loss of an answer. A larger one goes up in parts, for
which obstore has no condition: it is looked for first, and two writers that put the
same large name at the same moment can both succeed. Whoever needs one winner puts a
small object; commits do.

S3 has no crc32c of what it did not get one for, so writers attach it to the object.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from typing import IO, Any

import obstore
import obstore.exceptions as said

from tfpreempt import errors
from tfpreempt.storage import checksum, pieces, s3_client
from tfpreempt.storage.interface import (
    ObjectMissingError,
    ObjectStat,
    check_name,
)
from tfpreempt.storage.limits import Limit
from tfpreempt.storage.s3_failure import is_about_the_bucket, translated

PIECE = 8 << 20
_MOST_PARTS = 9_000  # S3 takes 10,000
_ATTEMPTS = 4
_PAGE = 1000
_IGNORED = "non-partial response"  # obstore tells it by its words only
_TOKEN, _CRC = "tfpreempt-writer", "tfpreempt-crc32c"


class S3Store:
    """Objects below a prefix of a bucket. Any thread.

    Args:
        bucket: name of the bucket.
        prefix: what all names begin with, without the "/" behind it; "" for none.

    Raises:
        ConfigurationError: the environment has a setting that cannot work.
    """

    def __init__(self, bucket: str, prefix: str = "") -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._store = s3_client.connect(bucket)

    @property
    def uri(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def put_if_absent(
        self, name: str, source: IO[bytes], *, timeout: float | None = None
    ) -> bool:
        key, limit = self._key(name), Limit(timeout)
        size = pieces.size_of(source)
        if size <= PIECE:
            return self._create(key, pieces.read(source, size), limit)
        with self._edge(f"upload {name!r}", limit, errors.SaveError):
            if self._head(key, limit) is not None:
                return False
        self._upload_parts(key, source, size, limit)
        return True

    def replace(self, name: str, data: bytes, *, timeout: float | None = None) -> None:
        key, limit = self._key(name), Limit(timeout)
        attributes = _attributes(checksum.of_bytes(data))
        with self._edge(f"write {name!r}", limit, errors.SaveError):
            s3_client.wait(
                lambda: obstore.put_async(
                    self._store,
                    key,
                    data,
                    attributes=attributes,
                    use_multipart=False,
                ),
                limit,
            )

    def get(
        self,
        name: str,
        target: IO[bytes],
        *,
        offset: int = 0,
        length: int | None = None,
        timeout: float | None = None,
    ) -> int:
        key, limit = self._key(name), Limit(timeout)
        with self._edge(f"read {name!r}", limit, errors.CheckpointError):
            found = self._head(key, limit)
        if found is None:
            raise ObjectMissingError(f"There is no object {name!r} in {self.uri}.")
        size, tag = int(found.meta["size"]), found.meta["e_tag"]
        end = size if length is None else min(size, offset + length)
        crc, at = 0, offset
        found_pieces = self._pieces(key, tag, offset, end, limit)
        while True:
            with self._edge(f"read {name!r}", limit, errors.CheckpointError):
                piece = next(found_pieces, None)
            if piece is None:
                break
            target.write(piece)
            crc, at = checksum.extended(crc, piece), at + len(piece)
        announced = found.attributes.get(_CRC)
        if offset == 0 and end == size and announced not in (None, f"{crc:08x}"):
            raise errors.CheckpointDamagedError(
                f"{self.uri}/{name} arrived with crc32c {crc:08x}; its writer noted "
                f"{announced}. Read it again; if that is always so, it is damaged."
            )
        return at - offset

    def list(self, prefix: str = "") -> Iterator[str]:
        limit = Limit(None)
        # obstore folds "a//b" and matches whole parts of a path only, so it is asked
        # for the folder, and told apart here.
        folder = (self._prefix + prefix).rpartition("/")[0]
        with self._edge("list objects", limit, errors.CheckpointError):
            for page in obstore.list(self._store, folder or None, chunk_size=_PAGE):
                for each in page:
                    if each["path"].startswith(self._prefix + prefix):
                        yield each["path"][len(self._prefix) :]

    def folders(self, *, timeout: float | None = None) -> Iterator[str]:
        limit = Limit(timeout)
        with self._edge("list objects", limit, errors.CheckpointError):
            found = s3_client.wait(
                lambda: obstore.list_with_delimiter_async(
                    self._store, self._prefix.rstrip("/") or None
                ),
                limit,
            )
        for each in found["common_prefixes"]:
            yield each[len(self._prefix) :].rstrip("/")

    def stat(self, name: str, *, timeout: float | None = None) -> ObjectStat | None:
        key, limit = self._key(name), Limit(timeout)
        with self._edge(f"look at {name!r}", limit, errors.CheckpointError):
            found = self._head(key, limit)
        if found is None:
            return None
        noted = found.attributes.get(_CRC)
        token = found.attributes.get(_TOKEN, "")
        meta = found.meta
        return ObjectStat(
            name=name,
            size=meta["size"],
            crc32c=int(noted, 16) if noted else None,
            generation=f"{meta['e_tag']}-{meta['last_modified'].isoformat()}-{token}",
        )

    def delete(self, name: str, *, timeout: float | None = None) -> bool:
        key, limit = self._key(name), Limit(timeout)
        with self._edge(f"delete {name!r}", limit, errors.SaveError):
            if self._head(key, limit) is None:
                return False
            s3_client.wait(lambda: obstore.delete_async(self._store, key), limit)
        return True

    def _create(self, key: str, data: bytes, limit: Limit) -> bool:
        attributes = _attributes(checksum.of_bytes(data))
        with self._edge(f"upload {key!r}", limit, errors.SaveError):
            try:
                s3_client.wait(
                    lambda: obstore.put_async(
                        self._store,
                        key,
                        data,
                        attributes=attributes,
                        mode="create",
                        use_multipart=False,
                    ),
                    limit,
                )
            except (said.AlreadyExistsError, said.PreconditionError):
                found = self._head(key, limit)
                return found is not None and (
                    found.attributes.get(_TOKEN) == attributes[_TOKEN]
                    and found.attributes.get(_CRC) == attributes[_CRC]
                    and found.meta["size"] == len(data)
                )
        return True

    def _upload_parts(
        self, key: str, source: IO[bytes], size: int, limit: Limit
    ) -> None:
        start = source.tell()
        crc = 0
        for piece in pieces.of(source, PIECE):
            crc = checksum.extended(crc, piece)
        source.seek(start)
        feed = s3_client.Feed(source, PIECE)
        with self._edge(f"upload {key!r}", limit, errors.SaveError):
            try:
                s3_client.wait(
                    lambda: obstore.put_async(
                        self._store,
                        key,
                        feed,
                        attributes=_attributes(crc),
                        use_multipart=True,
                        chunk_size=max(PIECE, size // _MOST_PARTS),
                        max_concurrency=1,
                    ),
                    limit,
                )
            except Exception:
                if feed.failure is not None:
                    raise feed.failure from None
                raise

    def _pieces(
        self, key: str, tag: str | None, at: int, end: int, limit: Limit
    ) -> Iterator[bytes]:
        """An object's bytes from one to another, of a known version."""
        version = {"if_match": tag} if tag else {}
        try:
            while at < end:
                options = {"range": (at, min(at + PIECE, end)), **version}
                piece = self._bytes(key, options, limit)
                at += len(piece)
                yield piece
        except said.GenericError as error:
            if _IGNORED not in str(error):
                raise
            yield from self._out_of_all(key, version, at, end, limit)

    def _out_of_all(
        self, key: str, options: Any, at: int, end: int, limit: Limit
    ) -> Iterator[bytes]:
        """The same from a server that sends all, whatever part is asked for."""
        got = s3_client.wait(
            lambda: obstore.get_async(self._store, key, options=options), limit
        )
        stream = got.stream(min_chunk_size=PIECE)
        start = 0

        async def read() -> bytes:
            return bytes(await anext(stream, b""))

        while start < end and (piece := s3_client.wait(read, limit)):
            yield piece[max(at - start, 0) : end - start]
            start += len(piece)

    def _bytes(self, key: str, options: Any, limit: Limit) -> bytes:
        """A range of an object; a connection that breaks in it is made anew."""

        async def read() -> bytes:
            got = await obstore.get_async(self._store, key, options=options)
            return bytes(await got.bytes_async())

        for left in reversed(range(_ATTEMPTS)):
            try:
                return s3_client.wait(read, limit)
            except said.GenericError as error:
                if not left or _IGNORED in str(error):
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _head(self, key: str, limit: Limit) -> Any:
        """What S3 knows of an object; None if there is none."""
        try:
            return s3_client.wait(
                lambda: obstore.get_async(self._store, key, options={"head": True}),
                limit,
            )
        except (FileNotFoundError, said.NotFoundError) as error:
            if is_about_the_bucket(error):
                raise
            return None

    def _edge(
        self, doing: str, limit: Limit, kind: type[errors.CheckpointError]
    ) -> contextlib.AbstractContextManager[None]:
        return translated(limit, doing, self.uri, kind)

    def _key(self, name: str) -> str:
        return self._prefix + check_name(name)


def _attributes(crc32c: int) -> dict[str, str]:
    return {
        "Content-Type": "application/octet-stream",
        _TOKEN: secrets.token_hex(16),
        _CRC: f"{crc32c:08x}",
    }
