"""Sends requests to Google Cloud Storage's JSON API, and translates its errors.

google-auth adds credentials, which it finds in the environment. The code here never
uses Python's global random generator: requests are sent during training, and each use
would change the random numbers that the program gets next.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.client
import math
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

import google.auth
import requests
import urllib3
from google.auth import exceptions as auth
from google.auth.compute_engine import detect_gce_residency_linux
from google.auth.credentials import AnonymousCredentials
from google.auth.transport.requests import AuthorizedSession, Request

from tfpreempt.core.threads import CallTimeoutError
from tfpreempt.storage.bucket_store import Advice
from tfpreempt.storage.paths import check_no_user_info
from tfpreempt.storage.request_deadline import REQUEST_SECONDS, RETRY_SECONDS, Deadline

_T = TypeVar("_T")
FIRST_PAUSE = 0.2  # seconds before the first retry, on average; doubled at each retry
LONGEST_PAUSE = 10.0
_SCOPES = ("https://www.googleapis.com/auth/devstorage.read_write",)
_CONNECTIONS = 32  # connections kept open; further connections are closed after use
_TRANSIENT_STATUSES = (408, 429, 500, 502, 503, 504)
# Error codes of a token server that google-auth would retry, whatever the HTTP status.
_TOKEN_LATER = re.compile(rb"internal_failure|server_error|temporarily_unavailable")
_ADDRESS = "https://storage.googleapis.com"
_BUCKET_MISSING = re.compile(r"bucket (?:does not exist|not found)", re.IGNORECASE)
# An error of `requests` quotes the whole request; the pattern's group is the cause.
_WRAPPED = re.compile(r".*\(Caused by (.*)\)", re.DOTALL)
_jitter = random.SystemRandom()


class GcsError(Exception):
    """The service responded with an error status.

    Args:
        status: the HTTP status.
        message: description of the request, and the service's explanation.
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
    """The object exists, but the request has the condition that no object exists."""


class RangeError(GcsError):
    """The requested range begins after the end of the object."""


class TooManyRequestsError(GcsError):
    """The account sends requests faster than its quota allows."""


class ServerError(GcsError):
    """The service failed."""


class MalformedResponseError(GcsError):
    """A response with a success status is not in the form of the JSON API."""


class TokenUnavailableError(auth.GoogleAuthError):
    """The server that issues credentials failed, perhaps temporarily."""


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
# Python's errors for a value in a response that is missing or has another type.
_MALFORMED = (AttributeError, LookupError, TypeError, ValueError, RecursionError)
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
        "The bucket needs credentials, and no credentials were found: run `gcloud auth "
        "application-default login`, or run on a machine whose service account may use "
        "the bucket. Until then nothing is read from or written to the bucket.",
        is_permanent=True,
    ),
    Advice((UnauthorizedError,), _RENEW, is_permanent=True),
    Advice((auth.GoogleAuthError,), _RENEW),
    Advice(
        (TooManyRequestsError,),
        "The service received too many requests: save less often, or retry later.",
    ),
    Advice((CallTimeoutError,), "Use a longer timeout, or check the network."),
    Advice(
        (ServerError, *BROKEN),
        "The service or the network failed for {tried:.1f} s; retry later.",
    ),
    Advice(
        (MalformedResponseError,),
        "The response is not in the form of Google Cloud Storage. Check "
        "STORAGE_EMULATOR_HOST, and the proxies between this machine and the service.",
    ),
    Advice((GcsError,), "Check the service's answer and the network."),
)


