"""A file on its way to Google Cloud Storage, in bounded memory.

The client's own resumable upload makes a request for each chunk and holds the chunk:
either the memory or the waiting for answers grows. Here a large file itself is the body
of one request. Where it breaks off the service is asked how much it has, and the rest
follows.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Any

from google.api_core import exceptions as api

from tfpreempt import errors
from tfpreempt.storage import checksum, pieces
from tfpreempt.storage.bucket import CONTENT_TYPE
from tfpreempt.storage.deadline import REQUEST_SECONDS
from tfpreempt.storage.gcs_client import decoded, refusal
from tfpreempt.storage.pieces import Source

_PIECE = 1 << 20
# Up to here the client uploads, in one request; it then holds the bytes twice.
_SINGLE = 1 << 20
_RECEIVED = re.compile(r"bytes=0-(\d+)")


class GcsUpload:
    """One object on its way; as a request's body, the bytes that are missing there.

    Args:
        blob: what the client knows of the object that is to be.
        source: a file at its beginning.
        size: its bytes.
        retry: how a request that breaks off is made again.

    Attributes:
        crc32c: of all bytes of the file that were ever read; each counts once.
    """

    def __init__(self, blob: Any, source: Source, size: int, retry: Any) -> None:
        self.crc32c = 0
        self._blob = blob
        self._source = source
        self._start = source.tell()
        self._size = size
        self._retry = retry
        self._url = ""
        self._received = self._summed = 0

    def run(self) -> None:
        """Sends all there is.

        Raises:
            SaveError: it arrived changed, and was deleted again.
            google.api_core.exceptions.PreconditionFailed: there is one of this name.
            google.api_core.exceptions.GoogleAPICallError: the service refuses.
            google.api_core.exceptions.RetryError: it fails for too long.
        """
        if self._size <= _SINGLE:
            self._send_at_once()
            return
        resource = self._send_resumably()
        announced = resource.get("crc32c")
        if announced is None or decoded(announced) == self.crc32c:
            return
        generation = int(resource["generation"])
        self._blob.delete(if_generation_match=generation, retry=self._retry)
        raise errors.SaveError(
            f"gs://{self._blob.bucket.name}/{self._blob.name} arrived with another "
            "crc32c than it was sent with, and was deleted again. Something on the "
            "way, or this machine's memory, changes bytes; upload it again."
        )

    def _send_at_once(self) -> None:
        data = pieces.read(self._source, self._size)
        self.crc32c = checksum.of_bytes(data)
        self._blob.upload_from_file(
            io.BytesIO(data),
            size=self._size,
            content_type=CONTENT_TYPE,
            if_generation_match=0,
            checksum="crc32c",
            retry=self._retry,
        )

    def _send_resumably(self) -> dict[str, Any]:
        """Returns the object's resource."""
        while True:
            farthest = self._received
            try:
                resource: dict[str, Any] = self._retry(self._send_rest)()
            except api.RetryError:
                if self._received <= farthest:
                    raise
            else:
                return resource

    def _send_rest(self) -> dict[str, Any]:
        """Sends what is missing, in one request.

        Raises:
            ConnectionError: it did not all arrive, which passes by itself.
        """
        resource = None
        if self._url:
            resource = self._put(f"bytes */{self._size}")
        else:
            self._received = 0
            self._url = self._blob.create_resumable_upload_session(
                content_type=CONTENT_TYPE,
                size=self._size,
                if_generation_match=0,
                retry=None,
            )
        if resource is None:
            missing = f"bytes {self._received}-{self._size - 1}/{self._size}"
            resource = self._put(missing, body=self)
        if resource is None:
            raise ConnectionError(f"{self._received} of {self._size} bytes arrived")
        return resource

    def _put(
        self, content_range: str, body: GcsUpload | None = None
    ) -> dict[str, Any] | None:
        """One request; None if the service waits for more."""
        answer = self._blob.client._http.request(
            "PUT",
            self._url,
            data=body,
            headers={"Content-Range": content_range},
            timeout=REQUEST_SECONDS,
        )
        if answer.status_code in (200, 201):
            resource: dict[str, Any] = answer.json()
            return resource
        if answer.status_code in (404, 410):
            self._url = ""
            raise ConnectionError(f"the service forgot the upload: {answer.text[:200]}")
        if answer.status_code != 308:
            raise refusal(answer)
        match = _RECEIVED.fullmatch(answer.headers.get("Range", ""))
        self._received = int(match[1]) + 1 if match else 0
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
