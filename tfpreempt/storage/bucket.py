"""ObjectStore in a bucket: what gs:// and s3:// have in common."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import IO, ClassVar, Protocol, cast

from tfpreempt import errors
from tfpreempt.storage import checksum, pieces
from tfpreempt.storage.deadline import Deadline
from tfpreempt.storage.interface import (
    ObjectMissingError,
    ObjectStat,
    check_name,
)

CONTENT_TYPE = "application/octet-stream"
# Attached to what is created. A request whose answer got lost is sent again, and is
# then refused because of itself: so each writer looks whose object is in the way.
TOKEN = "tfpreempt-writer"


class MissingError(Exception):
    """There is no object of this key; translated before anybody sees it."""


class Download(Protocol):
    """Some bytes of an object on their way.

    Attributes:
        crc32c: of the whole object, once the first piece is there; None if nobody says.
    """

    crc32c: int | None

    def pieces(self, deadline: Deadline) -> Iterator[bytes]:
        """All of them, once; raises MissingError, or what the client raises."""
        ...


class BucketStore(abc.ABC):
    """Objects below a prefix of a bucket. Any thread.

    What a subclass raises of its client's is translated by its `_edge`.

    Args:
        bucket: name of the bucket.
        prefix: what all names begin with, without the "/" behind it; "" for none.
    """

    scheme: ClassVar[str]

    def __init__(self, bucket: str, prefix: str = "") -> None:
        self._name = bucket
        self._prefix = f"{prefix}/" if prefix else ""

    @property
    def uri(self) -> str:
        return f"{self.scheme}://{self._name}/{self._prefix}".rstrip("/")

    def put_if_absent(
        self, name: str, source: IO[bytes], *, timeout: float | None = None
    ) -> bool:
        key, deadline = self._key(name), Deadline(timeout)
        size, guarded = pieces.size_of(source), cast(IO[bytes], _Guarded(source))
        try:
            with self._edge(f"upload {name!r}", deadline, errors.SaveError):
                return deadline.run(lambda: self._put(key, guarded, size, deadline))
        except _SourceError as error:
            raise error.failure from None

    def replace(self, name: str, data: bytes, *, timeout: float | None = None) -> None:
        key, deadline = self._key(name), Deadline(timeout)
        with self._edge(f"write {name!r}", deadline, errors.SaveError):
            deadline.run(lambda: self._replace(key, data, deadline))

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
        end = None if length is None else offset + length
        with self._edge(doing, deadline, errors.CheckpointError):
            download = self._download(key, offset, end)
        arriving = download.pieces(deadline)
        copied = crc = 0
        while True:
            try:
                with self._edge(doing, deadline, errors.CheckpointError):
                    piece = next(arriving, None)
            except MissingError as error:
                raise ObjectMissingError(
                    f"There is no object {name!r} in {self.uri}."
                ) from error
            if piece is None:
                break
            target.write(piece)
            copied, crc = copied + len(piece), checksum.extended(crc, piece)
        announced = None if offset or length is not None else download.crc32c
        if announced not in (None, crc):
            raise errors.CheckpointDamagedError(
                f"{self.uri}/{name} arrived with crc32c {crc:08x}; it was noted with "
                f"{announced:08x}. Read it again; if that is always so, it is damaged."
            )
        return copied

    def list(self, prefix: str = "") -> Iterator[str]:
        deadline = Deadline(None)
        with self._edge("list objects", deadline, errors.CheckpointError):
            for key in self._keys(self._prefix + prefix, deadline):
                yield key[len(self._prefix) :]

    def folders(self, *, timeout: float | None = None) -> Iterator[str]:
        deadline = Deadline(timeout)
        with self._edge("list objects", deadline, errors.CheckpointError):
            for key in self._folders(deadline):
                yield key[len(self._prefix) :].rstrip("/")

    def stat(self, name: str, *, timeout: float | None = None) -> ObjectStat | None:
        key, deadline = self._key(name), Deadline(timeout)
        with self._edge(f"look at {name!r}", deadline, errors.CheckpointError):
            found = deadline.run(lambda: self._stat(key, deadline))
        return None if found is None else dataclasses.replace(found, name=name)

    def delete(self, name: str, *, timeout: float | None = None) -> bool:
        key, deadline = self._key(name), Deadline(timeout)
        with self._edge(f"delete {name!r}", deadline, errors.SaveError):
            return deadline.run(lambda: self._delete(key, deadline))

    def _key(self, name: str) -> str:
        return self._prefix + check_name(name)

    @abc.abstractmethod
    def _edge(
        self, doing: str, deadline: Deadline, kind: type[errors.CheckpointError]
    ) -> contextlib.AbstractContextManager[None]:
        """Turns what the client raises in the body into errors of a kind."""

    @abc.abstractmethod
    def _put(
        self, key: str, source: IO[bytes], size: int, deadline: Deadline
    ) -> bool: ...

    @abc.abstractmethod
    def _replace(self, key: str, data: bytes, deadline: Deadline) -> None: ...

    @abc.abstractmethod
    def _download(self, key: str, start: int, end: int | None) -> Download: ...

    @abc.abstractmethod
    def _keys(self, prefix: str, deadline: Deadline) -> Iterator[str]: ...

    @abc.abstractmethod
    def _folders(self, deadline: Deadline) -> Iterator[str]: ...

    @abc.abstractmethod
    def _stat(self, key: str, deadline: Deadline) -> ObjectStat | None: ...

    @abc.abstractmethod
    def _delete(self, key: str, deadline: Deadline) -> bool: ...


class _SourceError(Exception):
    """Reading what is uploaded failed, by no fault of the service's."""

    def __init__(self, failure: Exception) -> None:
        super().__init__(repr(failure))
        self.failure = failure


class _Guarded:
    """A file whose failures no client wraps, and none tries again."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        try:
            return self._file.read(size)
        except Exception as error:
            raise _SourceError(error) from error
