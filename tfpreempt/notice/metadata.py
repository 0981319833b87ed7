"""Requests to a metadata server: bounded in time and size, sent nowhere else.

No proxy, no redirect, no credentials of the user's, plain http to one host. The
time-outs of `http.client` hold for one read of a socket each, and a server that sends a
byte now and then is never late; so the limits are set where all bytes pass, at the
socket: head, body, chunk sizes and trailers count alike.
"""

from __future__ import annotations

import dataclasses
import datetime
import email.utils
import http.client
import json
import os
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
        status: the HTTP status.
        headers: by lower-case names.
        body: as sent, not decoded.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes

    def text(self) -> str:
        """The body as text without white space around it."""
        return self.body.decode("utf-8", errors="replace").strip()

    def json(self, url: str) -> object:
        """The body as JSON.

        Raises:
            NoticeError: it is not.
        """
        try:
            value: object = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            said = repr(printable(self.text()))
            raise errors.NoticeError(
                f"{url} answered {said}, expected JSON; something else than the "
                "metadata server listens there, or a proxy changed it",
                said=said,
            ) from error
        return value


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
        self._current: _Connection | None = None

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
        connection = _Connection(self.base_url, seconds, HEAD_BYTES + body_bytes)
        with self._lock:
            if self._is_closed:
                raise self._closed()
            self._current = connection
        try:
            connection.request(method, target, body, dict(headers or {}))
            with connection.getresponse() as response:
                content = response.read(body_bytes + 1)
            if self._is_closed:  # which is the end of an answer without a length
                raise self._closed()
            if len(content) > body_bytes:
                raise ConnectionAbortedError(_TOO_LONG)
            if response.length:
                raise ConnectionAbortedError(_CUT_SHORT)
        except (http.client.HTTPException, OSError, ValueError) as error:
            if self._is_closed:
                raise self._closed() from error
            why = connection.verdict or _reason(error)
            url = f"{self.base_url}{target.partition('?')[0]}"
            raise errors.NoticeError(f"{method} {url}: {why}") from error
        finally:
            connection.close()
        return Answer(
            status=response.status,
            headers={name.lower(): text for name, text in response.headers.items()},
            body=content,
        )

    def close(self) -> None:
        """Ends a request that waits, and refuses the next. Any thread, idempotent."""
        with self._lock:
            self._is_closed = True
            connection = self._current
        if connection is not None:
            connection.cut()

    def _closed(self) -> SessionClosedError:
        return SessionClosedError(
            f"a request to {self.base_url} after its session was closed; make a new one"
        )


class _Connection(http.client.HTTPConnection):
    """A connection for one request, within a budget.

    Args:
        base_url: whom to ask.
        seconds: until the last byte of the answer.
        most_bytes: of the answer, head and body together.

    Attributes:
        verdict: why the answer was cut off; "" if it was not.
    """

    def __init__(self, base_url: str, seconds: float, most_bytes: int) -> None:
        parts = urlsplit(base_url)
        assert parts.hostname is not None  # checked_base_url() has seen to it
        # Without a port the end of an IPv6 address is taken for one.
        super().__init__(
            parts.hostname, parts.port or 80, timeout=min(seconds, CONNECT_SECONDS)
        )
        self.verdict = ""
        self._until = time.monotonic() + seconds
        self._bytes_left = most_bytes
        self._lock = threading.Lock()
        self._is_cut = False
        # Not `sock`, which is let go of before an answer without a length is read.
        self._bounded: _BoundedSocket | None = None

    def connect(self) -> None:
        super().connect()
        bounded = self.sock = _BoundedSocket(self.sock, self)
        with self._lock:
            self._bounded = bounded
            if self._is_cut:
                raise ConnectionAbortedError("the session was closed")

    def cut(self) -> None:
        """Ends the request, which may wait for an answer, at once. Any thread."""
        with self._lock:
            self._is_cut = True
            if self._bounded is not None:
                try:
                    # It wakes who reads; close() would not.
                    self._bounded.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # the other side was first, or the request is over

    def remaining_seconds(self) -> float:
        """The seconds that are left, more than 0.

        Raises:
            TimeoutError: none are.
        """
        remaining = self._until - time.monotonic()
        if remaining <= 0:
            self.verdict = _TOO_LATE
            raise TimeoutError(self.verdict)
        return remaining

    def spend(self, count: int) -> None:
        """So many bytes have come.

        Raises:
            ConnectionAbortedError: more than an answer may have.
        """
        self._bytes_left -= count
        if self._bytes_left < 0:
            self.verdict = _TOO_LONG
            raise ConnectionAbortedError(self.verdict)


class _BoundedSocket(socket.socket):
    """A socket that reads within a connection's budget."""

    def __init__(self, plain: socket.socket, budget: _Connection) -> None:
        family, kind, protocol = plain.family, plain.type, plain.proto
        super().__init__(family, kind, protocol, fileno=plain.detach())
        self.settimeout(budget.remaining_seconds())
        self._budget = budget

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Reads as any socket, until the time or the bytes are used up."""
        self.settimeout(self._budget.remaining_seconds())
        try:
            count = super().recv_into(buffer, nbytes, flags)
        except TimeoutError:
            self._budget.verdict = _TOO_LATE
            raise
        self._budget.spend(count)
        return count


def checked_base_url(text: str, origin: str) -> str:
    """A server's address as "http://host[:port]".

    Args:
        text: host, host:port or http://host:port.
        origin: where it comes from, for the message, such as a variable's name.

    Raises:
        ConfigurationError: it is none of these.
    """
    with_scheme = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(with_scheme)
        host, port = parts.hostname, parts.port
        is_plain = (parts.scheme, parts.path.strip("/")) == ("http", "")
    except ValueError:
        host, port, is_plain = None, None, False
    extra = "" if host is None else parts.query + parts.fragment
    is_word = text.isprintable() and " " not in text
    if not host or not is_plain or extra or "@" in text or not is_word:
        raise errors.ConfigurationError(
            f"{origin}={text!r}: expected the host of a metadata server, such as "
            "'169.254.169.254' or 'localhost:8080'; it is only asked by plain http, "
            "without user names and paths"
        )
    host = f"[{host}]" if ":" in host else host
    return f"http://{host}" if port is None else f"http://{host}:{port}"


def url_from(
    variables: Sequence[str],
    environment: Mapping[str, str] | None,
    default: str = DEFAULT_URL,
) -> str:
    """A server's address as the first of some variables that is set names it.

    Args:
        variables: their names.
        environment: to read them from; None: the process's.
        default: where none is set.

    Raises:
        ConfigurationError: the variable holds no host.
    """
    environment = os.environ if environment is None else environment
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
    try:
        when = datetime.datetime.fromisoformat(text)
    except ValueError:
        try:
            when = email.utils.parsedate_to_datetime(text)
        except ValueError:
            return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=datetime.UTC)
    return when.timestamp()


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
