"""Requests to Google Cloud Storage's JSON API, and the meaning of their errors.

The session of google-auth adds credentials, which come from the environment. Nothing
here draws from Python's global random generator: requests run beside training, and a
draw would give the next step other numbers than the uninterrupted run has.
"""

from __future__ import annotations

import base64
import functools
import http.client
import math
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

import google.auth
import requests
import urllib3
from google.auth import exceptions as auth
from google.auth.compute_engine import detect_gce_residency_linux
from google.auth.credentials import AnonymousCredentials
from google.auth.transport.requests import AuthorizedSession, Request

from tfpreempt.core.threads import OutOfTimeError
from tfpreempt.storage.bucket import Advice
from tfpreempt.storage.deadline import REQUEST_SECONDS, RETRY_SECONDS, Deadline
from tfpreempt.storage.paths import check_no_user_info

_T = TypeVar("_T")
FIRST_PAUSE = 0.2  # seconds before the first retry, on average; doubles
LONGEST_PAUSE = 10.0
_SCOPES = ("https://www.googleapis.com/auth/devstorage.read_write",)
_CONNECTIONS = 32  # more threads than this make connections that are not kept
_TRANSIENT_STATUSES = (408, 429, 500, 502, 503, 504)
# Errors of a token server that google-auth would retry, whatever their status.
_TOKEN_LATER = re.compile(rb"internal_failure|server_error|temporarily_unavailable")
_ADDRESS = "https://storage.googleapis.com"
_BUCKET_MISSING = re.compile(r"bucket (?:does not exist|not found)", re.IGNORECASE)
_WRAPPED = re.compile(r".*\(Caused by (.*)\)", re.DOTALL)  # quotes the whole request
_jitter = random.SystemRandom()


class GcsError(Exception):
    """The service answered with an error status.

    Args:
        status: the status.
        message: what was requested, and the service's explanation.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class UnauthorizedError(GcsError):
    """The credentials are missing or no longer valid."""


class ForbiddenError(GcsError):
    """The account lacks a permission."""


class BucketNotFoundError(GcsError):
    """There is no such bucket."""


class NotFoundError(GcsError):
    """There is no such object, or no such upload."""


class PreconditionFailedError(GcsError):
    """An object of this name exists."""


class RangeError(GcsError):
    """The object has none of the requested bytes."""


class TooManyRequestsError(GcsError):
    """The account makes requests faster than its quota allows."""


class ServerError(GcsError):
    """The service failed."""


class TokenUnavailableError(auth.GoogleAuthError):
    """The server that issues credentials failed in a way that may pass by itself."""


_KINDS: dict[int, type[GcsError]] = {
    401: UnauthorizedError,
    403: ForbiddenError,
    404: NotFoundError,
    410: NotFoundError,
    412: PreconditionFailedError,
    416: RangeError,
    429: TooManyRequestsError,
}
BROKEN = (
    requests.RequestException,
    urllib3.exceptions.HTTPError,
    http.client.HTTPException,
    ConnectionError,
)
_RENEW = (
    "Renew the credentials (`gcloud auth application-default login`), or check the "
    "machine's service account and its access scopes."
)
ADVICE = (
    Advice(
        (BucketNotFoundError, NotFoundError),
        "Create the bucket (`gcloud storage buckets create gs://{bucket}`) or correct "
        "its name.",
        is_permanent=True,
    ),
    Advice(
        (ForbiddenError,),
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
    Advice((UnauthorizedError,), _RENEW, is_permanent=True),
    Advice((auth.GoogleAuthError,), _RENEW),
    Advice(
        (TooManyRequestsError,),
        "The service asks for fewer requests: save less often, or try later.",
    ),
    Advice((OutOfTimeError,), "Give it more time, or look at the network."),
    Advice(
        (ServerError, *BROKEN),
        "The service or the network failed for {tried:.1f} s; try again.",
    ),
    Advice((GcsError,), "Look at the service's answer and at the network."),
)


class GcsClient:
    """The requests of one bucket. Any thread.

    The first request looks for credentials; a metadata server that is away for a moment
    must not keep a program with local commits from its start.

    Args:
        bucket: name of the bucket.
    """

    def __init__(self, bucket: str) -> None:
        self.objects = f"/storage/v1/b/{bucket}/o"
        self.uploads = f"/upload{self.objects}"
        self._address = _ADDRESS

    def object_path(self, key: str) -> str:
        """The path of an object's resource."""
        return f"{self.objects}/{quote(key, safe='')}"

    def call(
        self, method: str, path: str, deadline: Deadline, **options: Any
    ) -> dict[str, Any]:
        """Makes a request, and retries it after a transient failure.

        Args:
            method: of HTTP.
            path: below the service's address.
            deadline: limits the retries.
            **options: as `requests.request` takes them.

        Returns:
            The answer's JSON object; empty after DELETE.

        Raises:
            GcsError: the service refuses, or fails for too long.
            google.auth.exceptions.GoogleAuthError: there are no valid credentials.
            Exception: one of `BROKEN`; the connection failed for too long.
        """

        def act() -> dict[str, Any]:
            answer = self.request(method, path, **options)
            found: dict[str, Any] = {} if method == "DELETE" else answer.json()
            return found

        return Retry(deadline).run(act)

    def request(
        self,
        method: str,
        path: str,
        *,
        statuses: Sequence[int] = (200, 201, 204),
        **options: Any,
    ) -> requests.Response:
        """Makes one request, without a retry; raises as `call`.

        Args:
            method: of HTTP.
            path: below the service's address, or a URL that the service gave.
            statuses: all others are errors.
            **options: as `requests.request` takes them.
        """
        session = self._session
        url = f"{self._address}{path}" if path.startswith("/") else path
        answer: requests.Response = session.request(
            method, url, timeout=REQUEST_SECONDS, **options
        )
        if answer.status_code not in statuses:
            raise _error_of(method, url, answer)
        return answer

    @functools.cached_property
    def _session(self) -> Any:
        if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
            check_no_user_info(emulator, "STORAGE_EMULATOR_HOST")
        credentials = AnonymousCredentials() if emulator else find_credentials()
        session = AuthorizedSession(
            credentials, refresh_timeout=REQUEST_SECONDS, auth_request=TokenRequest()
        )
        adapter = requests.adapters.HTTPAdapter(pool_maxsize=_CONNECTIONS)
        for scheme in ("https://", "http://"):
            session.mount(scheme, adapter)
        self._address = emulator or _ADDRESS
        return session


