"""Bytes to and from Google Cloud Storage, in pieces, going on where they broke off.

The client's own loops won't do: its download hands out 8 KiB at a time, which keeps
eight threads waiting for the interpreter; its resumable upload waits for an answer to
each chunk, and takes the loss of the last answer for a failure. Both go over the
client's session and its retry policy.
"""

from __future__ import annotations

import base64
import dataclasses
import re
import threading
from collections.abc import Iterator
from typing import IO, Any
from urllib.parse import quote

import google_crc32c
import requests
import urllib3
from google.api_core import exceptions as api

from tfpreempt import errors
from tfpreempt.storage import pieces
from tfpreempt.storage.gcs_session import DeadlineSession, persistently
from tfpreempt.storage.limits import Limit

# What a call holds in memory.
_PIECE = 1 << 20
_RANGE = re.compile(r"bytes=0-(\d+)")
_ANSWERED = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_BROKEN = (requests.RequestException, urllib3.exceptions.HTTPError, ConnectionError)


class SourceFailedError(Exception):
    """Reading what is uploaded failed; the cause is the caller's own."""

    def __init__(self, failure: BaseException) -> None:
        super().__init__(repr(failure))
        self.failure = failure


class SessionLostError(Exception):
    """The service has forgotten a resumable upload; it must begin anew."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """What was sent: how many bytes, with which checksum."""

    size: int
    crc32c: int


class Body:
    """What a file has from some byte on, as the body of a request.

    Attributes:
        crc32c: of all bytes of the file that were ever read; each counts once.
        failure: what reading raised; the client would wrap it, or try again.
    """

    def __init__(self, source: IO[bytes], size: int, limit: Limit) -> None:
        self.crc32c = 0
        self.failure: BaseException | None = None
        self._source = source
        self._start = source.tell()
        self._size = size
        self._limit = limit
        self._offset = 0
        self._summed = 0

    def move(self, offset: int) -> None:
        """The next request begins with this byte."""
        self._offset = offset

    def __len__(self) -> int:
        return self._size - self._offset

    def __iter__(self) -> Iterator[bytes]:
        at = self._offset
        while at < self._size:
            self._limit.check()
            piece = self._read(at)
            new = max(self._summed - at, 0)
            self.crc32c = google_crc32c.extend(self.crc32c, piece[new:])
            at += len(piece)
            self._summed = max(self._summed, at)
            yield piece

    def _read(self, at: int) -> bytes:
        try:
            self._source.seek(self._start + at)
            piece = pieces.read(self._source, min(_PIECE, self._size - at))
            if not piece:
                raise errors.SaveError(
                    f"A file of {self._size} bytes ended after {at} while it was "
                    "uploaded; something else writes to it. Upload it again."
                )
        except Exception as error:
            self.failure = error
            raise
        return piece


class ResumableUpload:
    """One object on its way: one request, and as many more as break off.

    Args:
        session: makes the requests.
        url: of the upload, from `Blob.create_resumable_upload_session`.
        size: of the object.
        body: its bytes.
    """

    def __init__(
        self, session: DeadlineSession, url: str, size: int, body: Body
    ) -> None:
        self._session = session
        self._url = url
        self._size = size
        self._body = body
        self._received = 0
        self._resource: dict[str, Any] | None = None
        self._has_failed = False

    def run(self, limit: Limit) -> dict[str, Any]:
        """Sends all there is; returns the object's resource.

        Raises:
            SessionLostError: the service knows nothing of this upload any more.
            SourceFailedError: reading the body failed.
            google.api_core.exceptions.GoogleAPICallError: the service refuses.
            google.api_core.exceptions.RetryError: it fails for too long.
        """
        while self._resource is None:
            before = self._received
            try:
                persistently(self._send_rest, limit)
            except api.RetryError:
                if self._received == before:
                    raise
        return self._resource

    def _send_rest(self) -> None:
        """Sends what is missing, in one request."""
        if self._has_failed:
            self._ask()
            self._has_failed = False
        if self._resource is not None:
            return
        self._has_failed = True  # until an answer says otherwise
        self._body.move(self._received)
        last = self._size - 1
        headers = {"Content-Range": f"bytes {self._received}-{last}/{self._size}"}
        try:
            response = self._session.request(
                "PUT", self._url, data=self._body, headers=headers
            )
        except Exception:
            if self._body.failure is not None:
                raise SourceFailedError(self._body.failure) from None
            raise
        self._note(response)
        self._has_failed = False

    def _ask(self) -> None:
        """Asks how much has arrived."""
        headers = {"Content-Range": f"bytes */{self._size}"}
        self._note(self._session.request("PUT", self._url, headers=headers))

    def _note(self, response: requests.Response) -> None:
        if response.status_code in (200, 201):
            self._resource = response.json()
        elif response.status_code == 308:
            match = _RANGE.fullmatch(response.headers.get("Range", ""))
            self._received = int(match[1]) + 1 if match else 0
        elif response.status_code in (404, 410):
            raise SessionLostError(response.text[:200])
        else:
            raise refusal(response)


class Download:
    """An object's bytes, or some of them, on their way into a file.

    Args:
        session: makes the requests.
        url: of the object's bytes.
        target: written to from its position on.
        offset: first byte that is wanted.
        length: bytes wanted; None: all that follow.
    """

    def __init__(
        self,
        session: DeadlineSession,
        url: str,
        target: IO[bytes],
        *,
        offset: int,
        length: int | None,
    ) -> None:
        self._session = session
        self._url = url
        self._target = target
        self._offset = offset
        self._length = length
        self._is_whole = offset == 0 and length is None
        self._copied = 0
        self._crc = 0
        self._generation: str | None = None
        self._announced: str | None = None

    def run(self, limit: Limit) -> int:
        """Copies, and says how much; goes on where a connection broke off.

        Raises:
            google.api_core.exceptions.GoogleAPICallError: the service refuses.
            google.api_core.exceptions.RetryError: it fails for too long.
        """
        while self._length is None or self._copied < self._length:
            if persistently(lambda: self._is_complete(limit), limit):
                break
        return self._copied

    @property
    def crc32c(self) -> int | None:
        """Of a whole object; what the service says is not of a range."""
        return self._crc if self._is_whole else None

    @property
    def announced_crc32c(self) -> int | None:
        """What the service says of the whole object; None if it says nothing."""
        if self._announced is None:
            return None
        return decoded(self._announced)

    def _is_complete(self, limit: Limit) -> bool:
        """Makes one request; False if it broke off after some progress."""
        before = self._copied
        try:
            response = self._open()
            if response is None:
                return True
            with response, _EndedBy(limit, response):
                start, end = self._answered(response)
                self._skip(response, self._offset + self._copied - start, limit)
                self._pump(response, limit)
        except _BROKEN:
            limit.check()
            if self._copied == before:
                raise
            return False
        if end is None or self._copied == before:
            return True
        return self._offset + self._copied >= end

    def _open(self) -> requests.Response | None:
        start = self._offset + self._copied
        headers = {"Accept-Encoding": "gzip"}  # as they are stored, not unpacked
        if start or self._length is not None:
            end = "" if self._length is None else str(self._offset + self._length - 1)
            headers["Range"] = f"bytes={start}-{end}"
        params = {"alt": "media"}
        if self._generation:
            params["generation"] = self._generation
        opened: requests.Response = self._session.request(
            "GET", self._url, params=params, headers=headers, stream=True
        )
        if opened.status_code == 416:  # nothing is there, so nothing is copied
            opened.close()
            return None
        if opened.status_code not in (200, 206):
            raise refusal(opened)
        self._generation = opened.headers.get("X-Goog-Generation")
        for each in opened.headers.get("X-Goog-Hash", "").split(","):
            kind, _, text = each.strip().partition("=")
            if kind == "crc32c":
                self._announced = text
        return opened

    def _answered(self, response: requests.Response) -> tuple[int, int | None]:
        """Where the answer begins, and where the object ends; None if nobody says.

        A server may ignore what was asked for and send all, or send less of it.
        """
        if response.status_code == 200:
            return 0, None
        asked = self._offset + self._copied
        text = response.headers.get("Content-Range", "")
        match = _ANSWERED.fullmatch(text)
        first, last = (int(match[1]), int(match[2])) if match else (-1, -1)
        # Of nothing, as behind the end, some say that it ends before it begins.
        if match is None or not first <= asked <= max(first, last + 1):
            raise errors.CheckpointError(
                f"{self._url} was asked for its bytes from {asked} on and answered "
                f"with {text or 'some bytes'!r}. Look at the server, and at proxies on "
                "the way."
            )
        return first, None if match[3] == "*" else int(match[3])

    def _skip(self, response: requests.Response, count: int, limit: Limit) -> None:
        """Passes over what is there already."""
        while count and (
            piece := response.raw.read(min(_PIECE, count), decode_content=False)
        ):
            count -= len(piece)
            limit.check()

    def _pump(self, response: requests.Response, limit: Limit) -> None:
        while (wanted := self._wanted()) and (
            piece := response.raw.read(wanted, decode_content=False)
        ):
            self._target.write(piece)
            self._copied += len(piece)
            if self._is_whole:
                self._crc = google_crc32c.extend(self._crc, piece)
            limit.check()

    def _wanted(self) -> int:
        """Bytes to take next; never more than were asked for, whatever is sent."""
        if self._length is None:
            return _PIECE
        return min(_PIECE, self._length - self._copied)


def refusal(response: requests.Response) -> Exception:
    """What the client would raise for a response."""
    translate: Any = api.from_http_response
    error: Exception = translate(response)
    return error


def media_url(endpoint: str, bucket: str, key: str) -> str:
    """Where the bytes of an object are."""
    return (
        f"{endpoint}/download/storage/v1/b/{quote(bucket, safe='')}"
        f"/o/{quote(key, safe='')}"
    )


def encoded(crc: int) -> str:
    """A checksum as the service writes it: base64 of four bytes, big end first."""
    return base64.b64encode(crc.to_bytes(4, "big")).decode()


def decoded(text: str) -> int:
    """The reverse."""
    return int.from_bytes(base64.b64decode(text), "big")


class _EndedBy:
    """In its body, a response's bytes end when time is up.

    A socket's time-out counts from each packet, so a stall late in a long answer would
    go on for as long again as the whole call may take.
    """

    def __init__(self, limit: Limit, response: Any) -> None:
        end = getattr(response.raw, "shutdown", None)  # since urllib3 2.3
        seconds = limit.call()
        self._timer = None
        if seconds is not None and end is not None:
            self._timer = threading.Timer(seconds, end)
            self._timer.daemon = True

    def __enter__(self) -> None:
        if self._timer:
            self._timer.start()

    def __exit__(self, *error: object) -> None:
        if self._timer:
            self._timer.cancel()
