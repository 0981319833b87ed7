"""Requests to a metadata server: bounded in time and size, sent nowhere else.

No proxy, no redirect, no credentials of the user's, plain http to one host. A time-out
of a socket holds for one read, and a server that sends a byte now and then is never
late; so the limits are set where all bytes pass: head, body, chunk sizes and trailers
count alike.
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

# The address of all clouds' servers, and of Google's name for it: looking up a name has
# no time limit, and fails where a container has a resolver of its own.
DEFAULT_URL = "http://169.254.169.254"

REQUEST_SECONDS = 5.0
CONNECT_SECONDS = 2.0
HEAD_BYTES = 64 * 1024
BODY_BYTES = 256 * 1024
PIECE_BYTES = 16 * 1024  # that are received at a time

_TOO_LONG = "its answer is longer than any that is expected"
_TOO_LATE = "its answer was not complete in time"
_CUT_SHORT = "the connection was closed in the middle of the answer"
_NO_HTTP = "its answer is not HTTP"

_STATUS_LINE = re.compile(r"HTTP/1\.\d ([1-9]\d\d)(?: |$)", re.ASCII)
_DIGITS = {
    10: re.compile("[0-9]{1,18}"),
    16: re.compile("[0-9a-fA-F]{1,16}"),
}


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
        """An error that says what was expected, and does not quote the answer.

        Metadata can hold passwords, for instance in startup scripts.
        """
        return errors.NoticeError(
            f"{self.url} answered with status {self.status}, expected {expected}. The "
            "answer is not shown: metadata can hold secrets"
        )


class MetadataSession:
    """Requests to one server, each over a connection of its own.

    One thread makes the requests; any thread may close.

    Args:
        base_url: as `checked_base_url()` returns it.
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
            self._check_open()  # a cut is the end of an answer without a length
        except (OSError, ValueError) as error:
            self._check_open()
            raise errors.NoticeError(f"{method} {url}: {_reason(error)}") from error
        return Answer(url=url, status=status, headers=fields, body=content)

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

    def _message(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes | None
    ) -> bytes:
        """The request as it is sent."""
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
    """Reads one answer (RFC 9112), for so long and so much, head and body together.

    `http.client` reads the same, but it takes most of the processor time of a request
    that is made each second, and each line of a head has limits of its own there.

    Args:
        sock: a connection on which the request was sent.
        until: when the last byte must have come, in monotonic seconds.
        most_bytes: the most that are read.
    """

    def __init__(self, sock: socket.socket, until: float, most_bytes: int) -> None:
        self._sock = sock
        self._until = until
        self._bytes_left = most_bytes
        self._buffer = bytearray()  # received, and not read yet

    def read_head(self) -> tuple[int, dict[str, str]]:
        """The status, and the headers by lower-case names."""
        if not self._receive():
            raise ConnectionResetError
        while True:
            first, *lines = self._read_to(b"\r\n\r\n").decode("latin-1").split("\r\n")
            found = _STATUS_LINE.match(first)
            fields = [line.partition(":") for line in lines]
            if found is None or not all(colon for _, colon, _ in fields):
                raise ConnectionAbortedError(_NO_HTTP)
            status = int(found[1])
            if status >= 200:  # others announce the answer that follows them
                return status, {name.lower(): text.strip() for name, _, text in fields}

    def read_body(
        self, status: int, headers: Mapping[str, str], most_bytes: int
    ) -> bytes:
        """The body, as the head says where it ends.

        Args:
            status: of the head.
            headers: of the head.
            most_bytes: a longer one is refused.
        """
        if status in (204, 304):
            return b""
        if headers.get("transfer-encoding", "").lower() == "chunked":
            return self._read_chunks(most_bytes)
        length = headers.get("content-length")
        if length is not None:
            return self._read(_number(length, 10), most_bytes)
        while len(self._buffer) <= most_bytes and self._receive():
            pass  # to the end of the connection
        return self._read(len(self._buffer), most_bytes)

    def _read_chunks(self, most_bytes: int) -> bytes:
        """Pieces, each after a line with its size, which may carry more than that."""
        body = bytearray()
        while size := _number(self._read_line().partition(";")[0].strip(), 16):
            body += self._read(size, most_bytes - len(body))
            if self._read_line():
                raise ConnectionAbortedError(_NO_HTTP)
        while self._read_line():
            pass  # trailers
        return bytes(body)

    def _read_line(self) -> str:
        return self._read_to(b"\r\n").decode("latin-1")

    def _read_to(self, mark: bytes) -> bytes:
        """What comes before the mark, which is read too."""
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
        """Waits for some bytes; False at the end of the connection."""
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
    """A length as HTTP writes it: digits, and nothing that int() takes besides."""
    if _DIGITS[base].fullmatch(text) is None:
        raise ConnectionAbortedError(_NO_HTTP)
    return int(text, base)


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
        shown = paths.without_secrets(text)
        raise errors.ConfigurationError(
            f"{origin}={shown!r}: expected the host of a metadata server, such as "
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
    """Text fit for a log: at most `limit` printable characters."""
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
        except (ValueError, OverflowError):
            continue
        if when.tzinfo is None:
            when = when.replace(tzinfo=datetime.timezone.utc)
        return when.timestamp()
    return None


def _from_rfc_3339(text: str) -> datetime.datetime:
    """`fromisoformat`; Python 3.10's knows no "Z", and 3 or 6 digits of a fraction."""
    with_micros = re.sub(r"\.(\d+)", lambda found: f".{found[1][:6]:0<6}", text)
    return datetime.datetime.fromisoformat(re.sub("[Zz]$", "+00:00", with_micros))


def readable(seconds: float | None) -> str:
    """A time in seconds since the Unix epoch, in UTC, as in RFC 3339; None is "?"."""
    if seconds is None:
        return "?"
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _reason(error: BaseException) -> str:
    """Why there is no answer, without what differs each time: addresses, numbers."""
    if isinstance(error, TimeoutError):
        return "no connection in time"
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return "the connection was closed without an answer"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return type(error).__name__
