"""Requests to a metadata server: bounded in time and size, sent nowhere else.

No proxy, no redirect, no credentials of the user's, plain http to one host. The
time-outs of `http.client` hold for one read of a socket each, and a server that sends a
byte now and then is never late; so the limits are set where all bytes pass, at the
socket: head, body, chunk sizes and trailers count alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import email.utils
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from tfpreempt import errors

# The address of all clouds' servers, and of Google's name for it: looking up a name has
# no time limit, and fails where a container has a resolver of its own.
DEFAULT_URL = "http://169.254.169.254"

REQUEST_SECONDS = 5.0
CONNECT_SECONDS = 2.0
HEAD_BYTES = 64 * 1024
BODY_BYTES = 256 * 1024

_TOO_LONG = "its answer is longer than any that is expected"
_TOO_LATE = "its answer was not complete in time"
_CUT_SHORT = "the connection was closed in the middle of the answer"


class SessionClosedError(errors.NoticeError):
    """A request was cut off, or never made, because its session was closed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back, whatever its status.

    Attributes:
        url: what was asked for, without the query.
        status: the HTTP status.
        headers: by lower-case names.
        body: as sent, not decoded.
    """

    url: str
    status: int
    headers: Mapping[str, str]
    body: bytes

    def text(self) -> str:
        """The body as text without white space around it."""
        return self.body.decode("utf-8", errors="replace").strip()

    def json(self) -> object:
        """The body as JSON.

        Raises:
            NoticeError: it is not.
        """
        try:
            value: object = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise self.refused(
                "JSON; something else than the metadata server listens there, or a "
                "proxy changed it"
            ) from error
        return value

    def fields(self, expected: str) -> dict[str, object]:
        """The body as an object of JSON.

        Raises:
            NoticeError: it is none; it says that `expected` was.
        """
        value = self.json()
        if not isinstance(value, dict):
            raise self.refused(expected)
        return value

    def refused(self, expected: str) -> errors.NoticeError:
        """An error: this came, and what was expected is something else."""
        said = repr(printable(self.text()))
        return errors.NoticeError(
            f"{self.url} answered {said} with status {self.status}, expected "
            f"{expected}",
            said=said,
        )


class MetadataSession:
    """Requests to one server, each over a connection of its own.

    One thread makes the requests; any thread may close.

    Args:
        base_url: as `checked_base_url()` returns it.
    """

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self._lock = threading.Lock()
        self._is_closed = False
        self._current: _BoundedSocket | None = None

    def request(
        self,
        target: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        seconds: float = REQUEST_SECONDS,
        body_bytes: int = BODY_BYTES,
    ) -> Answer:
        """Asks and reads the whole answer.

        Args:
            target: path and query, from "/" on.
            method: GET, PUT or POST.
            headers: sent with it.
            body: sent with it.
            seconds: from the request to the last byte of the answer.
            body_bytes: the longest body that is read.

        Returns:
            The answer, also of an unwanted status and of a redirect.

        Raises:
            SessionClosedError: the session is closed, or was closed meanwhile.
            NoticeError: there is no complete answer within the limits.
        """
        connection = http.client.HTTPConnection(self.base_url.removeprefix("http://"))
        url = f"{self.base_url}{target.partition('?')[0]}"
        try:
            self._check_open()
            sock = connection.sock = _BoundedSocket(
                (connection.host, connection.port), seconds, HEAD_BYTES + body_bytes
            )
            with self._lock:
                self._current = sock
            self._check_open()
            connection.request(method, target, body, dict(headers or {}))
            with connection.getresponse() as response:
                content = response.read(body_bytes + 1)
            self._check_open()  # a cut is the end of an answer without a length
            if len(content) > body_bytes:
                raise ConnectionAbortedError(_TOO_LONG)
            if response.length:
                raise ConnectionAbortedError(_CUT_SHORT)
        except (http.client.HTTPException, OSError, ValueError) as error:
            self._check_open()
            raise errors.NoticeError(f"{method} {url}: {_reason(error)}") from error
        finally:
            connection.close()
        return Answer(
            url=url,
            status=response.status,
            headers={name.lower(): text for name, text in response.headers.items()},
            body=content,
        )

    def close(self) -> None:
        """Ends a request that waits, and refuses the next. Any thread, idempotent."""
        with self._lock:
            self._is_closed = True
            if self._current is not None:
                # It wakes who reads, as close() would not. The other side may have been
                # first, or the request be over.
                with contextlib.suppress(OSError):
                    self._current.shutdown(socket.SHUT_RDWR)

    def _check_open(self) -> None:
        if self._is_closed:
            raise SessionClosedError(
                f"a request to {self.base_url} after its session was closed; make a "
                "new one"
            )


class _BoundedSocket(socket.socket):
    """A connection that reads for so long and so much, head and body together.

    Args:
        address: whom to connect to.
        seconds: from now to the last byte.
        most_bytes: the most that are read.
    """

    def __init__(
        self, address: tuple[str, int], seconds: float, most_bytes: int
    ) -> None:
        self._until = time.monotonic() + seconds
        self._bytes_left = most_bytes
        connect_seconds = min(seconds, CONNECT_SECONDS)
        plain = socket.create_connection(address, connect_seconds)
        super().__init__(fileno=plain.detach())
        self.settimeout(connect_seconds)

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Reads as any socket, until the time or the bytes are used up."""
        left = self._until - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            self.settimeout(left)
            count = super().recv_into(buffer, nbytes, flags)
        except TimeoutError as error:
            raise ConnectionAbortedError(_TOO_LATE) from error
        self._bytes_left -= count
        if self._bytes_left < 0:
            raise ConnectionAbortedError(_TOO_LONG)
        return count