class GcsClient:
    """Sends requests for one bucket; used on any thread.

    Credentials are looked up at the first request, not by the constructor. So a program
    with local commits can start while the metadata server does not respond.

    Args:
        bucket: name of the bucket.
    """

    def __init__(self, bucket: str) -> None:
        self.objects = f"/storage/v1/b/{bucket}/o"
        self.uploads = f"/upload{self.objects}"
        self._address = _ADDRESS

    def object_path(self, key: str) -> str:
        """Returns the URL path of an object in the JSON API."""
        return f"{self.objects}/{quote(key, safe='')}"

    def call(
        self, method: str, path: str, deadline: Deadline, **options: Any
    ) -> dict[str, Any]:
        """Sends a request, and retries after a transient failure.

        Args:
            method: HTTP method.
            path: path below the service's address.
            deadline: deadline of the caller, which limits the retries.
            **options: keyword arguments of `requests.request`.

        Returns:
            The JSON object in the response; empty for DELETE.

        Raises:
            GcsError: the service refuses the request, or failed in every attempt; or
                the response is no JSON object.
            google.auth.exceptions.GoogleAuthError: there are no valid credentials.
            Exception: one of `BROKEN`; the connection failed in every attempt.
        """

        def act() -> dict[str, Any]:
            answer = self.request(method, path, **options)
            return {} if method == "DELETE" else json_of(answer)

        return Retry(deadline).run(act)

    def request(
        self,
        method: str,
        path: str,
        *,
        statuses: Sequence[int] = (200, 201, 204),
        **options: Any,
    ) -> requests.Response:
        """Sends one request, without a retry; returns the response.

        Raises the errors of `call`.

        Args:
            method: HTTP method.
            path: path below the service's address, or a URL that the service sent.
            statuses: HTTP statuses that mean success; any other status is an error.
            **options: keyword arguments of `requests.request`.
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
    """Sends google-auth's requests for credentials, without retries.

    google-auth retries after some failures, with pauses drawn from Python's global
    random generator. Such a failure becomes TokenUnavailableError here, which
    google-auth does not retry. `Retry` then repeats the whole request.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Sends a request for credentials; returns google-auth's response object.

        Raises:
            TokenUnavailableError: the request failed, perhaps temporarily.
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
    """Returns the credentials from the environment or the machine.

    Raises:
        google.auth.exceptions.DefaultCredentialsError: there are no credentials.
        TokenUnavailableError: the metadata server of this machine does not respond.
    """
    try:
        return google.auth.default(scopes=_SCOPES, request=TokenRequest())[0]
    except TokenUnavailableError as error:
        if detect_gce_residency_linux():
            raise
        raise auth.DefaultCredentialsError(str(error)) from error


class Retry:
    """Repeats a request after transient failures, with growing pauses.

    Gives up before the caller's deadline, so that the caller gets the error of the last
    request, and not only a timeout. The length of a pause is random, but does not come
    from Python's global random generator.

    Args:
        deadline: deadline of the caller.
    """

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self.restart()

    def restart(self) -> None:
        """Gives the request the full timeout again, and pauses of the initial length.

        Called after the request has made progress.
        """
        self.seconds = min(0.9 * self._deadline.left(math.inf), RETRY_SECONDS)
        self._gives_up_at = time.monotonic() + self.seconds
        self._longest_pause = 2 * FIRST_PAUSE

    def run(self, act: Callable[[], _T]) -> _T:
        """Calls `act` until a call succeeds; returns the result of `act`.

        Raises the last error of `act` if the time is over, or if the error is not
        transient.
        """
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
    """Returns whether a retry of the request may succeed."""
    if isinstance(error, GcsError):
        return error.status in _TRANSIENT_STATUSES
    # A ValueError means a malformed URL or response, which a retry does not change.
    is_broken = isinstance(error, BROKEN) and not isinstance(error, ValueError)
    return is_broken or isinstance(error, TokenUnavailableError)


def cause(error: Exception) -> Exception:
    """Returns the original error inside an error of `requests`.

    The message of `requests` quotes the whole request. An error without an original
    error inside is returned unchanged.
    """
    if isinstance(error, BROKEN) and (found := _WRAPPED.match(str(error))):
        return ConnectionError(found[1])
    return error


@contextlib.contextmanager
def parsing() -> Iterator[None]:
    """Context in whose body the values of a response are read.

    Raises:
        MalformedResponseError: a value is missing or has another type than expected.
    """
    try:
        yield
    except _MALFORMED as error:
        text = f"{type(error).__name__}: {error}"
        raise MalformedResponseError(200, text) from error


def json_of(answer: requests.Response) -> dict[str, Any]:
    """Returns the JSON object in a response.

    Raises:
        MalformedResponseError: the response is no JSON object.
    """
    with parsing():
        found = answer.json()
        if not isinstance(found, dict):
            raise TypeError(f"{answer.url} sent {answer.text[:40]!r}, no JSON object")
        return found


def strings(found: Iterable[Any]) -> list[str]:
    """Returns strings of a response as a list, after a check that each is a string.

    Raises:
        TypeError: a value is not a string.
    """
    checked = list(found)
    if wrong := [each for each in checked if not isinstance(each, str)]:
        raise TypeError(f"{wrong[0]!r} is no name of an object")
    return checked


def encoded(crc32c: int) -> str:
    """Encodes a checksum in the form that the service writes: base64 of 4 big-endian
    bytes."""
    return base64.b64encode(crc32c.to_bytes(4, "big")).decode()


def decoded(crc32c: str) -> int:
    """Decodes a checksum in the form that the service writes; the inverse of
    `encoded`."""
    return int.from_bytes(base64.b64decode(crc32c), "big")


def _error_of(method: str, url: str, answer: requests.Response) -> GcsError:
    """Returns the exception for a response with an error status."""
    status = answer.status_code
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = answer.text
    kind = _KINDS.get(status, ServerError if status >= 500 else GcsError)
    if status == 404 and _BUCKET_MISSING.search(message):
        kind = BucketNotFoundError
    return kind(status, f"{status} {method} {url}: {message[:200]}")
