"""A client of Google Cloud Storage, and what its errors mean.

Credentials come from the environment.
"""

from __future__ import annotations

import base64
import http.client
import math
import os
import random
import re
import sys
from typing import Any

import google.auth
import requests
import urllib3
from google.api_core import exceptions as api
from google.auth import exceptions as auth
from google.auth.credentials import AnonymousCredentials
from google.auth.transport.requests import AuthorizedSession
from google.cloud import storage
from google.cloud.storage.exceptions import InvalidResponse
from google.cloud.storage.retry import DEFAULT_RETRY

from tfpreempt.core.threads import OutOfTimeError
from tfpreempt.storage.bucket import Advice
from tfpreempt.storage.deadline import REQUEST_SECONDS, RETRY_SECONDS, Deadline
from tfpreempt.storage.paths import check_no_user_info

# The client's own first pause is a second, a good part of a notice of thirty.
_RETRY = DEFAULT_RETRY.with_delay(initial=0.2, maximum=10.0)
_SCOPES = ("https://www.googleapis.com/auth/devstorage.read_write",)
_CONNECTIONS = 32  # more threads than this make connections that are not kept
_DRAWING = (
    "google.api_core.retry.retry_base",
    "google.auth._exponential_backoff",
    "google.cloud.storage._media._helpers",
    "google.cloud.storage._media._upload",
    "google.resumable_media._helpers",
    "google.resumable_media._upload",
    "urllib3.util.retry",
)

BROKEN = (
    requests.RequestException,
    urllib3.exceptions.HTTPError,
    http.client.HTTPException,
    ConnectionError,
)
_BUCKET_MISSING = re.compile(r"bucket (?:does not exist|not found)", re.IGNORECASE)
_WRAPPED = re.compile(r".*\(Caused by (.*)\)", re.DOTALL)  # quotes the whole request
_RENEW = (
    "Renew the credentials (`gcloud auth application-default login`), or check the "
    "machine's service account and its access scopes."
)
ADVICE = (
    Advice(
        (api.NotFound,),
        "Create the bucket (`gcloud storage buckets create gs://{bucket}`) or correct "
        "its name.",
        is_permanent=True,
    ),
    Advice(
        (api.Forbidden,),
        "Give this account the role roles/storage.objectUser on gs://{bucket}; reading "
        "alone needs roles/storage.objectViewer.",
        is_permanent=True,
    ),
    Advice(
        (auth.DefaultCredentialsError,),
        "It needs credentials, and none were found: run `gcloud auth "
        "application-default login`, or run on a machine whose service account may use "
        "the bucket. Until then nothing is read or written there.",
        is_permanent=True,
    ),
    Advice((api.Unauthorized,), _RENEW, is_permanent=True),
    Advice((auth.GoogleAuthError,), _RENEW),
    Advice(
        (api.TooManyRequests,),
        "The service asks for fewer requests: save less often, or try later.",
    ),
    Advice((OutOfTimeError,), "Give it more time, or look at the network."),
    Advice(
        (api.ServerError, *BROKEN),
        "The service or the network failed for {tried:.1f} s; try again.",
    ),
    Advice((api.GoogleAPIError,), "Look at the service's answer and at the network."),
)


def connect() -> storage.Client:
    """A client; its `_http` is a session, which it and our own requests share.

    No request to a bucket is made, but maybe some to the machine's metadata server.

    Raises:
        google.auth.exceptions.GoogleAuthError: there are no credentials.
    """
    anonymous: Any = AnonymousCredentials  # google-auth has types for some things only
    authorized: Any = AuthorizedSession
    if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
        check_no_user_info(emulator, "STORAGE_EMULATOR_HOST")
        credentials, project = anonymous(), None
    else:
        credentials, project = google.auth.default(scopes=_SCOPES)
    _draw_apart()
    session = authorized(credentials, refresh_timeout=REQUEST_SECONDS)
    for scheme in ("https://", "http://"):
        session.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=_CONNECTIONS))
    client = storage.Client(
        project=project or "none", credentials=credentials, _http=session
    )
    # Newer clients ask for the bucket's metadata in a thread of their own, to adorn
    # traces; that needs a permission that writing objects doesn't.
    client._bucket_metadata_cache = None
    return client


def policy(deadline: Deadline) -> Any:
    """How what passes by itself is tried again.

    It gives up before the caller does, who could say that time is up, but not why.
    """
    left = deadline.left(math.inf)
    return _RETRY.with_timeout(min(0.9 * left, RETRY_SECONDS))


def is_about_the_bucket(error: Exception) -> bool:
    """Whether a 404 means that the bucket is missing, not an object in it."""
    return _BUCKET_MISSING.search(str(error)) is not None


def refusal(answer: requests.Response) -> Exception:
    """What the client would raise for an answer."""
    translate: Any = api.from_http_response
    error: Exception = translate(answer)
    return error


def decoded(crc32c: str) -> int:
    """A checksum as the service writes it: base64 of four bytes, big end first."""
    return int.from_bytes(base64.b64decode(crc32c), "big")


def cause(error: Exception) -> Exception:
    """What went wrong, however the client and its libraries have wrapped it."""
    if isinstance(error, api.RetryError) and isinstance(error.cause, Exception):
        error = error.cause
    if isinstance(error, InvalidResponse):
        return refusal(error.response)
    if isinstance(error, BROKEN) and (found := _WRAPPED.match(str(error))):
        return ConnectionError(found[1])
    return error


def _draw_apart() -> None:
    """Gives the libraries below a random generator of their own.

    They draw the pause before a request is tried again, or a boundary between parts,
    from Python's global one. Our requests run beside training, and a draw of theirs
    there would give the next step other numbers than the run without interruption has.
    """
    for name in _DRAWING:
        module = sys.modules.get(name)
        if getattr(module, "random", None) is random:
            module.random = random.Random()  # type: ignore[union-attr]  # has the name
