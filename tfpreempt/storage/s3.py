"""ObjectStore in S3, or in a service with S3's protocol, through the library obstore.

An object of up to 8 MiB is created by one request, which S3 refuses if the name exists
(`If-None-Match: *`). If the response is lost, the request is sent again, and refused
because the object exists now. A token in the object's metadata shows that the first
request has succeeded.

A larger object is uploaded in parts, several at a time. obstore offers no condition for
such uploads, so the store checks for the name first. Two writers of one large object at
the same moment can both succeed. Code that must have a single winner creates a small
object, such as the marker of a commit.

S3 knows a crc32c only for objects uploaded with a crc32c, so the store adds the
checksum to the metadata. Endpoint, region and credentials come from the environment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import secrets
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import obstore
import obstore.exceptions as exceptions
from obstore.store import S3Store as Client

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
_CRC = "tfpreempt-crc32c"
# Addresses of the metadata services from which a machine gets the keys of its role.
_METADATA = re.compile(r"169\.254\.(?:169\.254|170\.)")
_MARKUP = re.compile(r"[:\s]*<(?:\?xml|[A-Za-z!]).*", re.DOTALL)
_ADVICE = (
    Advice(
        (exceptions.NotFoundError, FileNotFoundError),
        "Create the bucket {bucket!r} or correct its name.",
        is_permanent=True,
    ),
    Advice(
        (exceptions.PermissionDeniedError,),
        "Allow this account s3:GetObject, s3:PutObject, s3:DeleteObject and "
        "s3:ListBucket on {bucket!r}.",
        is_permanent=True,
    ),
    Advice(
        (exceptions.UnauthenticatedError,),
        "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_ENDPOINT_URL, if the "
        "service is not Amazon's), or run with an instance role. ~/.aws is not read.",
        is_permanent=True,
    ),
    Advice(
        (CallTimeoutError,),
        "Use a longer timeout, or check the network. Without AWS_ACCESS_KEY_ID, "
        "credentials are first requested from the machine's metadata server.",
    ),
    Advice(
        (exceptions.BaseError,),
        "The service or the network failed: check AWS_ENDPOINT_URL, or retry later.",
    ),
)


def _cause(error: Exception) -> Exception:
    """Returns the error with a shorter message: the service's error code, not its XML.

    Without an error code, a message about credentials becomes UnauthenticatedError.
    """
    text = str(error)
    code = re.search(r"<Code>(\w+)</Code>", text)
    if not code and ("redential" in text or _METADATA.search(text)):
        return exceptions.UnauthenticatedError("no credentials were found")
    first = _MARKUP.sub("", text.strip().partition("\n\n")[0]).rstrip(".")
    kind = exceptions.NotFoundError if _is_about_the_bucket(error) else type(error)
    return kind(f"{first}: {code[1]}" if code else first)


class S3Store(BucketStore):
    """Store of the objects below a prefix of a bucket in S3.

    Args:
        bucket: name of the bucket.
        prefix: common prefix of the names, without a "/" at the end; "" for no prefix.

    Raises:
        ConfigurationError: an environment variable has an invalid value.
    """

    scheme = "s3"
    advice = _ADVICE
    cause = staticmethod(_cause)

    def __init__(self, bucket: str, prefix: str = "") -> None:
        super().__init__(bucket, prefix)
        self._store = _connect(bucket)
        self._streams = _Streams(_STREAMS)

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
        with self._streams.taken(max(1, _IN_FLIGHT // part)) as streams:
            obstore.put(
                self._store,
                key,
                chunks.of(source, _READ),
                attributes=_attributes(crc),
                use_multipart=True,
                chunk_size=part,
                max_concurrency=streams,
            )
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
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            found = _head(self._store, key)
            return found is not None and (
                found.attributes.get(TOKEN) == attributes[TOKEN]
                and found.attributes.get(_CRC) == attributes[_CRC]
                and found.meta["size"] == len(data)
            )
        return True

    def _replace(self, key: str, data: bytes, deadline: Deadline) -> None:
        attributes = _attributes(checksum.of_bytes(data))
        obstore.put(self._store, key, data, attributes=attributes, use_multipart=False)

    def _download(self, key: str, start: int, end: int | None) -> _Download:
        return _Download(self._store, key, start, end)

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
        return ObjectStat(size=found.meta["size"], crc32c=_crc_of(found))

    def _delete(self, key: str, deadline: Deadline) -> None:
        obstore.delete(self._store, key)


@dataclasses.dataclass(slots=True)
class _Download:
    """Download of a range of an object's bytes.

    The first request finds the object's version; further requests read that version.
    """

    store: Client
    key: str
    start: int
    end: int | None
    crc32c: int | None = None

    def pieces(self, deadline: Deadline) -> Iterator[bytes]:
        found = deadline.run(lambda: _head(self.store, self.key))
        if found is None:
            raise MissingError
        self.crc32c = _crc_of(found)
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


def _connect(bucket: str) -> Client:
    """Returns a client of a bucket.

    Raises:
        ConfigurationError: an environment variable has an invalid value.
    """
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get(
        "AWS_ENDPOINT_URL"
    )
    check_no_user_info(endpoint or "", "AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    try:
        return Client(
            bucket,
            config={"endpoint": endpoint} if endpoint else None,
            region=region or "us-east-1",
            client_options={
                "allow_http": (endpoint or "").startswith("http://"),
                "timeout": timedelta(seconds=REQUEST_SECONDS),
            },
            retry_config={"retry_timeout": timedelta(seconds=RETRY_SECONDS)},
        )
    except (exceptions.BaseError, ValueError) as error:
        raise errors.ConfigurationError(
            f"s3://{bucket} cannot be opened: {error}. Check the environment variables "
            "that begin with AWS_."
        ) from error


def _is_about_the_bucket(error: Exception) -> bool:
    """Returns whether a 404 is about a missing bucket, not a missing object."""
    return "NoSuchBucket" in str(error)


def _head(store: Client, key: str) -> Any:
    """Returns obstore's description of an object; None if the object is missing."""
    try:
        return obstore.get(store, key, options={"head": True})
    except (FileNotFoundError, exceptions.NotFoundError) as error:
        if _is_about_the_bucket(error):
            raise
        return None


def _crc_of(found: Any) -> int | None:
    noted = found.attributes.get(_CRC, "")
    # Ignore an invalid checksum: any writer of the bucket can set the attribute.
    return int(noted, 16) if re.fullmatch("[0-9a-f]{8}", noted) else None


def _attributes(crc32c: int) -> dict[str, str]:
    return {
        "Content-Type": CONTENT_TYPE,
        TOKEN: secrets.token_hex(16),
        _CRC: f"{crc32c:08x}",
    }
