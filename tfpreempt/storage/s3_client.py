"""A client of S3, and what its errors mean.

Endpoint, region and credentials come from the environment.
"""

from __future__ import annotations

import os
import re
from datetime import timedelta

import obstore.exceptions as said
from obstore.store import S3Store

from tfpreempt import errors
from tfpreempt.core.threads import OutOfTimeError
from tfpreempt.storage.bucket import Advice
from tfpreempt.storage.deadline import REQUEST_SECONDS, RETRY_SECONDS
from tfpreempt.storage.paths import check_no_user_info

_METADATA = re.compile(r"169\.254\.(?:169\.254|170\.)")  # where a role's keys are had
_MARKUP = re.compile(r"[:\s]*<(?:\?xml|[A-Za-z!]).*", re.DOTALL)
ADVICE = (
    Advice(
        (said.NotFoundError, FileNotFoundError),
        "Create the bucket {bucket!r} or correct its name.",
        is_permanent=True,
    ),
    Advice(
        (said.PermissionDeniedError,),
        "Allow this account s3:GetObject, s3:PutObject, s3:DeleteObject and "
        "s3:ListBucket on {bucket!r}.",
        is_permanent=True,
    ),
    Advice(
        (said.UnauthenticatedError,),
        "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_ENDPOINT_URL, where "
        "it is not Amazon's), or run with an instance role; ~/.aws is not read.",
        is_permanent=True,
    ),
    Advice(
        (OutOfTimeError,),
        "Give it more time, or look at the network; without AWS_ACCESS_KEY_ID the "
        "machine is asked for a role first.",
    ),
    Advice(
        (said.BaseError,),
        "The service or the network failed; look at AWS_ENDPOINT_URL, or try later.",
    ),
)


def connect(bucket: str) -> S3Store:
    """A client of a bucket.

    Raises:
        ConfigurationError: one of the settings cannot work.
    """
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get(
        "AWS_ENDPOINT_URL"
    )
    check_no_user_info(endpoint or "", "AWS_ENDPOINT_URL")
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
    except (said.BaseError, ValueError) as error:
        raise errors.ConfigurationError(
            f"s3://{bucket} cannot be opened: {error}. Check the variables that begin "
            "with AWS_."
        ) from error


def is_about_the_bucket(error: Exception) -> bool:
    """Whether a 404 means that the bucket is missing, not an object in it."""
    return "NoSuchBucket" in str(error)


def cause(error: Exception) -> Exception:
    """What went wrong, without the service's markup."""
    text = str(error)
    code = re.search(r"<Code>(\w+)</Code>", text)
    if not code and ("redential" in text or _METADATA.search(text)):
        return said.UnauthenticatedError("it needs credentials, and none were found")
    first = _MARKUP.sub("", text.strip().partition("\n\n")[0]).rstrip(".")
    kind = said.NotFoundError if is_about_the_bucket(error) else type(error)
    return kind(f"{first}: {code[1]}" if code else first)
