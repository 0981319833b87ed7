"""Base class of the fake servers, which a test can make fail, wait or refuse."""

from __future__ import annotations

import dataclasses
import http.server
import itertools
import json
import math
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlsplit

from tfpreempt.core.threads import ManagedThread

_POLL_SECONDS = 0.01
_CLOSE_LIMIT_SECONDS = 5.0
_names = itertools.count()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request as received by the server.

    Attributes:
        method: GET, PUT, POST or DELETE.
        path: path without the query, still percent-encoded.
        query: fields of the query; the value of a field without a value is "".
        headers: values of the headers, by lower-case name.
        body: bytes sent with the request.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes = b""

    @property
    def length(self) -> int:
        """Length of the body in bytes, as announced by the Content-Length header."""
        return int(self.headers.get("content-length") or 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A reply of the server.

    Attributes:
        status: the HTTP status.
        body: bytes of the body.
        headers: headers in addition to Content-Length, which `send` adds.
    """

    status: int = 200
    body: bytes | memoryview = b""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def send(self, to: http.server.BaseHTTPRequestHandler) -> None:
        """Sends the reply.

        Args:
            to: handler of the connection on which to send the reply.
        """
        to.send_response(self.status)
        for name, text in self.headers.items():
            to.send_header(name, text)
        if self.status not in (204, 304):
            to.send_header("Content-Length", str(len(self.body)))
        to.end_headers()
        to.wfile.write(self.body)


class FakeServer(http.server.ThreadingHTTPServer):
    """HTTP server on a free port of 127.0.0.1; a context manager that stops the server.

    Attributes:
        requests: received requests, newest last.
        changed: condition variable. A method that changes the state of the server
            acquires the condition, and calls `notify_all` after the change.
    """

    request_queue_size = 32
    headers: ClassVar[Mapping[str, str]] = {}
    # Prefix of the server's thread names; tests find the threads by the prefix.
    _name = "fake-metadata"
    _port = 0  # any free port

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", self._port), _Handler)
        self.changed = threading.Condition()
        self.requests: list[Request] = []
        # Number of requests that get an error response, and the HTTP status of the
        # error.
        self._failing, self._status = 0, 0
        self._stalling = 0.0  # number of next requests that wait for `up`
        self._releases = 0  # number of calls of `up`
        self._is_closing = False
        self._is_down = False
        self._connections: set[socket.socket] = set()
        self._thread = ManagedThread(
            f"{self._name}-{next(_names)}", lambda: self.serve_forever(_POLL_SECONDS)
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """URL of the server, such as "http://127.0.0.1:40001"."""
        return f"http://{self.host}"

    @property
    def host(self) -> str:
        """Host and port of the server, without the scheme."""
        return f"127.0.0.1:{self.server_port}"

    def environment(self) -> dict[str, str]:
        """Returns the environment variables with which clients find the server."""
        return {}

    def answer(self, request: Request) -> Reply:
        """Returns the reply to a request. Called on the connection's thread."""
        raise NotImplementedError

    def reply(self, status: int, body: object) -> Reply:
        """Returns a reply with the headers of the service.

        Args:
            status: the HTTP status.
            body: the body: text, or a value to be sent as JSON.
        """
        text = body if isinstance(body, str) else json.dumps(body)
        return Reply(status=status, headers=self.headers, body=text.encode())

    def failure(self, status: int) -> Reply:
        """Returns the reply with which the service reports an error.

        Args:
            status: HTTP status of the error.
        """
        return self.reply(status, "try again\n")

    def fail(self, count: int, status: int = 503) -> None:
        """Makes the next requests fail.

        Args:
            count: number of requests; 0 ends the failure.
            status: HTTP status of the error.
        """
        with self.changed:
            self._failing, self._status = count, status

    def stall(self, count: int | None = None) -> None:
        """Makes the next requests wait for an answer until `up()` is called.

        Args:
            count: number of requests; None: all requests.
        """
        with self.changed:
            self._stalling += math.inf if count is None else count

    def down(self) -> None:
        """Closes all connections, and refuses new connections, until `up()`."""
        with self.changed:
            self._is_down = True
            self._drop_connections()

    def up(self) -> None:
        """Ends the effects of `stall()` and `down()`."""
        with self.changed:
            self._stalling = 0.0
            self._is_down = False
            self._releases += 1
            self.changed.notify_all()

    def close(self) -> None:
        """Stops the server; a second call does nothing."""
        with self.changed:
            if self._is_closing:
                return
            self._is_closing = True
            self._drop_connections()
            self.changed.notify_all()
        self.shutdown()
        self.server_close()
        self._thread.join(_CLOSE_LIMIT_SECONDS)

    def __exit__(self, *error: object) -> None:
        self.close()

    def wait(self, is_met: Callable[[], bool], seconds: float) -> None:
        """Waits for a condition, or the end of the server. The caller holds `changed`.

        Args:
            is_met: function that returns whether the condition is met.
            seconds: maximum seconds to wait.
        """
        self.changed.wait_for(lambda: is_met() or self._is_gone, seconds)

    def pause(self, seconds: float) -> bool:
        """Waits for some seconds; returns False if the server is closed during them."""
        with self.changed:
            self.changed.wait_for(lambda: self._is_closing, seconds)
            return not self._is_closing

    # --- a request, and the faults ordered for it ------------------------------------

    def serve(self, head: Request, read: Callable[[int], bytes]) -> Reply | None:
        """Returns the reply to a request; None if the connection must be closed.

        Args:
            head: the request without the body.
            read: function that reads a number of bytes of the body.
        """
        request = dataclasses.replace(head, body=read(head.length))
        if len(request.body) < head.length:
            raise ConnectionAbortedError("the client went away")
        self.record(request)
        return self.respond(request)

    def record(self, request: Request) -> None:
        """Adds a request to `requests`."""
        with self.changed:
            self.requests.append(request)
            self.changed.notify_all()

    def respond(self, request: Request) -> Reply | None:
        """Returns the reply to a request, after the effects of `fail` and `stall`."""
        with self.changed:
            is_stalled, before = self._stalling > 0, self._releases
            self._stalling = max(0.0, self._stalling - 1)
            is_failing, status = self._failing > 0, self._status
            self._failing = max(0, self._failing - 1)
        if is_stalled:
            self.await_release(before)
        if self._is_gone:
            return None
        reply = self.failure(status) if is_failing else self.answer(request)
        return None if self._is_gone else reply

    def await_release(self, before: int) -> None:
        """Waits until `up()` is called, or the server is closed.

        Args:
            before: number of calls of `up()` when the request arrived.
        """
        with self.changed:
            self.changed.wait_for(lambda: self._is_closing or self._releases != before)

    @property
    def _is_gone(self) -> bool:
        return self._is_closing or self._is_down

    # --- connections: methods called by http.server ----------------------------------

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Registers a new connection; returns whether the connection is served."""
        with self.changed:
            if self._is_gone:
                return False
            self._connections.add(request)
            return True

    def shutdown_request(self, request: Any) -> None:
        """Unregisters a connection at its end."""
        with self.changed:
            self._connections.discard(request)
        super().shutdown_request(request)

    def process_request(self, request: Any, client_address: Any) -> None:
        # Give the thread a name, so that tests can recognize threads of servers.
        threading.Thread(
            target=self.process_request_thread,
            args=(request, client_address),
            name=f"{self._name}-connection",
            daemon=True,
        ).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # ignore: tests disconnect clients on purpose

    def _drop_connections(self) -> None:
        for connection in self._connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # closed by the client


class _Handler(http.server.BaseHTTPRequestHandler):
    """Handles the requests of a connection; logs nothing."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # no delay between head and body

    def do_GET(self) -> None:
        assert isinstance(self.server, FakeServer)
        parts = urlsplit(self.path)
        head = Request(
            method=self.command,
            path=parts.path,
            query=dict(parse_qsl(parts.query, keep_blank_values=True)),
            headers={name.lower(): text for name, text in self.headers.items()},
        )
        reply = self.server.serve(head, self.rfile.read)
        if reply is None:
            self.close_connection = True
        else:
            reply.send(self)

    do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815  (names that http.server calls)

    def log_message(self, format: str, *args: Any) -> None:
        pass
