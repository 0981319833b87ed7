"""A client of Google Cloud Storage with credentials from the environment."""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import google.auth
import google.auth.exceptions
import requests.adapters
from google.auth.credentials import AnonymousCredentials
from google.auth.transport.requests import AuthorizedSession
from google.cloud import storage
from google.cloud.storage.retry import DEFAULT_RETRY

from tfpreempt import errors
from tfpreempt.storage.deadline import REQUEST_SECONDS, RETRY_SECONDS, Deadline

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


class CredentialsMissingError(errors.TfpreemptError):
    """There are no credentials; translated before anybody sees it."""


def connect(bucket: str) -> tuple[storage.Client, AuthorizedSession]:
    """A client, and the session that it and our own requests share.

    No request to the bucket is made, but maybe some to the machine's metadata server.

    Args:
        bucket: for the message.

    Raises:
        CredentialsMissingError: there are no credentials.
    """
    anonymous: Any = AnonymousCredentials  # google-auth has types for some things only
    authorized: Any = AuthorizedSession
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        credentials, project = anonymous(), None
    else:
        try:
            credentials, project = google.auth.default(scopes=_SCOPES)
        except google.auth.exceptions.GoogleAuthError as error:
            raise CredentialsMissingError(
                f"gs://{bucket} needs credentials, and none were found: {error} Run "
                "`gcloud auth application-default login`, or run on a machine whose "
                "service account may use the bucket."
            ) from error
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
    return client, session


def policy(deadline: Deadline) -> Any:
    """How what passes by itself is tried again; it gives up before the caller does."""
    left = deadline.left(RETRY_SECONDS)
    return _RETRY.with_timeout(min(left, RETRY_SECONDS))


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
