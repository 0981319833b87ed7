"""A file on its way to Google Cloud Storage, in one request of bounded memory.

The client's own resumable upload makes a request for each chunk and holds the chunk:
either the memory or the waiting for answers grows. Here the file itself is the body.
Where it breaks off the service is asked how much it has, and the rest follows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import IO, Any

import google_crc32c
import requests
from google.api_core import exceptions as api

from tfpreempt import errors
from tfpreempt.storage import pieces
from tfpreempt.storage.deadline import REQUEST_SECONDS
from tfpreempt.storage.gcs_failure import refusal

_PIECE = 1 << 20
_RECEIVED = re.compile(r"bytes=0-(\d+)")


class ResumableUpload:
    """One object on its way.

    Args:
        session: makes the requests.
        begin: makes an upload and gives its URL.
        source: a file at its beginning.
        size: its bytes.
        retry: how a request that breaks off is made again.

    Attributes:
        crc32c: of all bytes of the file that were ever read; each counts once.
    """

    def __init__(
        self,
        session: requests.Session,
        begin: Callable[[], str],
        source: IO[bytes],
        size: int,
        retry: Any,
    ) -> None:
        self.crc32c = 0
        self._session = session
        self._begin = begin
        self._source = source
        self._start = source.tell()
        self._size = size
        self._retry = retry
        self._url = ""
        self._received = self._summed = 0

    def run(self) -> dict[str, Any]:
        """Sends all there is; returns the object's resource.

        Raises:
            google.api_core.exceptions.GoogleAPICallError: the service refuses.
            google.api_core.exceptions.RetryError: it fails for too long.
        """
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
        if self._url:
            resource = self._put(f"bytes */{self._size}")
        else:
            self._url, self._received, resource = self._begin(), 0, None
        if resource is None:
            first, last = self._received, self._size - 1
            resource = self._put(f"bytes {first}-{last}/{self._size}", self._rest())
        if resource is None:
            raise ConnectionError(f"{self._received} of {self._size} bytes arrived")
        return resource

    def _put(
        self, content_range: str, body: _Body | None = None
    ) -> dict[str, Any] | None:
        """One request; None if the service waits for more."""
        answer = self._session.request(
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

    def _rest(self) -> _Body:
        at = self._received
        return _Body(lambda: self._read(at), self._size - at)

    def _read(self, at: int) -> Iterator[bytes]:
        self._source.seek(self._start + at)
        while at < self._size:
            piece = pieces.read(self._source, min(_PIECE, self._size - at))
            if not piece:
                raise errors.SaveError(
                    f"A file of {self._size} bytes ended after {at} while it was "
                    "uploaded; something else writes to it. Upload it again."
                )
            new = max(self._summed - at, 0)
            self.crc32c = google_crc32c.extend(self.crc32c, piece[new:])
            at += len(piece)
            self._summed = max(self._summed, at)
            yield piece


class _Body:
    """Pieces and how many bytes they are together, as `requests` wants a body."""

    def __init__(self, read: Callable[[], Iterator[bytes]], size: int) -> None:
        self._read = read
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[bytes]:
        return self._read()
