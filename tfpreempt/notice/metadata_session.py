"""Requests to a metadata server, with limits for time and size.

A request uses plain http, goes only to the given host (no proxy, no redirect), and
sends no credentials of the user. The timeout of a socket applies to a single read, so a
server that sends a byte now and then would never exceed the timeout. So `_Reader`
checks the time and the size for all received bytes: head, body, chunk sizes and
trailers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import email.utils
import json
import re
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from tfpreempt import errors
from tfpreempt.storage import paths

# The address of the metadata server in every cloud. Google's host name is not used,
# because a name lookup has no time limit, and fails in a container whose resolver does
# not know the name.
DEFAULT_URL = "http://169.254.169.254"

REQUEST_SECONDS = 5.0
CONNECT_SECONDS = 2.0
HEAD_BYTES = 64 * 1024
BODY_BYTES = 256 * 1024
PIECE_BYTES = 16 * 1024  # maximum of one recv()

_TOO_LONG = "the answer is longer than expected"
_TOO_LATE = "the answer was not complete in time"
_CUT_SHORT = "the connection was closed in the middle of the answer"
_NO_HTTP = "the answer is not HTTP"

_STATUS_LINE = re.compile(r"HTTP/1\.\d ([1-9]\d\d)(?: |$)", re.ASCII)
_DIGITS = {
    10: re.compile("[0-9]{1,18}"),
    16: re.compile("[0-9a-fA-F]{1,16}"),
}


class SessionClosedError(errors.NoticeError):
    """A request was interrupted, or not sent, because the session was closed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of a server, with any HTTP status.

    Attributes:
        url: requested URL, without the query.
        status: the HTTP status.
        headers: the headers, by lower-case names.
        body: the bytes of the body.
    """

    url: str
    status: int
    headers: Mapping[str, str]
    body: bytes

    def text(self) -> str:
        """Returns the body as text, without white space at both ends."""
        return self.body.decode("utf-8", errors="replace").strip()

    def json(self) -> object:
        """Returns the body, parsed as JSON.

        Raises:
            NoticeError: the body is not JSON.
        """
        try:
            value: object = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise self.refused(
                "JSON; another server listens at this address, or a proxy changed the "
                "answer"
            ) from error
        return value

    def fields(self, expected: str) -> dict[str, object]:
        """Returns the body, parsed as a JSON object.

        Args:
            expected: description of the expected object, for the error message.

        Raises:
            NoticeError: the body is not a JSON object.
        """
        value = self.json()
        if not isinstance(value, dict):
            raise self.refused(expected)
        return value

    def refused(self, expected: str) -> errors.NoticeError:
        """Returns an error with the expected answer, for the caller to raise.

        The error does not quote the actual answer, because metadata can contain
        passwords, for instance in startup scripts.

        Args:
            expected: description of the expected answer.
        """
        return errors.NoticeError(
            f"{self.url} answered with status {self.status}, expected {expected}. The "
            "answer is not shown, because metadata can hold secrets"
        )


class MetadataSession:
    """Sends requests to one server, each on a new connection.

    One thread at a time may send requests; any thread may close the session.

    Args:
        base_url: address of the server, as returned by `checked_base_url()`.
    """

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        parts = urlsplit(base_url)
        self._host = parts.netloc
        self._address = parts.hostname, parts.port or 80
        self._lock = threading.Lock()
        self._is_closed = False
        self._current: socket.socket | None = None

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
        """Sends a request and reads the whole answer.

        Args:
            target: path and query, beginning with "/".
            method: GET, PUT or POST.
            headers: additional headers of the request.
            body: body of the request.
            seconds: timeout for the complete answer.
            body_bytes: maximum size of the answer's body.

        Returns:
            The answer, with any HTTP status. Redirects are not followed.

        Raises:
            SessionClosedError: the session is closed, or was closed during the request.
            NoticeError: no complete answer arrived within the limits.
        """
        until = time.monotonic() + seconds
        url = f"{self.base_url}{target.partition('?')[0]}"
        try:
            self._check_open()
            connect_seconds = min(seconds, CONNECT_SECONDS)
            with socket.create_connection(self._address, connect_seconds) as sock:
                with self._lock:
                    self._current = sock
                self._check_open()
                sock.sendall(self._message(method, target, headers or {}, body))
                reader = _Reader(sock, until, HEAD_BYTES + body_bytes)
                status, fields = reader.read_head()
                content = reader.read_body(status, fields, body_bytes)
            # Check again: after close(), a response without Content-Length may look
            # complete.
            self._check_open()
        except (OSError, ValueError) as error:
            self._check_open()
            raise errors.NoticeError(f"{method} {url}: {_reason(error)}") from error
        return Answer(url=url, status=status, headers=fields, body=content)

    def close(self) -> None:
        """Ends a waiting request, and refuses later requests.

        Any thread may call the method, also several times.
        """
        with self._lock:
            self._is_closed = True
            if self._current is not None:
                # Use shutdown(), because close() would not wake the thread that reads.
                # Ignore an OSError: the connection has ended already.
                with contextlib.suppress(OSError):
                    self._current.shutdown(socket.SHUT_RDWR)

    def _check_open(self) -> None:
        if self._is_closed:
            raise SessionClosedError(
                f"a request to {self.base_url} was made after the session was closed; "
                "make a new session"
            )

    def _message(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes | None
    ) -> bytes:
        """Returns the bytes of the request."""
        fields = {
            "Host": self._host,
            "Accept-Encoding": "identity",
            "Connection": "close",
            **headers,
        }
        if body is not None or method != "GET":
            fields["Content-Length"] = str(len(body or b""))
        lines = [f"{method} {target} HTTP/1.1"]
        lines += [f"{name}: {text}" for name, text in fields.items()]
        head = "\r\n".join([*lines, "", ""])
        return head.encode("ascii") + (body or b"")


class _Reader:
    """Reads one answer (RFC 9112) within a time limit and a size limit.

    The size limit applies to head and body together. `http.client` is not used, because
    it limits only the single lines of a head, and most of the CPU time of a request
    each second would be spent in it.

    Args:
        sock: connection over which the request was sent.
        until: deadline for the last byte, on the monotonic clock.
        most_bytes: maximum number of bytes to read.
    """

    def __init__(self, sock: socket.socket, until: float, most_bytes: int) -> None:
        self._sock = sock
        self._until = until
        self._bytes_left = most_bytes
        self._buffer = bytearray()  # bytes that were received, but not returned yet

    def read_head(self) -> tuple[int, dict[str, str]]:
        """Returns the status, and the headers by lower-case names."""
        if not self._receive():
            raise ConnectionResetError
        while True:
            first, *lines = self._read_to(b"\r\n\r\n").decode("latin-1").split("\r\n")
            found = _STATUS_LINE.match(first)
            fields = [line.partition(":") for line in lines]
            if found is None or not all(colon for _, colon, _ in fields):
                raise ConnectionAbortedError(_NO_HTTP)
            status = int(found[1])
            if status >= 200:  # otherwise an interim answer: the final answer follows
                return status, {name.lower(): text.strip() for name, _, text in fields}

    def read_body(
        self, status: int, headers: Mapping[str, str], most_bytes: int
    ) -> bytes:
        """Returns the body. The head of the answer determines the body's length.

        Args:
            status: the HTTP status in the head.
            headers: the headers in the head.
            most_bytes: maximum size of the body.
        """
        if status in (204, 304):
            return b""
        if headers.get("transfer-encoding", "").lower() == "chunked":
            return self._read_chunks(most_bytes)
        length = headers.get("content-length")
        if length is not None:
            return self._read(_number(length, 10), most_bytes)
        while len(self._buffer) <= most_bytes and self._receive():
            pass  # the body ends with the connection
        return self._read(len(self._buffer), most_bytes)

    def _read_chunks(self, most_bytes: int) -> bytes:
        """Returns the joined chunks of a chunked body."""
        body = bytearray()
        while size := _number(self._read_line().partition(";")[0].strip(), 16):
            body += self._read(size, most_bytes - len(body))
            if self._read_line():
                raise ConnectionAbortedError(_NO_HTTP)
        while self._read_line():
            pass  # skip the trailers after the last chunk
        return bytes(body)

    def _read_line(self) -> str:
        return self._read_to(b"\r\n").decode("latin-1")

    def _read_to(self, mark: bytes) -> bytes:
        """Returns the bytes before the next occurrence of `mark`; skips the mark."""
        start = 0
        while (end := self._buffer.find(mark, start)) < 0:
            start = max(0, len(self._buffer) - len(mark) + 1)
            self._receive_more()
        found = bytes(self._buffer[:end])
        del self._buffer[: end + len(mark)]
        return found

    def _read(self, count: int, most_bytes: int) -> bytes:
        if count > most_bytes:
            raise ConnectionAbortedError(_TOO_LONG)
        while len(self._buffer) < count:
            self._receive_more()
        found = bytes(self._buffer[:count])
        del self._buffer[:count]
        return found

    def _receive_more(self) -> None:
        if not self._receive():
            raise ConnectionAbortedError(_CUT_SHORT)

    def _receive(self) -> bool:
        """Waits for bytes; returns False at the end of the connection."""
        left = self._until - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            self._sock.settimeout(left)
            piece = self._sock.recv(PIECE_BYTES)
        except TimeoutError as error:
            raise ConnectionAbortedError(_TOO_LATE) from error
        self._bytes_left -= len(piece)
        if self._bytes_left < 0:
            raise ConnectionAbortedError(_TOO_LONG)
        self._buffer += piece
        return bool(piece)


def _number(text: str, base: int) -> int:
    """Parses a length in an HTTP message; only digits are allowed, unlike in int()."""
    if _DIGITS[base].fullmatch(text) is None:
        raise ConnectionAbortedError(_NO_HTTP)
    return int(text, base)


def checked_base_url(text: str, origin: str) -> str:
    """Normalizes the address of a server to "http://host[:port]".

    Args:
        text: host, host:port or http://host:port.
        origin: name of the variable or argument with the text, for the error message.

    Raises:
        ConfigurationError: the text is no such address.
    """
    host = text.lower().removeprefix("http://").rstrip("/")
    try:
        parts = urlsplit(f"http://{host}")
        is_host = parts.netloc == host and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_host = False
    if not is_host or "@" in host or " " in host or not host.isprintable():
        shown = paths.without_secrets(text)
        raise errors.ConfigurationError(
            f"{origin}={shown!r}: expected the host of a metadata server, such as "
            "'169.254.169.254' or 'localhost:8080'; requests use plain http, "
            "without user names and paths"
        )
    return f"http://{host}"


def url_from(
    variables: Sequence[str],
    environment: Mapping[str, str],
    default: str = DEFAULT_URL,
) -> str:
    """Returns a server's address from the first variable that is set.

    Args:
        variables: names of the variables, in order of precedence.
        environment: the environment variables.
        default: address if no variable is set.

    Raises:
        ConfigurationError: the value of the variable is not a host.
    """
    for name in variables:
        text = environment.get(name, "").strip()
        if text:
            return checked_base_url(text, name)
    return default


def printable(text: str, limit: int = 200) -> str:
    """Returns the first `limit` characters of a text; unprintable ones become "?"."""
    cut = text[:limit]
    return "".join(char if char.isprintable() else "?" for char in cut)


def epoch_seconds(text: object) -> float | None:
    """Converts a time text (RFC 3339 or RFC 1123) to seconds since the Unix epoch.

    A time without a zone is UTC. Returns None if the value is no such text.
    """
    if not isinstance(text, str):
        return None
    for parse in (_from_rfc_3339, email.utils.parsedate_to_datetime):
        try:
            when = parse(text)
        except (ValueError, OverflowError):
            continue
        if when.tzinfo is None:
            when = when.replace(tzinfo=datetime.timezone.utc)
        return when.timestamp()
    return None


def _from_rfc_3339(text: str) -> datetime.datetime:
    """Parses a time in RFC 3339, as `fromisoformat` of Python 3.11 does.

    `fromisoformat` of Python 3.10 accepts no "Z", and only 3 or 6 digits of a fraction.
    """
    with_micros = re.sub(r"\.(\d+)", lambda found: f".{found[1][:6]:0<6}", text)
    return datetime.datetime.fromisoformat(re.sub("[Zz]$", "+00:00", with_micros))


def readable(seconds: float | None) -> str:
    """Formats seconds since the Unix epoch as RFC 3339 in UTC; None becomes "?"."""
    if seconds is None:
        return "?"
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _reason(error: BaseException) -> str:
    """Returns the reason for a failed request; equal for equal failures.

    So `FailureLog` can recognize a repeated failure.
    """
    if isinstance(error, TimeoutError):
        return "no connection in time"
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return "the connection was closed without an answer"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return type(error).__name__
