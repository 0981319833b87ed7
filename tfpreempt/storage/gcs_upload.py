"""An object's bytes on their way to Google Cloud Storage, in bounded memory.

A small object goes up in one request. A large file is itself the body of one request of
a resumable upload; where that breaks off, the service is asked how much it has, and the
rest follows.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from tfpreempt import errors
from tfpreempt.storage import checksum, pieces
from tfpreempt.storage.bucket import CONTENT_TYPE
from tfpreempt.storage.deadline import Deadline
from tfpreempt.storage.gcs_client import (
    GcsClient,
    NotFoundError,
    Retry,
    decoded,
    encoded,
)
from tfpreempt.storage.pieces import Source

_SINGLE = 1 << 20  # bytes up to which an object goes up in one request, held twice
_PIECE = 1 << 20
_RECEIVED = re.compile(r"bytes=0-(\d+)")


class GcsUpload:
    """One object on its way; as a request's body, the bytes missing there.

    Args:
        client: makes the requests.
        resource: the object's name and metadata.
        source: a file at its beginning.
        size: its bytes.
        deadline: limits the retries.
        conditions: the service's conditions for it, as query parameters.

    Attributes:
        crc32c: of all bytes of the file that were ever read; each counts once.
    """

    def __init__(
        self,
        client: GcsClient,
        resource: Mapping[str, Any],
        source: Source,
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
        """Sends all bytes.

        Raises:
            SaveError: the bytes arrived changed, and were deleted again.
            Exception: as `GcsClient.call`.
        """
        if self._size <= _SINGLE:
            self._send_at_once()
            return
        made = self._retry.run(self._send_rest)
        announced = made.get("crc32c")
        if announced is None or decoded(announced) == self.crc32c:
            return
        name = self._resource["name"]
        self._client.call(
            "DELETE",
            self._client.object_path(name),
            self._deadline,
            params={"ifGenerationMatch": made["generation"]},
        )
        raise errors.SaveError(
            f"{name!r} arrived with another crc32c than it was sent with, and was "
            "deleted again. Something on the way, or this machine's memory, changes "
            "bytes; upload it again."
        )

    def _send_at_once(self) -> None:
        data = pieces.read(self._source, self._size)
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
        """Sends the missing bytes, in one request.

        Raises:
            ConnectionError: not all bytes arrived, which may pass by itself.
        """
        made = None
        if self._url:
            made = self._put(f"bytes */{self._size}")
        else:
            self._received = 0
            self._url = self._client.request(
                "POST",
                self._client.uploads,
                params={"uploadType": "resumable", **self._conditions},
                headers={
                    "X-Upload-Content-Type": CONTENT_TYPE,
                    "X-Upload-Content-Length": str(self._size),
                },
                json=self._resource,
            ).headers["Location"]
        if made is None:
            missing = f"bytes {self._received}-{self._size - 1}/{self._size}"
            made = self._put(missing, body=self)
        if made is None:
            raise ConnectionError(f"{self._received} of {self._size} bytes arrived")
        return made

    def _put(
        self, content_range: str, body: GcsUpload | None = None
    ) -> dict[str, Any] | None:
        """Makes one request; None if the service waits for more."""
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
            raise ConnectionError("the service forgot the upload") from error
        if answer.status_code != 308:
            made: dict[str, Any] = answer.json()
            return made
        match = _RECEIVED.fullmatch(answer.headers.get("Range", ""))
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
            piece = pieces.read(self._source, min(_PIECE, self._size - at))
            if not piece:
                raise errors.SaveError(
                    f"A file of {self._size} bytes ended after {at} while it was "
                    "uploaded; something else writes to it. Upload it again."
                )
            new = max(self._summed - at, 0)
            self.crc32c = checksum.extended(self.crc32c, piece[new:])
            at += len(piece)
            self._summed = max(self._summed, at)
            yield piece