class TokenRequest(Request):
    """Makes google-auth's requests for credentials, each of them once.

    google-auth retries some of them, and draws the pauses from Python's global random
    generator. What it would retry becomes an error that it passes on, so that `Retry`
    repeats the whole request.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Makes a request.

        Raises:
            TokenUnavailableError: it failed in a way that may pass by itself.
        """
        try:
            answer = super().__call__(*args, **kwargs)
        except auth.TransportError as error:
            raise TokenUnavailableError(str(error)) from error
        if answer.status in _TRANSIENT_STATUSES or (
            answer.status != 200 and _TOKEN_LATER.search(answer.data)
        ):
            raise TokenUnavailableError(f"the token server answered {answer.status}")
        return answer


def find_credentials() -> Any:
    """The credentials of the environment, or of the machine.

    Raises:
        google.auth.exceptions.DefaultCredentialsError: there are none.
        TokenUnavailableError: this machine's metadata server does not answer.
    """
    try:
        return google.auth.default(scopes=_SCOPES, request=TokenRequest())[0]
    except TokenUnavailableError as error:
        if detect_gce_residency_linux():
            raise
        raise auth.DefaultCredentialsError(str(error)) from error


class Retry:
    """Repeats a request after transient failures, with pauses that grow.

    Gives up before the deadline of its caller, who could say that time is up, but not
    why. No draw is made from Python's global random generator.

    Args:
        deadline: of the caller.
    """

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self.restart()

    def restart(self) -> None:
        """Forgets the earlier failures; called when a request has made progress."""
        self.seconds = min(0.9 * self._deadline.left(math.inf), RETRY_SECONDS)
        self._gives_up_at = time.monotonic() + self.seconds
        self._longest_pause = 2 * FIRST_PAUSE

    def run(self, act: Callable[[], _T]) -> _T:
        """Returns what `act` returns; raises what it raised last."""
        while True:
            try:
                return act()
            except Exception as error:
                pause = _jitter.uniform(0.0, self._longest_pause)
                is_over = time.monotonic() + pause > self._gives_up_at
                if is_over or not _is_transient(error):
                    raise
            time.sleep(pause)
            self._longest_pause = min(2 * self._longest_pause, LONGEST_PAUSE)


def _is_transient(error: Exception) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(error, GcsError):
        return error.status in _TRANSIENT_STATUSES
    # A ValueError is of an address, or of an answer, that will be the same next time.
    is_broken = isinstance(error, BROKEN) and not isinstance(error, ValueError)
    return is_broken or isinstance(error, TokenUnavailableError)


def cause(error: Exception) -> Exception:
    """The fault itself, without the request that `requests` quotes around it."""
    if isinstance(error, BROKEN) and (found := _WRAPPED.match(str(error))):
        return ConnectionError(found[1])
    return error


def encoded(crc32c: int) -> str:
    """A checksum as the service writes it: base64 of four bytes, big end first."""
    return base64.b64encode(crc32c.to_bytes(4, "big")).decode()


def decoded(crc32c: str) -> int:
    """The inverse of `encoded`."""
    return int.from_bytes(base64.b64decode(crc32c), "big")


def _error_of(method: str, url: str, answer: requests.Response) -> GcsError:
    """The error that an answer of an error status stands for."""
    status = answer.status_code
    try:
        said = str(answer.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        said = answer.text
    kind = _KINDS.get(status, ServerError if status >= 500 else GcsError)
    if status == 404 and _BUCKET_MISSING.search(said):
        kind = BucketNotFoundError
    return kind(status, f"{status} {method} {url}: {said[:200]}")
