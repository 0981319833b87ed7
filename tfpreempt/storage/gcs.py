"""ObjectStore in Google Cloud Storage, through the JSON API of the service.

A request that creates an object has the condition that the name does not exist
(`ifGenerationMatch=0`). If the response is lost, the request is sent again, and refused
because the object exists now. So every new object gets a random token: if the existing
object has the token of the request, the first request has succeeded.
"""

from __future__ import annotations

import io
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfpreempt import errors
from tfpreempt.storage import gcs_client
from tfpreempt.storage.bucket_store import CONTENT_TYPE, TOKEN, BucketStore
from tfpreempt.storage.chunks import SeekableReader
from tfpreempt.storage.gcs_client import (
    NotFoundError,
    PreconditionFailedError,
    parsing,
    strings,
)
from tfpreempt.storage.gcs_transfer import GcsDownload, GcsUpload
from tfpreempt.storage.object_store import ObjectNotFoundError, ObjectStat
from tfpreempt.storage.request_deadline import Deadline

_ABSENT = {"ifGenerationMatch": "0"}  # refused if the object exists


class GcsStore(BucketStore):
    """Store of the objects below a prefix of a bucket in Google Cloud Storage.

    Used on any thread.

    Args:
        bucket: name of the bucket.
        prefix: common prefix of the names, without a "/" at the end; "" for no prefix.
    """

    scheme = "gs"
    advice = gcs_client.ADVICE
    cause = staticmethod(gcs_client.cause)

    def __init__(self, bucket: str, prefix: str = "") -> None:
        super().__init__(bucket, prefix)
        self._client = gcs_client.GcsClient(bucket)

    def _put(
        self, key: str, source: SeekableReader, size: int, deadline: Deadline
    ) -> bool:
        resource = _new(key)
        upload = GcsUpload(self._client, resource, source, size, deadline, _ABSENT)
        try:
            upload.run()
        except PreconditionFailedError:
            there = self._written_as(resource, deadline)
            return there is not None and (
                _stat_of(there) == ObjectStat(size=size, crc32c=upload.crc32c)
            )
        return True

    def compose(
        self, name: str, parts: Sequence[str], *, timeout: float | None = None
    ) -> bool:
        key, deadline = self._key(name), Deadline(timeout)
        keys = [self._key(each) for each in parts]
        with self._translate_errors(f"combine the parts of {name!r}", errors.SaveError):
            return deadline.run(lambda: self._compose(key, keys, deadline))

    def _compose(self, key: str, keys: Sequence[str], deadline: Deadline) -> bool:
        resource = _new(key)
        sources = [{"name": each} for each in keys]
        try:
            self._client.call(
                "POST",
                f"{self._client.object_path(key)}/compose",
                deadline,
                params=_ABSENT,
                json={"sourceObjects": sources, "destination": resource},
            )
        except PreconditionFailedError:
            return self._written_as(resource, deadline) is not None
        except NotFoundError as error:
            raise ObjectNotFoundError(
                f"gs://{self._name}/{key} cannot be combined from {len(keys)} parts: "
                "at least one of these objects does not exist. Upload the object again."
            ) from error
        return True

    def _replace(self, key: str, data: bytes, deadline: Deadline) -> None:
        source = io.BytesIO(data)
        GcsUpload(self._client, _new(key), source, len(data), deadline, {}).run()

    def _download(self, key: str, start: int, end: int | None) -> GcsDownload:
        return GcsDownload(self._client, key, start, end)

    def _keys(self, prefix: str, deadline: Deadline) -> Iterator[str]:
        for page in self._pages(deadline, prefix=prefix, fields="items(name)"):
            with parsing():
                names = strings(each["name"] for each in page.get("items", ()))
            yield from names

    def _folders(self, deadline: Deadline) -> Iterator[str]:
        for page in self._pages(
            deadline, prefix=self._prefix, delimiter="/", fields="prefixes"
        ):
            with parsing():
                names = strings(page.get("prefixes", ()))
            yield from names

    def _pages(
        self, deadline: Deadline, *, fields: str, **params: str
    ) -> Iterator[dict[str, Any]]:
        """Yields the pages of a list of objects, as sent by the service.

        Args:
            deadline: deadline of the call.
            fields: fields of a page that the service sends.
            **params: further query parameters of the request.
        """
        params["fields"] = f"{fields},nextPageToken"
        client = self._client
        while True:
            page = deadline.run(
                lambda: client.call("GET", client.objects, deadline, params=params)
            )
            yield page
            if not (token := page.get("nextPageToken")):
                return
            params["pageToken"] = token

    def _stat(self, key: str, deadline: Deadline) -> ObjectStat | None:
        there = self._resource(key, deadline)
        return None if there is None else _stat_of(there)

    def _delete(self, key: str, deadline: Deadline) -> None:
        try:
            self._client.call("DELETE", self._client.object_path(key), deadline)
        except NotFoundError:
            return

    def _written_as(
        self, resource: Mapping[str, Any], deadline: Deadline
    ) -> dict[str, Any] | None:
        """Looks for the object that an earlier attempt of the same request created.

        Args:
            resource: description from `_new`, with the token of the request.
            deadline: deadline of the call.

        Returns:
            The service's description of the object; None if another writer created the
            object, or if there is no object.
        """
        there = self._resource(resource["name"], deadline)
        with parsing():
            token = (there or {}).get("metadata", {}).get(TOKEN)
        return there if token == resource["metadata"][TOKEN] else None

    def _resource(self, key: str, deadline: Deadline) -> dict[str, Any] | None:
        """Returns the service's description of an object; None if missing."""
        try:
            return self._client.call("GET", self._client.object_path(key), deadline)
        except NotFoundError:
            return None


def _new(key: str) -> dict[str, Any]:
    """Returns the description of an object to create.

    The description has a random token, by which `_written_as` recognizes the object.
    """
    return {
        "name": key,
        "contentType": CONTENT_TYPE,
        "metadata": {TOKEN: secrets.token_hex(16)},
    }


def _stat_of(resource: Mapping[str, Any]) -> ObjectStat:
    crc = resource.get("crc32c")
    with parsing():
        return ObjectStat(
            size=int(resource.get("size", 0)),  # the service may omit zeros
            crc32c=gcs_client.decoded(crc) if crc else None,
        )
