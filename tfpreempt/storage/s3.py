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
from tfpreempt.storage import checksum, pieces
from tfpreempt.storage.deadline import Deadline
from tfpreempt.storage.interface import (
    ObjectMissingError,
    ObjectStat,
    check_name,
)
from tfpreempt.storage.s3_client import connect
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
        self._store = connect(bucket)

    @property
    def uri(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def put_if_absent(
        self, name: str, source: IO[bytes], *, timeout: float | None = None
    ) -> bool:
        key, deadline, doing = self._key(name), Deadline(timeout), f"upload {name!r}"
        size = pieces.size_of(source)
        if size <= PIECE:
            data = pieces.read(source, size)
            with self._edge(doing, deadline, errors.SaveError):
                return deadline.run(lambda: self._create(key, data))
        with self._edge(doing, deadline, errors.SaveError):
            if deadline.run(lambda: self._head(key)) is not None:
                return False
        self._upload_parts(name, source, size, deadline)
        return True

    def replace(self, name: str, data: bytes, *, timeout: float | None = None) -> None:
        key, deadline = self._key(name), Deadline(timeout)
        with self._edge(f"write {name!r}", deadline, errors.SaveError):
            attributes = _attributes(checksum.of_bytes(data))
            deadline.run(
                lambda: obstore.put(
                    self._store, key, data, attributes=attributes, use_multipart=False
                )
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
        key, deadline, doing = self._key(name), Deadline(timeout), f"read {name!r}"
        with self._edge(doing, deadline, errors.CheckpointError):
            found = deadline.run(lambda: self._head(key))
        if found is None:
            raise ObjectMissingError(f"There is no object {name!r} in {self.uri}.")
        total, tag = int(found.meta["size"]), found.meta["e_tag"]
        version: Any = {"if_match": tag} if tag else {}
        crc = 0

        def read(position: int, size: int) -> bytes:
            nonlocal crc
            end = min(position + size, total)
            if position >= end:
                return b""
            with self._edge(doing, deadline, errors.CheckpointError):
                piece = deadline.run(lambda: self._range(key, position, end, version))
            crc = checksum.extended(crc, piece)
            return piece

        copied = pieces.copy(read, target, offset=offset, length=length, size=PIECE)
        noted = found.attributes.get(_CRC)
        if copied == total and noted not in (None, f"{crc:08x}"):
            raise errors.CheckpointDamagedError(
                f"{self.uri}/{name} arrived with crc32c {crc:08x}; its writer noted "
                f"{noted}. Read it again; if that is always so, it is damaged."
            )
        return copied

    def list(self, prefix: str = "") -> Iterator[str]:
        # obstore folds "a//b" and matches whole parts of a path only, so it is asked
        # for the folder, and told apart here.
        folder = (self._prefix + prefix).rpartition("/")[0]
        with self._edge("list objects", Deadline(None), errors.CheckpointError):
            for page in obstore.list(self._store, folder or None, chunk_size=_PAGE):
                for each in page:
                    if each["path"].startswith(self._prefix + prefix):
                        yield each["path"][len(self._prefix) :]

    def folders(self, *, timeout: float | None = None) -> Iterator[str]:
        deadline, folder = Deadline(timeout), self._prefix.rstrip("/") or None
        with self._edge("list objects", deadline, errors.CheckpointError):
            found = deadline.run(
                lambda: obstore.list_with_delimiter(self._store, folder)
            )
        for each in found["common_prefixes"]:
            yield each[len(self._prefix) :].rstrip("/")

    def stat(self, name: str, *, timeout: float | None = None) -> ObjectStat | None:
        key, deadline = self._key(name), Deadline(timeout)
        with self._edge(f"look at {name!r}", deadline, errors.CheckpointError):
            found = deadline.run(lambda: self._head(key))
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
        key, deadline = self._key(name), Deadline(timeout)
        with self._edge(f"delete {name!r}", deadline, errors.SaveError):
            if deadline.run(lambda: self._head(key)) is None:
                return False
            deadline.run(lambda: obstore.delete(self._store, key))
        return True

    def _create(self, key: str, data: bytes) -> bool:
        attributes = _attributes(checksum.of_bytes(data))
        try:
            obstore.put(
                self._store,
                key,
                data,
                attributes=attributes,
                mode="create",
                use_multipart=False,
            )
        except (said.AlreadyExistsError, said.PreconditionError):
            found = self._head(key)
            return found is not None and (
                found.attributes.get(_TOKEN) == attributes[_TOKEN]
                and found.attributes.get(_CRC) == attributes[_CRC]
                and found.meta["size"] == len(data)
            )
        return True

    def _upload_parts(
        self, name: str, source: IO[bytes], size: int, deadline: Deadline
    ) -> None:
        start, crc = source.tell(), 0
        for piece in pieces.of(source, PIECE):
            crc = checksum.extended(crc, piece)
        source.seek(start)
        failure: Exception | None = None  # of the caller's: not to be translated

        def parts() -> Iterator[bytes]:
            nonlocal failure
            try:
                yield from pieces.of(source, PIECE)
            except Exception as error:
                failure = error
                raise

        try:
            with self._edge(f"upload {name!r}", deadline, errors.SaveError):
                deadline.run(
                    lambda: obstore.put(
                        self._store,
                        self._key(name),
                        parts(),
                        attributes=_attributes(crc),
                        use_multipart=True,
                        chunk_size=max(PIECE, size // _MOST_PARTS),
                        max_concurrency=1,
                    )
                )
        except Exception:
            if failure is not None:
                raise failure from None
            raise

    def _range(self, key: str, start: int, end: int, version: Any) -> bytes:
        """A range of an object; a connection that breaks in it is made anew."""
        options: Any = {"range": (start, end), **version}
        for left in reversed(range(_ATTEMPTS)):
            try:
                return bytes(obstore.get(self._store, key, options=options).bytes())
            except said.GenericError as error:
                if _IGNORED in str(error):
                    break
                if not left:
                    raise
        # A server that sends all, whatever part is asked for.
        whole = obstore.get(self._store, key, options=version).stream(PIECE)
        at, found = 0, b""
        while at < end and (piece := bytes(next(whole, b""))):
            found += piece[max(start - at, 0) : end - at]
            at += len(piece)
        return found

    def _head(self, key: str) -> Any:
        """What S3 knows of an object; None if there is none."""
        try:
            return obstore.get(self._store, key, options={"head": True})
        except (FileNotFoundError, said.NotFoundError) as error:
            if is_about_the_bucket(error):
                raise
            return None

    def _edge(
        self, doing: str, deadline: Deadline, kind: type[errors.CheckpointError]
    ) -> contextlib.AbstractContextManager[None]:
        return translated(deadline, doing, self.uri, kind)

    def _key(self, name: str) -> str:
        return self._prefix + check_name(name)


def _attributes(crc32c: int) -> dict[str, str]:
    return {
        "Content-Type": "application/octet-stream",
        _TOKEN: secrets.token_hex(16),
        _CRC: f"{crc32c:08x}",
    }
