"""`BucketStore`: base class of the stores for gs://, s3:// and az://."""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Iterator
from typing import ClassVar, NamedTuple, Protocol

from tfpreempt import errors
from tfpreempt.core.threads import CallTimeoutError
from tfpreempt.storage import checksum, chunks
from tfpreempt.storage.chunks import SeekableReader, SequentialWriter
from tfpreempt.storage.object_store import (
    ObjectNotFoundError,
    ObjectStat,
    check_name,
)
from tfpreempt.storage.request_deadline import Deadline

CONTENT_TYPE = "application/octet-stream"
# Key of the metadata entry with the writer's token, which is attached to a new object.
# If the response to a request is lost, the request is sent again, and refused because
# the object exists now. If the object has this writer's token, the first request has
# succeeded.
TOKEN = "tfpreempt-writer"


class Advice(NamedTuple):
    """Advice for the user, shown with errors of the given exception classes.

    Attributes:
        kinds: exception classes of the client library.
        text: advice; "{bucket}" and "{tried}" (seconds) are replaced by values.
        is_permanent: whether a retry cannot succeed before the user corrects the cause.
    """

    kinds: tuple[type[Exception], ...]
    text: str
    is_permanent: bool = False


class MissingError(Exception):
    """Raised by a `Download` if the object does not exist.

    `BucketStore.get` catches this error, and raises ObjectNotFoundError.
    """


class Download(Protocol):
    """The download of an object, or of a range of an object's bytes.

    Attributes:
        crc32c: checksum of the whole object, set before `pieces` yields the first
            piece; None if unknown.
    """

    crc32c: int | None

    def pieces(self, deadline: Deadline) -> Iterator[bytes]:
        """Yields the bytes, in pieces. The method may be called once.

        Raises:
            MissingError: the object does not exist.
            Exception: an error of the client library.
        """
        ...


class BucketStore(abc.ABC):
    """Store of the objects below a prefix of a bucket; used on any thread.

    A subclass implements the abstract methods, which send the requests. A key is the
    complete name of an object in the bucket, including the prefix.

    Args:
        bucket: name of the bucket.
        prefix: common prefix of the keys, without a "/" at the end; "" for no prefix.

    Attributes:
        scheme: scheme of the URI.
        advice: advice for every exception class of the client library; the first entry
            with a matching class is used.
        cause: function that is given an error of the client library. It returns the
            error to show to the user, such as the original error of the network.
    """

    scheme: ClassVar[str]
    advice: ClassVar[tuple[Advice, ...]]
    cause: ClassVar[staticmethod[[Exception], Exception]]

    def __init__(self, bucket: str, prefix: str = "") -> None:
        self._name = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self.uri = f"{self.scheme}://{bucket}/{prefix}".rstrip("/")

    def put_if_absent(
        self, name: str, source: SeekableReader, *, timeout: float | None = None
    ) -> bool:
        key, deadline = self._key(name), Deadline(timeout)
        size, guarded = chunks.size_of(source), _SourceFile(source)
        try:
            with self._translate_errors(f"upload {name!r}", errors.SaveError):
                return deadline.run(lambda: self._put(key, guarded, size, deadline))
        except _SourceError as error:
            raise error.failure from None

    def replace(self, name: str, data: bytes, *, timeout: float | None = None) -> None:
        key, deadline = self._key(name), Deadline(timeout)
        with self._translate_errors(f"write {name!r}", errors.SaveError):
            deadline.run(lambda: self._replace(key, data, deadline))

    def get(
        self,
        name: str,
        target: SequentialWriter,
        *,
        offset: int = 0,
        length: int | None = None,
        timeout: float | None = None,
    ) -> int:
        key, deadline, doing = self._key(name), Deadline(timeout), f"read {name!r}"
        end = None if length is None else offset + length
        with self._translate_errors(doing, errors.CheckpointError):
            download = self._download(key, offset, end)
        arriving = download.pieces(deadline)
        copied = crc = 0
        while True:
            try:
                with self._translate_errors(doing, errors.CheckpointError):
                    piece = next(arriving, None)
            except MissingError as error:
                raise ObjectNotFoundError(
                    f"The object {name!r} does not exist in {self.uri}."
                ) from error
            if piece is None:
                break
            target.write(piece)
            copied, crc = copied + len(piece), checksum.extended(crc, piece)
        is_all = not offset and (length is None or copied < length)
        announced = download.crc32c if is_all else None
        if announced not in (None, crc):
            raise errors.CheckpointCorruptedError(
                f"The bytes read from {self.uri}/{name} have crc32c {crc:08x}; "
                f"expected {announced:08x}, the checksum that the service stores with "
                "the object. Read the object again. If the checksum differs again, the "
                "object is corrupt."
            )
        return copied

    def list(self, prefix: str = "") -> Iterator[str]:
        deadline = Deadline(None)
        with self._translate_errors("list objects", errors.CheckpointError):
            for key in self._keys(self._prefix + prefix, deadline):
                yield key[len(self._prefix) :]

    def folders(self, *, timeout: float | None = None) -> Iterator[str]:
        deadline = Deadline(timeout)
        with self._translate_errors("list objects", errors.CheckpointError):
            for key in self._folders(deadline):
                yield key[len(self._prefix) :].rstrip("/")

    def stat(self, name: str, *, timeout: float | None = None) -> ObjectStat | None:
        key, deadline = self._key(name), Deadline(timeout)
        with self._translate_errors(f"look up {name!r}", errors.CheckpointError):
            return deadline.run(lambda: self._stat(key, deadline))

    def delete(self, name: str, *, timeout: float | None = None) -> None:
        key, deadline = self._key(name), Deadline(timeout)
        with self._translate_errors(f"delete {name!r}", errors.SaveError):
            deadline.run(lambda: self._delete(key, deadline))

    def _key(self, name: str) -> str:
        return self._prefix + check_name(name)

    @contextlib.contextmanager
    def _translate_errors(
        self, doing: str, kind: type[errors.CheckpointError]
    ) -> Iterator[None]:
        """Context that replaces errors of the client library by errors with advice.

        Args:
            doing: action of the body, for the message, such as "list objects".
            kind: class of the error that is raised.
        """
        began = time.monotonic()
        try:
            yield
        except errors.TfpreemptError:
            raise
        except tuple(each for row in self.advice for each in row.kinds) as error:
            tried, cause = time.monotonic() - began, self.cause(error)
            row = next(row for row in self.advice if isinstance(cause, row.kinds))
            message = str(cause).strip().rstrip(".")[:300]
            if not isinstance(cause, CallTimeoutError):
                message = f"{type(cause).__name__}: {message}"
            todo = row.text.format(bucket=self._name, tried=tried)
            raised = kind(f"Could not {doing} in {self.uri}: {message}. {todo}")
            raised.is_permanent = row.is_permanent
            raise raised from error

    @abc.abstractmethod
    def _put(
        self, key: str, source: SeekableReader, size: int, deadline: Deadline
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
    def _delete(self, key: str, deadline: Deadline) -> None: ...


class _SourceError(Exception):
    """Wraps an error raised by the file that an upload reads.

    `put_if_absent` raises the wrapped error to its caller.
    """

    def __init__(self, failure: Exception) -> None:
        super().__init__(repr(failure))
        self.failure = failure


class _SourceFile:
    """The file that an upload reads. An error of the file is raised as _SourceError, so
    that the client library does not retry the upload."""

    def __init__(self, file: SeekableReader) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        try:
            return self._file.read(size)
        except Exception as error:
            raise _SourceError(error) from error
