"""ObjectStore in S3, or in a service with S3's protocol."""

from __future__ import annotations

import os
from typing import Any

import obstore.exceptions as exceptions
from obstore.store import S3Store as Client

from tfpreempt.core.threads import CallTimeoutError
from tfpreempt.storage.bucket_store import Advice
from tfpreempt.storage.obstore_store import MISSING, ObstoreStore


class S3Store(ObstoreStore):
    """Store of the objects below a prefix of a bucket in S3; see `ObstoreStore`."""

    scheme = "s3"
    endpoint_variables = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    variables = "that begin with AWS_"
    advice = (
        Advice(
            MISSING,
            "Create the bucket {bucket!r} or correct its name.",
            is_permanent=True,
        ),
        Advice(
            (exceptions.PermissionDeniedError,),
            "Allow this account s3:GetObject, s3:PutObject, s3:DeleteObject and "
            "s3:ListBucket on {bucket!r}.",
            is_permanent=True,
        ),
        Advice(
            (exceptions.UnauthenticatedError,),
            "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_ENDPOINT_URL, if "
            "the service is not Amazon's), or run with an instance role. ~/.aws is not "
            "read.",
            is_permanent=True,
        ),
        Advice(
            (CallTimeoutError,),
            "Use a longer timeout, or check the network. Without AWS_ACCESS_KEY_ID, "
            "credentials are first requested from the machine's metadata server.",
        ),
        Advice(
            (exceptions.BaseError,),
            "The service or the network failed: check AWS_ENDPOINT_URL, or retry "
            "later.",
        ),
    )

    def _client(self, endpoint: str | None, options: dict[str, Any]) -> Client:
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        return Client(
            self._name,
            config={"endpoint": endpoint} if endpoint else None,
            region=region or "us-east-1",
            **options,
        )
