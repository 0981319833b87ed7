"""What all fake servers are: requests, replies, and failures on demand."""

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

from tfpreempt.core.threads import OwnedThread

_POLL_SECONDS = 0.01
_CLOSE_LIMIT_SECONDS = 5.0
_names = itertools.count()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as the server got it.

    Attributes:
        method: GET, PUT, POST or DELETE.
        path: without the query, still quoted.
        query: the query's fields; without a value they are "".
        headers: by lower-case names.
        body: what was sent with it.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes = b""

    @property
    def length(self) -> int:
        """Of the body, in bytes, as announced."""
        return int(self.headers.get("content-length") or 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer.

    Attributes:
        status: the HTTP status.
        body: sent with its length.
        headers: sent with it.
    """

    status: int = 200
    body: bytes | memoryview = b""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def send(self, to: http.server.BaseHTTPRequestHandler) -> None:
        """Sends the answer.

        Args:
            to: handler of the connection.
        """
        to.send_response(self.status)
        for name, text in self.headers.items():
            to.send_header(name, text)
        if self.status not in (204, 304):
            to.send_header("Content-Length", str(len(self.body)))
        to.end_headers()
        to.wfile.write(self.body)


class FakeServer(http.server.ThreadingHTTPServer):
    """A server on a free port of 127.0.0.1; a context manager.

    Attributes:
        requests: what was asked, the newest last.
        changed: held while any of this changes, and notified then.
    """

    request_queue_size = 32
    headers: ClassVar[Mapping[str, str]] = {}
    _name = "fake-metadata"  # of its threads, so that a test knows them from its own
    _port = 0  # any free one

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", self._port), _Handler)
        self.changed = threading.Condition()
        self.requests: list[Request] = []
        self._failing, self._status = 0, 0  # requests to answer with a status
        self._stalling = 0.0  # requests that wait for `up`
        self._releases = 0  # calls of `up`
        self._is_closing = False
        self._is_down = False
        self._connections: set[socket.socket] = set()
        self._thread = OwnedThread(
            f"{self._name}-{next(_names)}", lambda: self.serve_forever(_POLL_SECONDS)
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Where it listens, such as "http://127.0.0.1:40001"."""
        return f"http://{self.host}"

    @property
    def host(self) -> str:
        """The same without the scheme."""
        return f"127.0.0.1:{self.server_port}"

    def environment(self) -> dict[str, str]:
        """The variables that lead the cloud's clients here."""
        return {}

    def answer(self, request: Request) -> Reply:
        """What the service says. In a thread of the request's connection."""
        raise NotImplementedError

    def reply(self, status: int, said: object) -> Reply:
        """An answer with the service's own headers: text, or what is sent as JSON."""
        text = said if isinstance(said, str) else json.dumps(said)
        return Reply(status=status, headers=self.headers, body=text.encode())

    def failure(self, status: int) -> Reply:
        """The answer of a service that fails."""
        return self.reply(status, "try again\n")

    def fail(self, count: int, status: int = 503) -> None:
        """Answers the next `count` requests with an error.

        Args:
            count: how many; 0 ends it.
            status: the error's HTTP status.
        """
        with self.changed:
            self._failing, self._status = count, status

    def stall(self, count: int | None = None) -> None:
        """Accepts requests and answers none, until `up()`.

        Args:
            count: how many requests; None: all.
        """
        with self.changed:
            self._stalling += math.inf if count is None else count

    def down(self) -> None:
        """Drops all connections, and each new one at once, until `up()`."""
        with self.changed:
            self._is_down = True
            self._drop_connections()

    def up(self) -> None:
        """Ends `stall()` and `down()`."""
        with self.changed:
            self._stalling = 0.0
            self._is_down = False
            self._releases += 1
            self.changed.notify_all()

    def close(self) -> None:
        """Stops. Idempotent."""
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
        """Waits with `changed` held until it is met, time is up or the server ends."""
        self.changed.wait_for(lambda: is_met() or self._is_gone, seconds)

    def pause(self, seconds: float) -> bool:
        """Waits; returns whether the server goes on."""
        with self.changed:
            self.changed.wait_for(lambda: self._is_closing, seconds)
            return not self._is_closing

    # --- a request, and what was ordered for it --------------------------------------

    def serve(self, head: Request, read: Callable[[int], bytes]) -> Reply | None:
        """Returns the answer to a request; None drops the connection.

        Args:
            head: the request without its body.
            read: returns so many bytes of the body.
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
        """Returns the answer, or an error that was ordered, after an ordered stall."""
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
        """Waits for the end, or for an `up()` after so many."""
        with self.changed:
            self.changed.wait_for(lambda: self._is_closing or self._releases != before)

    @property
    def _is_gone(self) -> bool:
        return self._is_closing or self._is_down

    # --- connections, as http.server calls it ----------------------------------------

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether a new connection is served."""
        with self.changed:
            if self._is_gone:
                return False
            self._connections.add(request)
            return True

    def shutdown_request(self, request: Any) -> None:
        """A connection has ended."""
        with self.changed:
            self._connections.discard(request)
        super().shutdown_request(request)

    def process_request(self, request: Any, client_address: Any) -> None:
        # Named from the start, so that a test can tell these threads from its own.
        threading.Thread(
            target=self.process_request_thread,
            args=(request, client_address),
            name=f"{self._name}-connection",
            daemon=True,
        ).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that go away are what these servers are for

    def _drop_connections(self) -> None:
        for connection in self._connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the client was first


class _Handler(http.server.BaseHTTPRequestHandler):
    """One connection; nothing is printed."""

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
