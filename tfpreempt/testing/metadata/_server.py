"""What all fake metadata servers share: requests, replies, failures on demand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from urllib.parse import parse_qsl, urlsplit

from tfpreempt.testing._loopback import Handler, LoopbackServer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as the server got it.

    Attributes:
        method: GET, PUT or POST.
        path: without the query.
        query: the query's fields; without a value they are "".
        headers: by lower-case names.
        body: what was sent with it.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer.

    Attributes:
        status: the HTTP status.
        body: sent whole, with its length.
        headers: sent with it.
        pieces: sent instead of the body, without a length, until the client or the
            server goes.
        is_raw: the pieces are all there is, without a status line and headers.
    """

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pieces: Iterator[bytes] | None = None
    is_raw: bool = False


class FakeServer(LoopbackServer):
    """A metadata server on a free port of 127.0.0.1; a context manager.

    Attributes:
        requests: what was asked, the newest last.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self._failures: list[int] = []  # statuses of the next answers
        super().__init__("fake-metadata", _Handler)

    def fail(self, count: int, status: int = 503) -> None:
        """Answers the next `count` requests with an error.

        Args:
            count: how many; 0 ends it.
            status: the error's HTTP status.
        """
        with self.changed:
            self._failures = [status] * count
            self.changed.notify_all()

    def answer(self, request: Request) -> Reply:
        """What the service says. In a thread of the request's connection."""
        raise NotImplementedError

    def serve(self, request: Request) -> Reply | None:
        """The answer, or a failure that was ordered; None to drop the connection."""
        with self.changed:
            self.requests.append(request)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self._is_closing or not self._is_stalled)
            if self._is_closing or self._is_down:
                return None
            if self._failures:
                return self.failure(self._failures.pop())
        reply = self.answer(request)
        return None if self._is_closing or self._is_down else reply

    def failure(self, status: int) -> Reply:
        """The answer of a service that fails."""
        return Reply(status=status, body=b"try again\n")


class _Handler(Handler):
    def serve(self) -> None:
        assert isinstance(self.server, FakeServer)
        parts = urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        request = Request(
            method=self.command,
            path=parts.path,
            query=dict(parse_qsl(parts.query, keep_blank_values=True)),
            headers={name.lower(): text for name, text in self.headers.items()},
            body=self.rfile.read(length),
        )
        reply = self.server.serve(request)
        if reply is None or reply.pieces is not None:
            self.close_connection = True
        if reply is None:
            return
        if not reply.is_raw:
            self.send_response(reply.status)
            for name, text in reply.headers.items():
                self.send_header(name, text)
            if reply.pieces is None:
                self.send_header("Content-Length", str(len(reply.body)))
            self.end_headers()
        for piece in (reply.body,) if reply.pieces is None else reply.pieces:
            self.wfile.write(piece)
            self.wfile.flush()
