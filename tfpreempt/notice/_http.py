"""One request to a metadata server: bounded in time and size, sent nowhere else.

No proxy, no redirect, no credentials of the user's, plain http to one host. Whatever
answers, the request ends by its deadline with at most `answer_bytes` in memory.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tfpreempt import errors

if TYPE_CHECKING:
    import requests

    from tfpreempt.notice._transport import BoundedAdapter, Budget

CONNECT_SECONDS = 2.0
HEAD_BYTES = 64 * 1024


class SessionClosedError(errors.NoticeError):
    """A request was cut off, or never made, because its session was closed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one request may cost.

    Attributes:
        total_seconds: from the request to the last byte of the answer.
        body_bytes: the longest body that is read.
        connect_seconds: of these, for the connection.
    """

    total_seconds: float = 5.0
    body_bytes: int = 256 * 1024
    connect_seconds: float = CONNECT_SECONDS

    @property
    def answer_bytes(self) -> int:
        """Head and body together, as they come from the socket."""
        return HEAD_BYTES + self.body_bytes


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
    """Requests to one server, over a connection that is kept.

    One thread makes the requests; any thread may close.

    Args:
        base_url: as `checked_base_url()` returns it.
    """

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self._lock = threading.Lock()
        self._is_closed = False
        self._parts: tuple[Budget, BoundedAdapter] | None = None

    def request(
        self,
        target: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        limits: Limits | None = None,
    ) -> Answer:
        """Asks and reads the whole answer.

        Args:
            target: path and query, from "/" on.
            method: GET, PUT or POST.
            headers: sent with it.
            body: sent with it.
            limits: what it may cost; by default 5 s and 256 KiB.

        Returns:
            The answer, also of an unwanted status and of a redirect.

        Raises:
            SessionClosedError: the session is closed, or was closed meanwhile.
            NoticeError: there is no complete answer within the limits.
        """
        import requests
        import urllib3

        limits = Limits() if limits is None else limits
        budget, adapter = self._open()
        url = self.base_url + target
        prepared = requests.Request(
            method, url, {"Accept-Encoding": "identity", **(headers or {})}, data=body
        ).prepare()
        budget.begin(limits)
        try:
            # The adapter alone, not requests.Session: the session would look for
            # proxies, .netrc and cookies, and read the body of a redirect.
            response = adapter.send(
                prepared,
                stream=True,
                timeout=(
                    min(limits.connect_seconds, limits.total_seconds),
                    limits.total_seconds,
                ),
                proxies={},
            )
            with response:
                content = _read(response, limits.body_bytes + 1)
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            reason = budget.verdict or _reason(error)
            raise self._fault(method, target, reason) from error
        except (OSError, ValueError) as error:
            raise self._fault(method, target, budget.verdict or str(error)) from error
        if len(content) > limits.body_bytes:
            reason = "its answer is longer than any that is expected"
            raise self._fault(method, target, reason)
        return Answer(
            status=response.status_code,
            headers={name.lower(): text for name, text in response.headers.items()},
            body=content,
        )

    def close(self) -> None:
        """Ends a request that waits, and refuses the next. Any thread, idempotent."""
        with self._lock:
            self._is_closed = True
            parts = self._parts
        if parts is not None:
            budget, adapter = parts
            budget.close()
            adapter.close()

    def _open(self) -> tuple[Budget, BoundedAdapter]:
        from tfpreempt.notice._transport import BoundedAdapter, Budget

        with self._lock:
            if self._is_closed:
                raise self._closed()
            if self._parts is None:
                budget = Budget()
                self._parts = budget, BoundedAdapter(budget)
            return self._parts

    def _closed(self) -> SessionClosedError:
        return SessionClosedError(
            f"a request to {self.base_url} after its session was closed; make a new one"
        )

    def _fault(self, method: str, target: str, reason: str) -> errors.NoticeError:
        if self._is_closed:
            return self._closed()
        path = target.partition("?")[0]
        return errors.NoticeError(f"{method} {self.base_url}{path}: {reason}")


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
    if not host or not is_plain or extra or "@" in text or not _is_one_word(text):
        raise errors.ConfigurationError(
            f"{origin}={text!r}: expected the host of a metadata server, such as "
            "'169.254.169.254' or 'localhost:8080'; it is only asked by plain http, "
            "without user names and paths"
        )
    host = f"[{host}]" if ":" in host else host
    return f"http://{host}" if port is None else f"http://{host}:{port}"


def _is_one_word(text: str) -> bool:
    return text.isprintable() and " " not in text


def printable(text: str, limit: int = 200) -> str:
    """What a server said, fit for a log: at most `limit` printable characters."""
    cut = text[:limit]
    return "".join(char if char.isprintable() else "?" for char in cut)


def _read(response: requests.Response, limit: int) -> bytes:
    """The body, at most `limit` bytes of it.

    Read to its end: only there is a body that was cut short told from a whole one.
    """
    content = b""
    while len(content) < limit:
        piece = response.raw.read(limit - len(content), decode_content=False)
        if not piece:
            break
        content += piece
    return content


def _reason(error: BaseException) -> str:
    """What lies at the root, without addresses and numbers that change each time."""
    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in seen:
        seen.append(at)
        at = at.__cause__ or at.__context__
    for cause in reversed(seen):
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
    names = [type(each).__name__ for each in seen]
    name = names[0] if names[0].endswith("Timeout") else names[-1]
    return {
        "ConnectTimeout": "no connection in time",
        "RemoteDisconnected": "the connection was closed without an answer",
        "IncompleteRead": "the connection was closed in the middle of the answer",
    }.get(name, name)
