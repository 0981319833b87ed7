"""`ObstoreStore`: base class of the stores for s3:// and az://, by the library obstore.

An object of up to 8 MiB is created by one request with the condition that the name is
free (`If-None-Match: *`). If the response is lost, the request is sent again, and
refused because the object exists now. A token in the object's metadata shows that the
first request has succeeded.

A larger object is uploaded in parts, several at a time. obstore offers no condition for
such uploads, so the store checks for the name first. Two writers of one large object at
the same moment can both succeed. Code that must have a single winner creates a small
object, such as the marker of a commit.

The services do not know the crc32c of every object, so the store adds the checksum to
the metadata. Endpoint and credentials come from the environment.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import os
import re
import secrets
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import obstore
import obstore.exceptions as exceptions

from tfpreempt import errors
from tfpreempt.core.threads import CallTimeoutError
from tfpreempt.storage import checksum, chunks
from tfpreempt.storage.bucket_store import (
    CONTENT_TYPE,
    TOKEN,
    Advice,
    BucketStore,
    MissingError,
)
from tfpreempt.storage.chunks import SeekableReader
from tfpreempt.storage.object_store import ObjectStat
from tfpreempt.storage.paths import check_no_user_info
from tfpreempt.storage.request_deadline import REQUEST_SECONDS, RETRY_SECONDS, Deadline

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

PIECE = 8 << 20
_PART = 5 << 20  # bytes of the smallest part that S3 accepts
_MOST_PARTS = 9_000  # a little less than S3's limit of 10,000 parts
_STREAMS = 8
_IN_FLIGHT = _STREAMS * _PART  # bytes of an upload that are held in memory
_READ = 1 << 20
_ATTEMPTS = 4
_PAGE = 1000
# Text of obstore's error if the server ignores the range of a request, and sends the
# whole object. obstore has no exception class for this error.
_IGNORED = "non-partial response"
# Azure's error code if the blocks of an upload no longer wait for their list: this
# upload sent the list before and lost the response, or another upload came first.
_BLOCKS_GONE = "InvalidBlockList"
# Addresses of the metadata services from which a machine gets the keys of its role.
_METADATA = re.compile(r"169\.254\.(?:169\.254|170\.)")
# An answer of a service that is overloaded or has failed.
_BUSY = re.compile(r"\b(?:429|5\d\d) [A-Z]")
_URL = re.compile(r"https?://\S+")
_MARKUP = re.compile(r"[:\s\ufeff]*<(?:\?xml|[A-Za-z!]).*", re.DOTALL)
_CODE = re.compile(r"<Code>(\w+)</Code>")
# A refusal that obstore reports without a class of its own: of a list, or of one object
# in a request that deletes objects.
_REFUSAL = re.compile(r"\bcode: (401|403|AccessDenied)\b")
MISSING = (FileNotFoundError, exceptions.NotFoundError)
_INVALID_NAME = Advice(
    (exceptions.InvalidPathError,),
    "The library obstore cannot list a folder with an object whose name contains an "
    "empty part ('//'), a part '.' or '..', or a control character. Delete or move the "
    "objects with such names in the bucket {bucket!r}.",
    is_permanent=True,
)


def _cause(error: Exception) -> Exception:
    """Returns the error with a shorter message: the service's error code, not its XML.

    Without an error code, a message about credentials becomes UnauthenticatedError,
    unless the metadata service is overloaded.
    """
    text = str(error)
    code = _CODE.search(text)
    is_about_keys = "redential" in _URL.sub("", text) or (
        _METADATA.search(text) and not _BUSY.search(text)
    )
    if not code and is_about_keys:
        return exceptions.UnauthenticatedError("no credentials were found")
    first = _MARKUP.sub("", text.strip().partition("\n\n")[0]).rstrip(".")
    kind = type(error)
    if _is_about_the_bucket(error):
        kind = exceptions.NotFoundError
    elif code and code[1] == "AuthenticationFailed":
        kind = exceptions.UnauthenticatedError
    elif refusal := _REFUSAL.search(text):
        kind = exceptions.PermissionDeniedError
        if refusal[1] == "401":
            kind = exceptions.UnauthenticatedError
    return kind(f"{first}: {code[1]}" if code else first)


def advice_on(
    *, missing: str, denied: str, unknown: str, late: str, failed: str
) -> tuple[Advice, ...]:
    """Returns the advice of a service for the errors of obstore.

    Args:
        missing: advice if the bucket does not exist.
        denied: advice if the account may not make the request.
        unknown: advice if the credentials are missing or invalid.
        late: advice after a timeout.
        failed: advice for all other errors.
    """
    return (
        _INVALID_NAME,
        Advice(MISSING, missing, is_permanent=True),
        Advice((exceptions.PermissionDeniedError,), denied, is_permanent=True),
        Advice((exceptions.UnauthenticatedError,), unknown, is_permanent=True),
        Advice((CallTimeoutError,), late),
        Advice((exceptions.BaseError,), failed),
    )


class ObstoreStore(BucketStore):
    """Store of the objects below a prefix of a bucket, through the library obstore.

    Args:
        bucket: name of the bucket.
        prefix: common prefix of the names, without a "/" at the end; "" for no prefix.

    Attributes:
        endpoint_variables: environment variables with the URL of the service; the first
            variable that is set counts.
        variables: advice about environment variables, for messages.
        token_key: name of the metadata entry with the writer's token.
        crc_key: name of the metadata entry with the checksum.

    Raises:
        ConfigurationError: an environment variable has an invalid value.
    """

    cause = staticmethod(_cause)
    endpoint_variables: ClassVar[tuple[str, ...]]
    variables: ClassVar[str]
    token_key: ClassVar[str] = TOKEN
    crc_key: ClassVar[str] = "tfpreempt-crc32c"

    def __init__(self, bucket: str, prefix: str = "") -> None:
        super().__init__(bucket, prefix)
        self._store = self._connected()
        self._streams = _Streams(_STREAMS)

    @abc.abstractmethod
    def _client(self, options: dict[str, Any]) -> Client:
        """Returns obstore's client of the bucket.

        Args:
            options: keyword arguments of the client that do not depend on the service.
        """

    def _connected(self) -> Client:
        endpoint = None
        for name in reversed(self.endpoint_variables):
            endpoint = os.environ.get(name) or endpoint
            check_no_user_info(endpoint or "", name)
        options = {
            "config": {"endpoint": endpoint} if endpoint else None,
            "client_options": {
                "allow_http": (endpoint or "").startswith("http://"),
                "timeout": timedelta(seconds=REQUEST_SECONDS),
            },
            "retry_config": {"retry_timeout": timedelta(seconds=RETRY_SECONDS)},
        }
        try:
            return self._client(options)
        except (exceptions.BaseError, ValueError) as error:
            raise errors.ConfigurationError(
                f"{self.uri} cannot be opened: {_cause(error)}. Check the "
                f"environment variables {self.variables}."
            ) from error

    def _put(
        self, key: str, source: SeekableReader, size: int, deadline: Deadline
    ) -> bool:
        if size <= PIECE:
            return self._create(key, chunks.read(source, size))
        if _head(self._store, key) is not None:
            return False
        start = source.tell()
        crc = checksum.of_source(source).crc32c
        source.seek(start)
        part = max(_PART, size // _MOST_PARTS)
        attributes = self._attributes(crc)
        try:
            with self._streams.taken(max(1, _IN_FLIGHT // part)) as streams:
                obstore.put(
                    self._store,
                    key,
                    chunks.of(source, _READ),
                    attributes=attributes,
                    use_multipart=True,
                    chunk_size=part,
                    max_concurrency=streams,
                )
        except exceptions.GenericError as error:
            found = _head(self._store, key) if _BLOCKS_GONE in str(error) else None
            if found is None:
                raise
            return self._is_written_by(attributes, size, found)
        return True

    def _create(self, key: str, data: bytes) -> bool:
        attributes = self._attributes(checksum.of_bytes(data))
        try:
            obstore.put(
                self._store,
                key,
                data,
                attributes=attributes,
                mode="create",
                use_multipart=False,
            )
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            found = _head(self._store, key)
            if found is None:  # refused for another reason, or deleted since
                raise
            return self._is_written_by(attributes, len(data), found)
        return True

    def _is_written_by(self, attributes: dict[str, str], size: int, found: Any) -> bool:
        """Returns whether an existing object was created by an upload of this store.

        Args:
            attributes: attributes that the upload has sent.
            size: number of bytes of the upload.
            found: description of the object from `_head`.
        """
        keys = (self.token_key, self.crc_key)
        return bool(found.meta["size"] == size) and all(
            found.attributes.get(each) == attributes[each] for each in keys
        )

    def _replace(self, key: str, data: bytes, deadline: Deadline) -> None:
        attributes = self._attributes(checksum.of_bytes(data))
        obstore.put(self._store, key, data, attributes=attributes, use_multipart=False)

    def _download(self, key: str, start: int, end: int | None) -> _Download:
        return _Download(self._store, key, start, end, self.crc_key)

    def _keys(self, prefix: str, deadline: Deadline) -> Iterator[str]:
        # obstore matches only whole parts of a path, and turns "a//b" into "a/b". So
        # list the folder, and compare the prefix here.
        folder = prefix.rpartition("/")[0] or None
        for page in obstore.list(self._store, folder, chunk_size=_PAGE):
            for each in page:
                if each["path"].startswith(prefix):
                    yield each["path"]

    def _folders(self, deadline: Deadline) -> Iterator[str]:
        folder = self._prefix.rstrip("/") or None
        found = deadline.run(lambda: obstore.list_with_delimiter(self._store, folder))
        yield from found["common_prefixes"]

    def _stat(self, key: str, deadline: Deadline) -> ObjectStat | None:
        found = _head(self._store, key)
        if found is None:
            return None
        return ObjectStat(size=found.meta["size"], crc32c=_crc_of(found, self.crc_key))

    def _delete(self, key: str, deadline: Deadline) -> None:
        try:
            obstore.delete(self._store, key)
        except MISSING as error:  # Azure reports a missing object
            if _is_about_the_bucket(error):
                raise

    def _attributes(self, crc32c: int) -> dict[str, str]:
        return {
            "Content-Type": CONTENT_TYPE,
            self.token_key: secrets.token_hex(16),
            self.crc_key: f"{crc32c:08x}",
        }


@dataclasses.dataclass(slots=True)
class _Download:
    """Download of a range of an object's bytes.

    The first request finds the object's version; further requests read that version.
    """

    store: Client
    key: str
    start: int
    end: int | None
    crc_key: str
    crc32c: int | None = None

    def pieces(self, deadline: Deadline) -> Iterator[bytes]:
        found = deadline.run(lambda: _head(self.store, self.key))
        if found is None:
            raise MissingError
        self.crc32c = _crc_of(found, self.crc_key)
        tag = found.meta["e_tag"]
        version = {"if_match": tag} if tag else {}
        size = int(found.meta["size"])
        end = size if self.end is None else min(size, self.end)
        for at in range(self.start, end, PIECE):
            part = (at, min(at + PIECE, end))
            yield deadline.run(functools.partial(self._range, *part, version))

    def _range(self, start: int, end: int, version: Any) -> bytes:
        """Returns the bytes of a range; retries after a broken connection."""
        options: Any = {"range": (start, end), **version}
        for left in reversed(range(_ATTEMPTS)):
            try:
                return bytes(obstore.get(self.store, self.key, options=options).bytes())
            except exceptions.GenericError as error:
                if _IGNORED in str(error):
                    break
                if not left:
                    raise
        # The server ignores the range and sends the whole object.
        whole = obstore.get(self.store, self.key, options=version).stream(_READ)
        at, found = 0, bytearray()
        while at < end and (piece := memoryview(next(whole, b""))):
            found += piece[max(start - at, 0) : end - at]
            at += len(piece)
        return bytes(found)


class _Streams:
    """Limits the simultaneous requests of a store's uploads.

    Args:
        count: maximum number of requests; exceeded only if more than `count` uploads
            run, because every upload gets at least one request.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def taken(self, wanted: int) -> Iterator[int]:
        """Context that reserves up to `wanted` requests, at least one.

        Yields:
            The number of reserved requests.
        """
        with self._lock:
            count = max(1, min(wanted, self._free))
            self._free -= count
        try:
            yield count
        finally:
            with self._lock:
                self._free += count


def _is_about_the_bucket(error: Exception) -> bool:
    """Returns whether a 404 is about a missing bucket, not a missing object."""
    text = str(error)
    return "NoSuchBucket" in text or "ContainerNotFound" in text


def _head(store: Client, key: str) -> Any:
    """Returns obstore's description of an object; None if the object is missing."""
    try:
        return obstore.get(store, key, options={"head": True})
    except MISSING as error:
        if _is_about_the_bucket(error):
            raise
        return None


def _crc_of(found: Any, key: str) -> int | None:
    noted = found.attributes.get(key, "")
    # Ignore an invalid checksum: any writer of the bucket can set the attribute.
    return int(noted, 16) if re.fullmatch("[0-9a-f]{8}", noted) else None
