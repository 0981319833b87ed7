"""Bytes of an object on their way from Google Cloud Storage, a mebibyte at a time."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

import requests

from tfpreempt import errors
from tfpreempt.core.threads import OutOfTimeError
from tfpreempt.storage import gcs_client
from tfpreempt.storage.bucket import MissingError
from tfpreempt.storage.deadline import Deadline
from tfpreempt.storage.gcs_client import GcsClient, Retry

_PIECE = 1 << 20


class GcsDownload:
    """Some bytes of an object, of the generation that the first answer comes from.

    Args:
        client: makes the requests.
        key: the object's name in the bucket.
        start: the first byte that is wanted.
        end: the one after the last; None: all that follow.

    Attributes:
        crc32c: what the service says of the whole object; None while it says nothing.
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
        self._size: int | None = None  # of the object, where an answer is a part

    def pieces(self, deadline: Deadline) -> Iterator[bytes]:
        """All of them, once; goes on where a connection broke off, or an answer ended.

        Raises:
            OutOfTimeError: time is up.
            MissingError: there is no such object.
            CheckpointError: the answer is to another question.
            GcsError: the service refuses, or fails for too long.
            Exception: one of `gcs_client.BROKEN`; the connection failed for too long.
        """
        while self._end is None or self._at < self._end:
            asked = self._at
            try:
                answer, piece = deadline.run(lambda: Retry(deadline).run(self._begin))
            except gcs_client.RangeError:
                return  # the object ends before it
            more = functools.partial(self._read, answer)
            try:
                while piece:
                    self._at += len(piece)
                    yield piece
                    piece = deadline.run(more)
            except OutOfTimeError:
                raise  # the read is under way, and closing would wait for its end
            except gcs_client.BROKEN:
                answer.close()  # with something to show for it, so there is no pause
            except BaseException:
                answer.close()
                raise
            else:
                answer.close()
                if self._size is None or not asked < self._at < self._size:
                    return

    def _begin(self) -> tuple[requests.Response, bytes]:
        """An answer to the question for the rest, and its first piece."""
        headers = {"Accept-Encoding": "gzip"}  # as it is stored, not unpacked
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
        except gcs_client.NotFoundError as error:
            raise MissingError from error
        part = answer.headers.get("Content-Range", "")
        is_part = answer.status_code == 206
        if is_part and not part.startswith(f"bytes {self._at}-"):
            answer.close()
            raise errors.CheckpointError(
                f"{answer.url} was asked for its bytes from {self._at} on and answered "
                f"with {part or 'some bytes'!r}. Look at the server, and at proxies on "
                "the way."
            )
        size = part.rpartition("/")[2]  # "*" where the server doesn't know
        self._size = int(size) if is_part and size.isdecimal() else None
        self._generation = answer.headers.get("X-Goog-Generation")
        if found := re.search(r"crc32c=([^,]+)", answer.headers.get("X-Goog-Hash", "")):
            self.crc32c = gcs_client.decoded(found[1])
        ahead = 0 if is_part else self._at  # it sends all, as it may
        while ahead and (passed := answer.raw.read(min(ahead, _PIECE))):
            ahead -= len(passed)
        return answer, self._read(answer)

    def _read(self, answer: requests.Response) -> bytes:
        """Never more than is wanted, whatever is sent."""
        wanted = _PIECE if self._end is None else min(_PIECE, self._end - self._at)
        piece: bytes = answer.raw.read(wanted)
        return piece