def checked_base_url(text: str, origin: str) -> str:
    """A server's address as "http://host[:port]".

    Args:
        text: host, host:port or http://host:port.
        origin: where it comes from, for the message, such as a variable's name.

    Raises:
        ConfigurationError: it is none of these.
    """
    host = text.lower().removeprefix("http://").rstrip("/")
    try:
        parts = urlsplit(f"http://{host}")
        is_host = parts.netloc == host and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_host = False
    if not is_host or "@" in host or " " in host or not host.isprintable():
        raise errors.ConfigurationError(
            f"{origin}={text!r}: expected the host of a metadata server, such as "
            "'169.254.169.254' or 'localhost:8080'; it is only asked by plain http, "
            "without user names and paths"
        )
    return f"http://{host}"


def url_from(
    variables: Sequence[str],
    environment: Mapping[str, str],
    default: str = DEFAULT_URL,
) -> str:
    """A server's address as the first of some variables that is set names it.

    Args:
        variables: their names.
        environment: to read them from.
        default: where none is set.

    Raises:
        ConfigurationError: the variable holds no host.
    """
    for name in variables:
        text = environment.get(name, "").strip()
        if text:
            return checked_base_url(text, name)
    return default


def printable(text: str, limit: int = 200) -> str:
    """What a server said, fit for a log: at most `limit` printable characters."""
    cut = text[:limit]
    return "".join(char if char.isprintable() else "?" for char in cut)


def epoch_seconds(text: object) -> float | None:
    """Seconds since the Unix epoch of a time in RFC 3339 or RFC 1123; None if none.

    A time without a zone is one of UTC.
    """
    if not isinstance(text, str):
        return None
    for parse in (_from_rfc_3339, email.utils.parsedate_to_datetime):
        try:
            when = parse(text)
        except ValueError:
            continue
        if when.tzinfo is None:
            when = when.replace(tzinfo=datetime.timezone.utc)
        return when.timestamp()
    return None


def _from_rfc_3339(text: str) -> datetime.datetime:
    """`fromisoformat`; Python 3.10's knows no "Z", and 3 or 6 digits of a fraction."""
    with_micros = re.sub(r"\.(\d+)", lambda found: f".{found[1][:6]:0<6}", text)
    return datetime.datetime.fromisoformat(re.sub("[Zz]$", "+00:00", with_micros))


def readable(seconds: float) -> str:
    """A time in seconds since the Unix epoch, in UTC, as in RFC 3339."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _reason(error: BaseException) -> str:
    """Why there is no answer, without what differs each time: addresses, numbers."""
    if isinstance(error, TimeoutError):
        return "no connection in time"
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return "the connection was closed without an answer"
    if isinstance(error, http.client.IncompleteRead):
        return _CUT_SHORT
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return type(error).__name__
