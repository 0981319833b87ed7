"""Uploads to and downloads from Google Cloud Storage, in bounded memory.

A small object is uploaded in one request. A large file is sent by a resumable upload,
as the body of one request. If the connection breaks, the service is asked for the
number of bytes received, and a further request sends the missing bytes. A broken
download is resumed at the first missing byte.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import requests

from tfpreempt import errors
from tfpreempt.core.threads import CallTimeoutError
from tfpreempt.storage import checksum, chunks, gcs_client
from tfpreempt.storage.bucket_store import CONTENT_TYPE, MissingError
from tfpreempt.storage.chunks import SeekableReader
from tfpreempt.storage.gcs_client import (
    GcsClient,
    NotFoundError,
    Retry,
    decoded,
    encoded,
    json_of,
    parsing,
)
from tfpreempt.storage.request_deadline import Deadline

# Largest upload in one request, in bytes; memory holds two copies of the bytes.
_SINGLE = 1 << 20
_PIECE = 1 << 20
_RECEIVED = re.compile(r"bytes=0-(\d+)")


class GcsUpload:
    """Upload of one object.

    The GcsUpload is also the body of a request: iterating over the GcsUpload yields the
    bytes that the service has not received.

    Args:
        client: client that sends the requests.
        resource: name and metadata of the new object.
        source: seekable file, positioned at its beginning.
        size: size of the file in bytes.
        deadline: deadline of the caller, which limits the retries.
        conditions: query parameters with conditions, such as "create only if absent".

    Attributes:
        crc32c: checksum of the file's bytes read so far. Bytes read again by a retry
            are not added again.
    """

    def __init__(
        self,
        client: GcsClient,
        resource: Mapping[str, Any],
        source: SeekableReader,
        size: int,
        deadline: Deadline,
        conditions: Mapping[str, str],
    ) -> None:
        self.crc32c = 0
        self._client = client
        self._resource = resource
        self._source = source
        self._start = source.tell()
        self._size = size
        self._deadline = deadline
        self._conditions = conditions
        self._retry = Retry(deadline)
        self._url = ""
        self._received = self._farthest = self._summed = 0

    def run(self) -> None:
        """Sends the file.

        Raises:
            SaveError: the new object has a different checksum than the file, so the
                object was deleted.
            Exception: an error of `GcsClient.call`.
        """
        if self._size <= _SINGLE:
            self._send_at_once()
            return
        made = self._retry.run(self._send_rest)
        with parsing():
            announced = made.get("crc32c")
            if announced is None or decoded(announced) == self.crc32c:
                return
            generation = made["generation"]
        name = self._resource["name"]
        self._client.call(
            "DELETE",
            self._client.object_path(name),
            self._deadline,
            params={"ifGenerationMatch": generation},
        )
        raise errors.SaveError(
            f"The service received {name!r} with another crc32c than was sent, so the "
            "object was deleted. The network or the memory of this machine changes "
            "bytes: upload the object again, and if this repeats, use another machine."
        )

    def _send_at_once(self) -> None:
        data = chunks.read(self._source, self._size)
        self.crc32c = checksum.of_bytes(data)
        boundary = secrets.token_hex(16)
        head = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n"
            f"{json.dumps({**self._resource, 'crc32c': encoded(self.crc32c)})}\r\n"
            f"--{boundary}\r\nContent-Type: {CONTENT_TYPE}\r\n\r\n"
        )
        self._client.call(
            "POST",
            self._client.uploads,
            self._deadline,
            params={"uploadType": "multipart", **self._conditions},
            headers={"Content-Type": f"multipart/related; boundary={boundary}"},
            data=b"".join((head.encode(), data, f"\r\n--{boundary}--\r\n".encode())),
        )

    def _send_rest(self) -> dict[str, Any]:
        """Begins or resumes the resumable upload, and sends the missing bytes.

        Returns:
            The service's description of the created object.

        Raises:
            ConnectionError: some bytes did not arrive; a retry sends these bytes.
        """
        made = None
        if self._url:
            made = self._put(f"bytes */{self._size}")
        else:
            self._received = 0
            answer = self._client.request(
                "POST",
                self._client.uploads,
                params={"uploadType": "resumable", **self._conditions},
                headers={
                    "X-Upload-Content-Type": CONTENT_TYPE,
                    "X-Upload-Content-Length": str(self._size),
                },
                json=self._resource,
            )
            with parsing():
                self._url = answer.headers["Location"]
        if made is None:
            missing = f"bytes {self._received}-{self._size - 1}/{self._size}"
            made = self._put(missing, body=self)
        if made is None:
            raise ConnectionError(f"{self._received} of {self._size} bytes arrived")
        return made

    def _put(
        self, content_range: str, body: GcsUpload | None = None
    ) -> dict[str, Any] | None:
        """Sends a request of the resumable upload.

        Args:
            content_range: value of the header Content-Range: the range of the bytes
                sent, or "bytes */SIZE" to ask how many bytes the service has received.
            body: iterable of the bytes to send; None if the request only asks.

        Returns:
            The service's description of the created object; None if the service still
            needs bytes.
        """
        try:
            answer = self._client.request(
                "PUT",
                self._url,
                statuses=(200, 201, 308),
                data=body,
                headers={"Content-Range": content_range},
            )
        except NotFoundError as error:
            self._url = ""
            raise ConnectionError("the service does not know this upload") from error
        if answer.status_code != 308:
            return json_of(answer)
        match = _RECEIVED.fullmatch(answer.headers.get("Range", ""))
        with parsing():
            self._received = int(match[1]) + 1 if match else 0
        if self._received > self._farthest:
            self._farthest = self._received
            self._retry.restart()
        return None

    def __len__(self) -> int:
        return self._size - self._received

    def __iter__(self) -> Iterator[bytes]:
        at = self._received
        self._source.seek(self._start + at)
        while at < self._size:
            piece = chunks.read(self._source, min(_PIECE, self._size - at))
            if not piece:
                raise errors.SaveError(
                    f"A file had {self._size} bytes at the start of its upload and "
                    f"ends after {at} bytes now, so another program writes to the "
                    "file. End that program, and upload the file again."
                )
            new = max(self._summed - at, 0)
            self.crc32c = checksum.extended(self.crc32c, piece[new:])
            at += len(piece)
            self._summed = max(self._summed, at)
            yield piece


class GcsDownload:
    """Download of an object, or of a range of an object.

    Every request reads the generation (version) of the object that the first request
    found.

    Args:
        client: client that sends the requests.
        key: the object's name in the bucket.
        start: index of the first byte.
        end: index after the last byte; None: up to the end.

    Attributes:
        crc32c: checksum of the whole object; None until a response has a checksum.
    """

    def __init__(
        self, client: GcsClient, key: str, start: int, end: int | None
    ) -> None:
        self.crc32c: int | None = None
        self._client = client
        self._path = f"/download{client.object_path(key)}"
        self._at = start
        self._end = end
        self._generation: str | None = None
        self._size: int | None = None  # size of the object, if a response has the size

    def pieces(self, deadline: Deadline) -> Iterator[bytes]:
        """Yields the bytes, in pieces; may be called once.

        After a broken connection, or a response with too few bytes, the missing bytes
        are requested.

        Raises:
            CallTimeoutError: the deadline has passed.
            MissingError: the object does not exist.
            CheckpointError: the response has a different range than requested.
            GcsError: the service refuses the request, or failed in every attempt.
            Exception: one of `gcs_client.BROKEN`; the connection failed in every
                attempt.
        """
        while self._end is None or self._at < self._end:
            asked = self._at
            try:
                answer, piece = deadline.run(lambda: Retry(deadline).run(self._begin))
            except gcs_client.RangeError:
                return  # the object ends before `start`
            more = functools.partial(self._read, answer)
            try:
                while piece:
                    self._at += len(piece)
                    yield piece
                    piece = deadline.run(more)
            except CallTimeoutError:
                raise  # do not close: close() would wait for the read, which still runs
            except gcs_client.BROKEN:
                answer.close()  # retry at once: the download has made progress
            except BaseException:
                answer.close()
                raise
            else:
                answer.close()
                if self._size is None or not asked < self._at < self._size:
                    return

    def _begin(self) -> tuple[requests.Response, bytes]:
        """Requests the remaining bytes; returns the response and its first piece."""
        # With this header the service sends the stored bytes, and decompresses nothing.
        headers = {"Accept-Encoding": "gzip"}
        if self._at or self._end is not None:
            last = "" if self._end is None else self._end - 1
            headers["Range"] = f"bytes={self._at}-{last}"
        try:
            answer = self._client.request(
                "GET",
                self._path,
                statuses=(200, 206),
                params={"alt": "media", "generation": self._generation},
                headers=headers,
                stream=True,
            )
        except NotFoundError as error:
            raise MissingError from error
        part = answer.headers.get("Content-Range", "")
        is_part = answer.status_code == 206
        if is_part and not part.startswith(f"bytes {self._at}-"):
            answer.close()
            raise errors.CheckpointError(
                f"{answer.url} was asked for the bytes from {self._at} on and sent "
                f"{part or 'other bytes'!r}. Check the server, and the proxies between "
                "this machine and the server."
            )
        size = part.rpartition("/")[2]  # "*" if the server does not know the size
        self._generation = answer.headers.get("X-Goog-Generation")
        found = re.search(r"crc32c=([^,]+)", answer.headers.get("X-Goog-Hash", ""))
        with parsing():
            self._size = int(size) if is_part and size.isdecimal() else None
            if found:
                self.crc32c = decoded(found[1])
        # If the server ignores the range and sends the whole object, skip its start.
        ahead = 0 if is_part else self._at
        while ahead and (passed := answer.raw.read(min(ahead, _PIECE))):
            ahead -= len(passed)
        return answer, self._read(answer)

    def _read(self, answer: requests.Response) -> bytes:
        """Returns the next piece of a response; empty at the end of the range."""
        wanted = _PIECE if self._end is None else min(_PIECE, self._end - self._at)
        piece: bytes = answer.raw.read(wanted)
        return piece
