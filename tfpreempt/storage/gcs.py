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
from tfpreempt.storage.deadline import Deadline
from tfpreempt.storage.gcs_client import connect, policy
from tfpreempt.storage.gcs_download import Download, decoded
from tfpreempt.storage.gcs_failure import is_about_the_bucket, translated
from tfpreempt.storage.gcs_upload import ResumableUpload, SourceError, read_source
from tfpreempt.storage.interface import (
    ObjectMissingError,
    ObjectStat,
    check_name,
)

# Up to here the client uploads, in one request; it then holds the bytes twice.
_SINGLE = 1 << 20
_TOKEN = "tfpreempt-writer"
_TYPE = "application/octet-stream"


class GcsStore:
    """Objects below a prefix of a bucket. Many threads share its one client.

    Args:
        bucket: name of the bucket.
        prefix: what all names begin with, without the "/" behind it; "" for none.
    """

    _client: Any
    _session: Any
    _bucket: Any

    def __init__(self, bucket: str, prefix: str = "") -> None:
        self._prefix = f"{prefix}/" if prefix else ""
        self._name = bucket
        self._connecting = threading.Lock()
        self._is_connected = False

    @property
    def uri(self) -> str:
        return f"gs://{self._name}/{self._prefix}".rstrip("/")

    def put_if_absent(
        self, name: str, source: IO[bytes], *, timeout: float | None = None
    ) -> bool:
        key, deadline = self._key(name), Deadline(timeout)
        size, token = pieces.size_of(source), secrets.token_hex(16)
        put = self._put_small if size <= _SINGLE else self._put_large
        try:
            with self._edge(f"upload {name!r}", deadline, errors.SaveError):
                return deadline.run(
                    lambda: put(key, source, size, token, policy(deadline))
                )
        except SourceError as error:
            raise error.failure from None

    def replace(self, name: str, data: bytes, *, timeout: float | None = None) -> None:
        key, deadline = self._key(name), Deadline(timeout)
        with self._edge(f"write {name!r}", deadline, errors.SaveError):
            blob, retry = self._bucket.blob(key), policy(deadline)
            deadline.run(
                lambda: blob.upload_from_file(
                    io.BytesIO(data), size=len(data), content_type=_TYPE, retry=retry
                )
            )

    def get(
        self,
        name: str,
        target: IO[bytes],
        *,
        offset: int = 0,
        length: int | None = None,
        timeout: float | None = None,
    ) -> int:
        key, deadline, doing = self._key(name), Deadline(timeout), f"read {name!r}"
        with self._edge(doing, deadline, errors.CheckpointError):
            download = Download(
                self._session,
                f"{self._client.api_endpoint}/download/storage/v1/b/{self._name}"
                f"/o/{quote(key, safe='')}",
                offset,
                None if length is None else offset + length,
            )
        found = download.pieces(deadline)
        copied = crc = 0
        while True:
            with self._edge(doing, deadline, errors.CheckpointError):
                try:
                    piece = next(found, None)
                except api.NotFound as error:
                    if is_about_the_bucket(error):
                        raise
                    raise ObjectMissingError(
                        f"There is no object {name!r} in {self.uri}."
                    ) from error
            if piece is None:
                break
            target.write(piece)
            copied, crc = copied + len(piece), checksum.extended(crc, piece)
        announced = None if offset or length is not None else download.crc32c
        if announced not in (None, crc):
            raise errors.CheckpointDamagedError(
                f"{self.uri}/{name} arrived with crc32c {crc:08x}; the service says "
                f"{announced:08x}. Read it again; if that is always so, it is damaged."
            )
        return copied

    def list(self, prefix: str = "") -> Iterator[str]:
        deadline = Deadline(None)
        with self._edge("list objects", deadline, errors.CheckpointError):
            for blob in self._client.list_blobs(
                self._bucket,
                prefix=self._prefix + prefix,
                fields="items(name),nextPageToken",
                retry=policy(deadline),
            ):
                yield blob.name[len(self._prefix) :]

    def folders(self, *, timeout: float | None = None) -> Iterator[str]:
        deadline = Deadline(timeout)
        with self._edge("list objects", deadline, errors.CheckpointError):
            pages = self._client.list_blobs(
                self._bucket,
                prefix=self._prefix,
                delimiter="/",
                fields="prefixes,nextPageToken",
                retry=policy(deadline),
            ).pages
            while (page := deadline.run(lambda: next(pages, None))) is not None:
                for each in page.prefixes:
                    yield each[len(self._prefix) : -1]

    def stat(self, name: str, *, timeout: float | None = None) -> ObjectStat | None:
        key, deadline = self._key(name), Deadline(timeout)
        with self._edge(f"look at {name!r}", deadline, errors.CheckpointError):
            blob = deadline.run(lambda: self._found(key, policy(deadline)))
        if blob is None:
            return None
        return ObjectStat(
            name=name,
            size=blob.size or 0,  # zeros may be left out
            crc32c=_crc_of(blob),
            generation=str(blob.generation),
        )

    def delete(self, name: str, *, timeout: float | None = None) -> bool:
        key, deadline = self._key(name), Deadline(timeout)
        with self._edge(f"delete {name!r}", deadline, errors.SaveError):
            return deadline.run(lambda: self._delete(key, policy(deadline)))

    def _delete(self, key: str, retry: Any) -> bool:
        blob = self._found(key, retry)
        if blob is None:
            return False
        try:
            blob.delete(if_generation_match=blob.generation, retry=retry)
        except (api.NotFound, api.PreconditionFailed):
            pass  # gone: by us, if an answer was lost, or by somebody else
        return True

    def _put_small(
        self, key: str, source: IO[bytes], size: int, token: str, retry: Any
    ) -> bool:
        data = read_source(source, size)
        try:
            self._new(key, token).upload_from_file(
                io.BytesIO(data),
                size=size,
                content_type=_TYPE,
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
                content_type=_TYPE, size=size, if_generation_match=0, retry=None
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

    def _new(self, key: str, token: str) -> Any:
        blob = self._bucket.blob(key)
        blob.metadata = {_TOKEN: token}
        return blob

    def _is_ours(
        self, key: str, size: int, crc32c: int, token: str, retry: Any
    ) -> bool:
        """Whether the object that is in the way is the one that we sent."""
        blob = self._found(key, retry)
        return (
            blob is not None
            and (blob.metadata or {}).get(_TOKEN) == token
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

    def _key(self, name: str) -> str:
        return self._prefix + check_name(name)


def _crc_of(blob: Any) -> int | None:
    return decoded(blob.crc32c) if blob.crc32c else None
