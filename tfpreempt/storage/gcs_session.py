"""A client of Google Cloud Storage whose every request knows the caller's deadline."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import google.auth
import google.auth.exceptions
from google.auth.credentials import AnonymousCredentials
from google.auth.transport.requests import AuthorizedSession
from google.cloud import storage
from google.cloud.storage.retry import DEFAULT_RETRY

from tfpreempt import errors
from tfpreempt.storage import private_random
from tfpreempt.storage.gcs_connection import TimedAdapter, current
from tfpreempt.storage.limits import REQUEST_SECONDS, Limit

_T = TypeVar("_T")
_SCOPES = ("https://www.googleapis.com/auth/devstorage.read_write",)
# The client's own first pause is a second, a good part of a notice of thirty.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0


class CredentialsMissingError(errors.TfpreemptError):
    """There are no credentials; translated before anybody sees it."""


class DeadlineSession(AuthorizedSession):
    """A session that ends a request when the time of the call that makes it is up.

    The client has calls that take no time-out, and others that make many requests with
    one; here all of them pass.
    """

    def __init__(self, credentials: Any) -> None:
        # google-auth has types for some of its functions only.
        init: Any = super().__init__
        init(credentials, refresh_timeout=REQUEST_SECONDS)
        for scheme in ("https://", "http://"):
            self.mount(scheme, TimedAdapter())

    def request(self, *args: Any, **kwargs: Any) -> Any:
        limit = current()
        seconds = REQUEST_SECONDS if limit is None else limit.request()
        kwargs["timeout"] = (seconds, seconds)
        request: Any = super().request
        return request(*args, **kwargs)


def connect(bucket: str) -> tuple[storage.Client, DeadlineSession]:
    """A client with credentials from the environment.

    No request to the bucket is made, but maybe some to the machine's metadata server.

    Args:
        bucket: for the message.

    Raises:
        CredentialsMissingError: there are no credentials.
    """
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        anonymous: Any = AnonymousCredentials
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
    private_random.give()
    session = DeadlineSession(credentials)
    client = storage.Client(
        project=project or "none", credentials=credentials, _http=session
    )
    # Newer clients ask for the bucket's metadata in a thread of their own, to adorn
    # traces; that needs a permission that writing objects doesn't.
    client._bucket_metadata_cache = None
    return client, session


def policy(limit: Limit) -> Any:
    """How often to try again what passes by itself, within what the limit leaves."""
    return DEFAULT_RETRY.with_timeout(limit.retry()).with_delay(
        initial=_FIRST_PAUSE, maximum=_LONGEST_PAUSE
    )


def persistently(act: Callable[[], _T], limit: Limit) -> _T:
    """Calls until it no longer fails with something that passes by itself."""
    result: _T = policy(limit)(act)()
    return result
