"""A client of S3 with endpoint, region and credentials from the environment."""

from __future__ import annotations

import os
from datetime import timedelta

from obstore.exceptions import BaseError
from obstore.store import S3Store

from tfpreempt import errors
from tfpreempt.storage.deadline import REQUEST_SECONDS, RETRY_SECONDS


def connect(bucket: str) -> S3Store:
    """A client with endpoint, region and credentials from the environment.

    Raises:
        ConfigurationError: one of the settings cannot work.
    """
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get(
        "AWS_ENDPOINT_URL"
    )
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    try:
        return S3Store(
            bucket,
            config={"endpoint": endpoint} if endpoint else None,
            region=region or "us-east-1",
            client_options={
                "allow_http": (endpoint or "").startswith("http://"),
                "timeout": timedelta(seconds=REQUEST_SECONDS),
            },
            retry_config={"retry_timeout": timedelta(seconds=RETRY_SECONDS)},
        )
    except (BaseError, ValueError) as error:
        raise errors.ConfigurationError(
            f"s3://{bucket} cannot be opened: {error}. Check the variables that begin "
            "with AWS_."
        ) from error
