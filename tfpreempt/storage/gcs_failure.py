"""Translates what Google Cloud Storage and its client say into what the user can do."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from typing import Any

import google.auth.exceptions
import requests
import urllib3
from google.api_core import exceptions as api
from google.cloud.storage.exceptions import InvalidResponse

from tfpreempt import errors
from tfpreempt.core.threads import OutOfTimeError
from tfpreempt.storage.deadline import Deadline
from tfpreempt.storage.gcs_client import CredentialsMissingError

_FOREIGN = (
    api.GoogleAPIError,
    google.auth.exceptions.GoogleAuthError,
    requests.RequestException,
    urllib3.exceptions.HTTPError,
    ConnectionError,
    OutOfTimeError,
    CredentialsMissingError,
)

# Only a person mends these: the bucket is not there, the account may not.
_PERMANENT = (
    api.NotFound,
    api.Forbidden,
    api.Unauthorized,
    CredentialsMissingError,
)
_BUCKET_MISSING = re.compile(r"bucket (?:does not exist|not found)", re.IGNORECASE)


@contextlib.contextmanager
def translated(
    deadline: Deadline,
    doing: str,
    uri: str,
    kind: type[errors.CheckpointError],
) -> Iterator[None]:
    """Turns what the client raises in the body into our errors.

    Args:
        deadline: of the call.
        doing: what the body does, such as "upload 'x'".
        uri: of the store.
        kind: what to raise.
    """
    began = time.monotonic()
    try:
        yield
    except _FOREIGN as error:
        cause, tried = _cause(error), time.monotonic() - began
        raised = kind(
            f"Could not {doing} in {uri}: {_said(cause, deadline)} "
            f"{_advice(cause, uri, tried)}"
        )
        raised.is_permanent = isinstance(cause, _PERMANENT)
        raise raised from error


def is_about_the_bucket(error: Exception) -> bool:
    """Whether a 404 means that the bucket is missing, not an object in it."""
    return _BUCKET_MISSING.search(str(error)) is not None


def refusal(answer: requests.Response) -> Exception:
    """What the client would raise for an answer."""
    translate: Any = api.from_http_response
    error: Exception = translate(answer)
    return error


def _cause(error: BaseException) -> BaseException:
    """What went wrong, however the client has wrapped it."""
    if isinstance(error, api.RetryError) and error.cause is not None:
        error = error.cause
    if isinstance(error, InvalidResponse):
        return refusal(error.response)
    return error


def _root(error: BaseException) -> BaseException:
    """The one that names what did not answer; its wrappers quote the whole request."""
    inner = error.args[0] if error.args else None
    if isinstance(error, requests.ConnectionError | urllib3.exceptions.ProtocolError):
        return _root(inner) if isinstance(inner, Exception) else error
    if isinstance(error, urllib3.exceptions.MaxRetryError) and error.reason is not None:
        return _root(error.reason)
    return error


def _said(error: BaseException, deadline: Deadline) -> str:
    if isinstance(
        error, OutOfTimeError | requests.Timeout | urllib3.exceptions.TimeoutError
    ):
        limit = deadline.seconds
        waited = "in time" if limit is None else f"within {limit:g} s"
        return f"it was not done {waited} ({error})."
    if isinstance(error, CredentialsMissingError):
        return str(error)
    error = _root(error)
    text = str(error).strip().rstrip(".")
    return f"{type(error).__name__}: {text[:300]}."


def _advice(error: BaseException, uri: str, tried: float) -> str:
    bucket = uri.removeprefix("gs://").partition("/")[0]
    if isinstance(error, api.NotFound):
        return (
            f"Create the bucket (`gcloud storage buckets create gs://{bucket}`) or "
            "correct its name."
        )
    if isinstance(error, api.Forbidden):
        return (
            f"Give this account the role roles/storage.objectUser on gs://{bucket}; "
            "reading alone needs roles/storage.objectViewer."
        )
    if isinstance(error, CredentialsMissingError):
        return "Until then nothing is read or written there."
    if isinstance(error, api.Unauthorized | google.auth.exceptions.GoogleAuthError):
        return (
            "Renew the credentials (`gcloud auth application-default login`), or check "
            "the machine's service account and its access scopes."
        )
    if isinstance(error, api.TooManyRequests):
        return "The service asks for fewer requests: save less often, or try later."
    if isinstance(error, api.ServerError | requests.RequestException | ConnectionError):
        return f"The service or the network failed for {tried:.1f} s; try again."
    if isinstance(error, OutOfTimeError | requests.Timeout):
        return "Give it more time, or look at the network."
    return "Look at the service's answer and at the network."
