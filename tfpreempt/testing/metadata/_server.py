"""What all fake metadata servers share: sockets, threads, and failures on demand."""

from __future__ import annotations

import dataclasses
import http.server
import itertools
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

from tfpreempt._threads import OwnedThread

_POLL_SECONDS = 0.01
_CLOSE_LIMIT_SECONDS = 5.0
_names = itertools.count()


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


class FakeServer:
    """A server on a free port of 127.0.0.1; a context manager.

    Attributes:
        requests: what was asked, the newest last.
    """

    _port = 0  # any free one

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.changed = threading.Condition()
        self._is_closing = False
        self._is_down = False
        self._is_stalled = False
        self._failures: list[int] = []
        self._connections: set[socket.socket] = set()
        self._httpd = _Httpd(self)
        self._thread = OwnedThread(
            f"fake-metadata-{next(_names)}",
            lambda: self._httpd.serve_forever(_POLL_SECONDS),
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it listens, such as "http://127.0.0.1:40001"."""
        return f"http://{self.host}"

    @property
    def host(self) -> str:
        """The same without the scheme."""
        return f"127.0.0.1:{self._httpd.server_port}"

    def environment(self) -> dict[str, str]:
        """The variables that lead the cloud's clients here."""
        return {}

    def fail(self, count: int, status: int = 503) -> None:
        """Answers the next `count` requests with an error.

        Args:
            count: how many; 0 ends it.
            status: the error's HTTP status.
        """
        with self.changed:
            self._failures = [status] * count
            self.changed.notify_all()

    def stall(self) -> None:
        """Accepts requests and answers none, until `up()`."""
        with self.changed:
            self._is_stalled = True

    def down(self) -> None:
        """Drops all connections, and each new one at once, until `up()`."""
        with self.changed:
            self._is_down = True
            self._drop_connections()

    def up(self) -> None:
        """Ends `stall()` and `down()`."""
        with self.changed:
            self._is_down = self._is_stalled = False
            self.changed.notify_all()

    def close(self) -> None:
        """Stops. Idempotent."""
        with self.changed:
            if self._is_closing:
                return
            self._is_closing = True
            self._drop_connections()
            self.changed.notify_all()
        self._httpd.shutdown()
        self._httpd.server_close()
        self._thread.join(_CLOSE_LIMIT_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def answer(self, request: Request) -> Reply:
        """What the service says. In a thread of the request's connection."""
        raise NotImplementedError

    def wait(self, is_met: Any, seconds: float) -> None:
        """Waits with `changed` held until it is met, time is up or the server ends."""
        self.changed.wait_for(
            lambda: is_met() or self._is_closing or self._is_down, seconds
        )

    def pause(self, seconds: float) -> bool:
        """Waits; returns whether the server goes on."""
        with self.changed:
            self.changed.wait_for(lambda: self._is_closing, seconds)
            return not self._is_closing

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

    def admit(self, connection: socket.socket) -> bool:
        """Whether a new connection is served."""
        with self.changed:
            if self._is_down or self._is_closing:
                return False
            self._connections.add(connection)
            return True

    def release(self, connection: socket.socket) -> None:
        """A connection has ended."""
        with self.changed:
            self._connections.discard(connection)

    def _drop_connections(self) -> None:
        for connection in self._connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the client was first


class _Httpd(http.server.ThreadingHTTPServer):
    request_queue_size = 32

    def __init__(self, fake: FakeServer) -> None:
        self.fake = fake
        super().__init__(("127.0.0.1", fake._port), _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self.fake.admit(request)

    def shutdown_request(self, request: Any) -> None:
        self.fake.release(request)
        super().shutdown_request(request)

    def process_request(self, request: Any, client_address: Any) -> None:
        # Named from the start, so that a test can tell these threads from its own.
        threading.Thread(
            target=self.process_request_thread,
            args=(request, client_address),
            name="fake-metadata-connection",
            daemon=True,
        ).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that go away are what these servers are for


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet: no delay between the two
    server: _Httpd

    def do_GET(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        request = Request(
            method=self.command,
            path=parts.path,
            query=dict(parse_qsl(parts.query, keep_blank_values=True)),
            headers={name.lower(): text for name, text in self.headers.items()},
            body=self.rfile.read(length),
        )
        reply = self.server.fake.serve(request)
        if reply is None or reply.pieces is not None:
            self.close_connection = True
        if reply is None:
            return
        if not reply.is_raw:
            self._send_head(reply)
        for piece in (reply.body,) if reply.pieces is None else reply.pieces:
            self.wfile.write(piece)
            self.wfile.flush()

    def _send_head(self, reply: Reply) -> None:
        self.send_response(reply.status)
        for name, text in reply.headers.items():
            self.send_header(name, text)
        if reply.pieces is None:
            self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
