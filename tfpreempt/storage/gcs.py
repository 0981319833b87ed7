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

from google.api_core import exceptions as api

from tfpreempt import errors
from tfpreempt.storage import checksum, gcs_session, gcs_transfer, pieces
from tfpreempt.storage.gcs_failure import is_about_the_bucket, translated
from tfpreempt.storage.gcs_transfer import (
    SessionLostError,
    SourceFailedError,
    Whole,
)
from tfpreempt.storage.interface import (
    ObjectMissingError,
    ObjectStat,
    check_name,
)
from tfpreempt.storage.limits import Limit

# Up to here one request does; the client then holds the bytes twice.
_SINGLE = 1 << 20
_ATTEMPTS = 3
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
        key, limit, token = self._key(name), Limit(timeout), secrets.token_hex(16)
        size = pieces.size_of(source)
        start = source.tell()
        for attempt in range(_ATTEMPTS):
            source.seek(start)
            try:
                if size <= _SINGLE:
                    return self._put_small(key, pieces.read(source, size), token, limit)
                return self._put_large(key, source, size, token, limit)
            except SessionLostError as error:
                if attempt == _ATTEMPTS - 1:
                    raise errors.SaveError(
                        f"{self.uri}/{name} could not be uploaded: the service forgot "
                        f"the upload {_ATTEMPTS} times ({error}). Try again later."
                    ) from error
        raise AssertionError("the last attempt returns or raises")

    def replace(self, name: str, data: bytes, *, timeout: float | None = None) -> None:
        key, limit = self._key(name), Limit(timeout)
        with self._edge(f"write {name!r}", limit, errors.SaveError):
            self._bucket.blob(key).upload_from_file(
                io.BytesIO(data),
                size=len(data),
                content_type=_TYPE,
                retry=gcs_session.policy(limit),
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
        key, limit = self._key(name), Limit(timeout)
        with self._edge(f"read {name!r}", limit, errors.CheckpointError):
            download = gcs_transfer.Download(
                self._session,
                gcs_transfer.media_url(self._client.api_endpoint, self._name, key),
                target,
                offset=offset,
                length=length,
            )
            try:
                copied = download.run(limit)
            except api.NotFound as error:
                if is_about_the_bucket(error):
                    raise
                raise ObjectMissingError(
                    f"There is no object {name!r} in {self.uri}."
                ) from error
        announced, found = download.announced_crc32c, download.crc32c
        if None not in (announced, found) and announced != found:
            raise errors.CheckpointDamagedError(
                f"{self.uri}/{name} arrived with crc32c {found:08x}; the service "
                f"says {announced:08x}. Read it again; if that is always so, it is "
                "damaged."
            )
        return copied

    def list(self, prefix: str = "") -> Iterator[str]:
        limit = Limit(None)
        with self._edge("list objects", limit, errors.CheckpointError):
            for blob in self._client.list_blobs(
                self._bucket,
                prefix=self._prefix + prefix,
                fields="items(name),nextPageToken",
                retry=gcs_session.policy(limit),
            ):
                yield blob.name[len(self._prefix) :]

    def folders(self, *, timeout: float | None = None) -> Iterator[str]:
        limit = Limit(timeout)
        with self._edge("list objects", limit, errors.CheckpointError):
            found = self._client.list_blobs(
                self._bucket,
                prefix=self._prefix,
                delimiter="/",
                fields="prefixes,nextPageToken",
                retry=gcs_session.policy(limit),
            )
            for page in found.pages:
                for each in page.prefixes:
                    yield each[len(self._prefix) : -1]

    def stat(self, name: str, *, timeout: float | None = None) -> ObjectStat | None:
        key, limit = self._key(name), Limit(timeout)
        with self._edge(f"look at {name!r}", limit, errors.CheckpointError):
            blob = self._reloaded(key, limit)
        if blob is None:
            return None
        return ObjectStat(
            name=name,
            size=blob.size or 0,  # zeros may be left out
            crc32c=gcs_transfer.decoded(blob.crc32c) if blob.crc32c else None,
            generation=str(blob.generation),
        )

    def delete(self, name: str, *, timeout: float | None = None) -> bool:
        key, limit = self._key(name), Limit(timeout)
        with self._edge(f"delete {name!r}", limit, errors.SaveError):
            blob = self._reloaded(key, limit)
            if blob is None:
                return False
            try:
                blob.delete(
                    if_generation_match=blob.generation,
                    retry=gcs_session.policy(limit),
                )
            except (api.NotFound, api.PreconditionFailed):
                pass  # gone: by us, if an answer was lost, or by somebody else
        return True

    def _put_small(self, key: str, data: bytes, token: str, limit: Limit) -> bool:
        sent = Whole(size=len(data), crc32c=checksum.of_bytes(data))
        with self._edge(f"upload {key!r}", limit, errors.SaveError):
            try:
                self._new_blob(key, token).upload_from_file(
                    io.BytesIO(data),
                    size=len(data),
                    content_type=_TYPE,
                    if_generation_match=0,
                    checksum="crc32c",
                    retry=gcs_session.policy(limit),
                )
            except api.PreconditionFailed:
                return self._is_ours(key, sent, token, limit)
        return True

    def _put_large(
        self, key: str, source: IO[bytes], size: int, token: str, limit: Limit
    ) -> bool:
        with self._edge(f"upload {key!r}", limit, errors.SaveError):
            try:
                url = self._new_blob(key, token).create_resumable_upload_session(
                    content_type=_TYPE,
                    size=size,
                    if_generation_match=0,
                    retry=gcs_session.policy(limit),
                )
            except api.PreconditionFailed:
                return False  # nothing of ours was sent yet
        body = gcs_transfer.Body(source, size, limit)
        upload = gcs_transfer.ResumableUpload(self._session, url, size, body)
        try:
            with self._edge(f"upload {key!r}", limit, errors.SaveError):
                try:
                    resource = upload.run(limit)
                except api.PreconditionFailed:
                    whole = Whole(size=size, crc32c=body.crc32c)
                    return self._is_ours(key, whole, token, limit)
        except SourceFailedError as error:
            raise error.failure from None
        self._check_arrived(key, resource, body.crc32c, limit)
        return True

    def _check_arrived(
        self, key: str, resource: dict[str, Any], crc32c: int, limit: Limit
    ) -> None:
        """Deletes what we have just made, and raises, if it isn't what we sent."""
        announced = resource.get("crc32c")
        if announced is None or gcs_transfer.decoded(announced) == crc32c:
            return
        with self._edge(f"delete {key!r}", limit, errors.SaveError):
            self._bucket.blob(key).delete(
                if_generation_match=int(resource["generation"]),
                retry=gcs_session.policy(limit),
            )
        raise errors.SaveError(
            f"{self.uri}: {key!r} arrived with another crc32c than it was sent with, "
            "and was deleted again. Something on the way, or this machine's memory, "
            "changes bytes; upload it again."
        )

    def _new_blob(self, key: str, token: str) -> Any:
        blob = self._bucket.blob(key)
        blob.metadata = {_TOKEN: token}
        return blob

    def _is_ours(self, key: str, sent: Whole, token: str, limit: Limit) -> bool:
        """Whether the object that is in the way is the one that we sent."""
        blob = self._reloaded(key, limit)
        if blob is None or (blob.metadata or {}).get(_TOKEN) != token:
            return False
        crc = gcs_transfer.decoded(blob.crc32c)
        return (blob.size or 0, crc) == (sent.size, sent.crc32c)

    def _reloaded(self, key: str, limit: Limit) -> Any:
        """What the service knows of an object; None if there is none."""
        blob = self._bucket.blob(key)
        try:
            blob.reload(retry=gcs_session.policy(limit))
        except api.NotFound as error:
            if is_about_the_bucket(error):
                raise
            return None
        return blob

    @contextlib.contextmanager
    def _edge(
        self, doing: str, limit: Limit, kind: type[errors.CheckpointError]
    ) -> Iterator[None]:
        with translated(limit, doing, self.uri, kind):
            self._connect()
            yield

    def _connect(self) -> None:
        """Looks for credentials when they are needed first.

        A metadata server that is away for a moment must not keep a program with local
        commits from its start.
        """
        with self._connecting:
            if not self._is_connected:
                self._client, self._session = gcs_session.connect(self._name)
                self._bucket = self._client.bucket(self._name)
                self._is_connected = True

    def _key(self, name: str) -> str:
        return self._prefix + check_name(name)
