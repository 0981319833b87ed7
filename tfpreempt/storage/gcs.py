"""ObjectStore in Google Cloud Storage, by google-cloud-storage.

What creates an object asks the service to refuse unless there is none of that name
(`ifGenerationMatch=0`). A request whose answer got lost is sent again, and is then
refused because of itself; so each writer attaches a token of its own, and looks, on a
refusal, whose object is there.
"""

from __future__ import annotations

import contextlib
import io
import secrets
import threading
from collections.abc import Iterator
from typing import IO, Any
from urllib.parse import quote

from google.api_core import exceptions as api

from tfpreempt import errors
from tfpreempt.storage import checksum, pieces
from tfpreempt.storage.bucket import CONTENT_TYPE, TOKEN, BucketStore
from tfpreempt.storage.deadline import Deadline
from tfpreempt.storage.gcs_client import connect, policy
from tfpreempt.storage.gcs_download import GcsDownload, decoded
from tfpreempt.storage.gcs_failure import is_about_the_bucket, translated
from tfpreempt.storage.gcs_upload import ResumableUpload
from tfpreempt.storage.interface import ObjectStat

# Up to here the client uploads, in one request; it then holds the bytes twice.
_SINGLE = 1 << 20


class GcsStore(BucketStore):
    """As its base; many threads share its one client, which connects when asked."""

    scheme = "gs"
    _client: Any
    _session: Any
    _bucket: Any

    def __init__(self, bucket: str, prefix: str = "") -> None:
        super().__init__(bucket, prefix)
        self._connecting = threading.Lock()
        self._is_connected = False

    def _put(self, key: str, source: IO[bytes], size: int, deadline: Deadline) -> bool:
        token, retry = secrets.token_hex(16), policy(deadline)
        put = self._put_small if size <= _SINGLE else self._put_large
        return put(key, source, size, token, retry)

    def _put_small(
        self, key: str, source: IO[bytes], size: int, token: str, retry: Any
    ) -> bool:
        data = pieces.read(source, size)
        try:
            self._new(key, token).upload_from_file(
                io.BytesIO(data),
                size=size,
                content_type=CONTENT_TYPE,
                if_generation_match=0,
                checksum="crc32c",
                retry=retry,
            )
        except api.PreconditionFailed:
            return self._is_ours(key, size, checksum.of_bytes(data), token, retry)
        return True

    def _put_large(
        self, key: str, source: IO[bytes], size: int, token: str, retry: Any
    ) -> bool:
        def begin() -> str:
            url: str = self._new(key, token).create_resumable_upload_session(
                content_type=CONTENT_TYPE, size=size, if_generation_match=0, retry=None
            )
            return url

        upload = ResumableUpload(self._session, begin, source, size, retry)
        try:
            resource = upload.run()
        except api.PreconditionFailed:
            return self._is_ours(key, size, upload.crc32c, token, retry)
        announced = resource.get("crc32c")
        if announced is None or decoded(announced) == upload.crc32c:
            return True
        self._bucket.blob(key).delete(
            if_generation_match=int(resource["generation"]), retry=retry
        )
        raise errors.SaveError(
            f"{self.uri}: {key!r} arrived with another crc32c than it was sent with, "
            "and was deleted again. Something on the way, or this machine's memory, "
            "changes bytes; upload it again."
        )

    def _replace(self, key: str, data: bytes, deadline: Deadline) -> None:
        self._bucket.blob(key).upload_from_file(
            io.BytesIO(data),
            size=len(data),
            content_type=CONTENT_TYPE,
            retry=policy(deadline),
        )

    def _download(self, key: str, start: int, end: int | None) -> GcsDownload:
        where = f"{self._client.api_endpoint}/download/storage/v1/b/{self._name}"
        url = f"{where}/o/{quote(key, safe='')}"
        return GcsDownload(self._session, url, start, end)

    def _keys(self, prefix: str, deadline: Deadline) -> Iterator[str]:
        for blob in self._client.list_blobs(
            self._bucket,
            prefix=prefix,
            fields="items(name),nextPageToken",
            retry=policy(deadline),
        ):
            yield blob.name

    def _folders(self, deadline: Deadline) -> Iterator[str]:
        pages = self._client.list_blobs(
            self._bucket,
            prefix=self._prefix,
            delimiter="/",
            fields="prefixes,nextPageToken",
            retry=policy(deadline),
        ).pages
        while (page := deadline.run(lambda: next(pages, None))) is not None:
            yield from page.prefixes

    def _stat(self, key: str, deadline: Deadline) -> ObjectStat | None:
        blob = self._found(key, policy(deadline))
        if blob is None:
            return None
        return ObjectStat(
            name=key,
            size=blob.size or 0,  # zeros may be left out
            crc32c=_crc_of(blob),
            generation=str(blob.generation),
        )

    def _delete(self, key: str, deadline: Deadline) -> bool:
        retry = policy(deadline)
        blob = self._found(key, retry)
        if blob is None:
            return False
        try:
            blob.delete(if_generation_match=blob.generation, retry=retry)
        except (api.NotFound, api.PreconditionFailed):
            pass  # gone: by us, if an answer was lost, or by somebody else
        return True

    def _new(self, key: str, token: str) -> Any:
        blob = self._bucket.blob(key)
        blob.metadata = {TOKEN: token}
        return blob

    def _is_ours(
        self, key: str, size: int, crc32c: int, token: str, retry: Any
    ) -> bool:
        """Whether the object that is in the way is the one that we sent."""
        blob = self._found(key, retry)
        return (
            blob is not None
            and (blob.metadata or {}).get(TOKEN) == token
            and (blob.size or 0, _crc_of(blob)) == (size, crc32c)
        )

    def _found(self, key: str, retry: Any) -> Any:
        """What the service knows of an object; None if there is none."""
        blob = self._bucket.blob(key)
        try:
            blob.reload(retry=retry)
        except api.NotFound as error:
            if is_about_the_bucket(error):
                raise
            return None
        return blob

    @contextlib.contextmanager
    def _edge(
        self, doing: str, deadline: Deadline, kind: type[errors.CheckpointError]
    ) -> Iterator[None]:
        with translated(deadline, doing, self.uri, kind):
            self._connect()
            yield

    def _connect(self) -> None:
        """Looks for credentials when they are needed first.

        A metadata server that is away for a moment must not keep a program with local
        commits from its start.
        """
        with self._connecting:
            if not self._is_connected:
                self._client, self._session = connect(self._name)
                self._bucket = self._client.bucket(self._name)
                self._is_connected = True


def _crc_of(blob: Any) -> int | None:
    return decoded(blob.crc32c) if blob.crc32c else None
