"""Translates what S3 and its client say into what the user can do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import obstore.exceptions as said

from tfpreempt import errors
from tfpreempt.checkpoint.storage.limits import Limit, OutOfTimeError

_FOREIGN = (
    said.BaseError,
    FileNotFoundError,
    TimeoutError,
    OutOfTimeError,
)


@contextlib.contextmanager
def translated(
    limit: Limit, doing: str, uri: str, kind: type[errors.CheckpointError]
) -> Iterator[None]:
    """Turns what obstore raises in the body into our errors.

    Args:
        limit: of the call.
        doing: what the body does, such as "upload 'x'".
        uri: of the store.
        kind: what to raise.
    """
    try:
        yield
    except _FOREIGN as error:
        raise kind(
            f"Could not {doing} in {uri}: {_said(error, limit)} {_advice(error, uri)}"
        ) from error


def is_about_the_bucket(error: Exception) -> bool:
    """Whether a 404 means that the bucket is missing, not an object in it."""
    return "NoSuchBucket" in str(error)


def _said(error: BaseException, limit: Limit) -> str:
    if isinstance(error, TimeoutError):
        return f"it was not done within {limit.seconds or 0:g} s."
    first = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {first[:300]}."


def _advice(error: BaseException, uri: str) -> str:
    bucket = uri.removeprefix("s3://").partition("/")[0]
    text = str(error)
    if "NoSuchBucket" in text or isinstance(error, said.NotFoundError):
        return f"Create the bucket {bucket!r} or correct its name."
    if isinstance(error, said.PermissionDeniedError):
        return (
            f"Allow this account s3:GetObject, s3:PutObject, s3:DeleteObject and "
            f"s3:ListBucket on {bucket!r}."
        )
    if isinstance(error, said.UnauthenticatedError) or "redential" in text:
        return (
            "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run with an instance "
            "role; ~/.aws is not read."
        )
    if isinstance(error, TimeoutError):
        return "Give it more time, or look at the network."
    return "The service or the network failed; look at AWS_ENDPOINT_URL, or try later."
