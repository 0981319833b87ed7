"""ObjectStore in Google Cloud Storage, by google-cloud-storage.

What creates an object asks the service to refuse unless there is none of that name
(`ifGenerationMatch=0`). A request whose answer got lost is sent again, and is then
refused because of itself; so each writer attaches a token of its own, and looks, on a
refusal, whose object is there.
"""

from __future__ import annotations

import functools
import io
import secrets
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

from google.api_core import exceptions as api

from tfpreempt import errors
from tfpreempt.storage import gcs_client
from tfpreempt.storage.bucket import CONTENT_TYPE, TOKEN, BucketStore
from tfpreempt.storage.deadline import REQUEST_SECONDS, Deadline
from tfpreempt.storage.gcs_client import decoded, policy
from tfpreempt.storage.gcs_download import GcsDownload
from tfpreempt.storage.gcs_upload import GcsUpload
from tfpreempt.storage.interface import ObjectMissingError, ObjectStat
from tfpreempt.storage.pieces import Source


class GcsStore(BucketStore):
    """As its base; many threads share its one client, which connects when asked."""

    scheme = "gs"
    advice = gcs_client.ADVICE
    cause = staticmethod(gcs_client.cause)

    @functools.cached_property
    def _bucket(self) -> Any:
        """Looks for credentials when they are needed first.

        A metadata server that is away for a moment must not keep a program with local
        commits from its start.
        """
        return gcs_client.connect().bucket(self._name)

    def _put(self, key: str, source: Source, size: int, deadline: Deadline) -> bool:
        blob, retry = self._new(key), policy(deadline)
        upload = GcsUpload(blob, source, size, retry)
        try:
            upload.run()
        except api.PreconditionFailed:
            there = self._written_by(blob, retry)
            return there is not None and (
                (there.size or 0, _crc_of(there)) == (size, upload.crc32c)
            )
        return True

    def compose(
        self, name: str, parts: Sequence[str], *, timeout: float | None = None
    ) -> bool:
        key, deadline = self._key(name), Deadline(timeout)
        keys = [self._key(each) for each in parts]
        with self._edge(f"compose {name!r}", errors.SaveError):
            return deadline.run(lambda: self._compose(key, keys, deadline))

    def _compose(self, key: str, keys: Sequence[str], deadline: Deadline) -> bool:
        blob, retry = self._new(key), policy(deadline)
        blob.content_type = CONTENT_TYPE
        try:
            blob.compose(
                [self._bucket.blob(each) for each in keys],
                if_generation_match=0,
                timeout=REQUEST_SECONDS,
                retry=retry,
            )
        except api.PreconditionFailed:
            return self._written_by(blob, retry) is not None
        except api.NotFound as error:
            if gcs_client.is_about_the_bucket(error):
                raise
            raise ObjectMissingError(
                f"One of the {len(keys)} objects of which gs://{self._name}/{key} was "
                "to be made is not there."
            ) from error
        return True

    def _replace(self, key: str, data: bytes, deadline: Deadline) -> None:
        self._bucket.blob(key).upload_from_file(
            io.BytesIO(data),
            size=len(data),
            content_type=CONTENT_TYPE,
            retry=policy(deadline),
        )

    def _download(self, key: str, start: int, end: int | None) -> GcsDownload:
        client = self._bucket.client
        where = f"{client.api_endpoint}/download/storage/v1/b/{self._name}"
        return GcsDownload(client._http, f"{where}/o/{quote(key, safe='')}", start, end)

    def _keys(self, prefix: str, deadline: Deadline) -> Iterator[str]:
        for blob in self._bucket.list_blobs(
            prefix=prefix, fields="items(name),nextPageToken", retry=policy(deadline)
        ):
            yield blob.name

    def _folders(self, deadline: Deadline) -> Iterator[str]:
        pages = self._bucket.list_blobs(
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
        size = blob.size or 0  # zeros may be left out
        return ObjectStat(size=size, crc32c=_crc_of(blob))

    def _delete(self, key: str, deadline: Deadline) -> None:
        try:
            self._bucket.blob(key).delete(retry=policy(deadline))
        except api.NotFound as error:
            if gcs_client.is_about_the_bucket(error):
                raise

    def _new(self, key: str) -> Any:
        """An object that is to be, with this writer's token."""
        blob = self._bucket.blob(key)
        blob.metadata = {TOKEN: secrets.token_hex(16)}
        return blob

    def _written_by(self, blob: Any, retry: Any) -> Any:
        """The object that is in the way, if it is ours, whose answer got lost."""
        there = self._found(blob.name, retry)
        if there is None or (there.metadata or {}).get(TOKEN) != blob.metadata[TOKEN]:
            return None
        return there

    def _found(self, key: str, retry: Any) -> Any:
        """What the service knows of an object; None if there is none."""
        blob = self._bucket.blob(key)
        try:
            blob.reload(retry=retry)
        except api.NotFound as error:
            if gcs_client.is_about_the_bucket(error):
                raise
            return None
        return blob


def _crc_of(blob: Any) -> int | None:
    return decoded(blob.crc32c) if blob.crc32c else None
