"""Translates what S3 and its client say into what the user can do."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

import obstore.exceptions as said

from tfpreempt import errors
from tfpreempt.core.threads import OutOfTimeError
from tfpreempt.storage.deadline import Deadline

_FOREIGN = (
    said.BaseError,
    FileNotFoundError,
    OutOfTimeError,
)
_METADATA = re.compile(r"169\.254\.(?:169\.254|170\.)")  # where a role's keys are had
_MARKUP = re.compile(r"[:\s]*<(?:\?xml|[A-Za-z!]).*", re.DOTALL)

_CREDENTIALS = (
    "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_ENDPOINT_URL, where it "
    "is not Amazon's), or run with an instance role; ~/.aws is not read."
)


@contextlib.contextmanager
def translated(
    deadline: Deadline, doing: str, uri: str, kind: type[errors.CheckpointError]
) -> Iterator[None]:
    """Turns what obstore raises in the body into our errors.

    Args:
        deadline: of the call.
        doing: what the body does, such as "upload 'x'".
        uri: of the store.
        kind: what to raise.
    """
    try:
        yield
    except _FOREIGN as error:
        why = _said(error, deadline)
        raised = kind(f"Could not {doing} in {uri}: {why} {_advice(error, uri)}")
        raised.is_permanent = _is_permanent(error)
        raise raised from error


def is_about_the_bucket(error: Exception) -> bool:
    """Whether a 404 means that the bucket is missing, not an object in it."""
    return "NoSuchBucket" in str(error)


def _is_permanent(error: BaseException) -> bool:
    """Whether only a person can mend it; one object that is missing is no error."""
    return (
        isinstance(
            error,
            said.PermissionDeniedError
            | said.UnauthenticatedError
            | said.NotFoundError
            | FileNotFoundError,
        )
        or "NoSuchBucket" in str(error)
        or _lacks_credentials(error)
    )


def _lacks_credentials(error: BaseException) -> bool:
    text = str(error)
    if "<Code>" in text:  # the service answered, so it was asked with some
        return False
    return "redential" in text or _METADATA.search(text) is not None


def _said(error: BaseException, deadline: Deadline) -> str:
    if isinstance(error, OutOfTimeError):
        return f"it was not done within {deadline.seconds or 0:g} s."
    if _lacks_credentials(error):
        return "it needs credentials, and none were found."
    code = re.search(r"<Code>(\w+)</Code>", str(error))
    first = _MARKUP.sub("", str(error).strip().partition("\n\n")[0]).rstrip(".")
    return f"{type(error).__name__}: {first[:300]}{f': {code[1]}' if code else ''}."


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
    if isinstance(error, said.UnauthenticatedError) or _lacks_credentials(error):
        return _CREDENTIALS
    if isinstance(error, OutOfTimeError):
        hint = "" if os.environ.get("AWS_ACCESS_KEY_ID") else f" {_CREDENTIALS}"
        return f"Give it more time, or look at the network.{hint}"
    return "The service or the network failed; look at AWS_ENDPOINT_URL, or try later."
