"""What all fake servers are: requests, replies, and failures on demand."""

from __future__ import annotations

import dataclasses
import functools
import http.server
import itertools
import json
import math
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlsplit

from tfpreempt.core.threads import OwnedThread

_POLL_SECONDS = 0.01
_CLOSE_LIMIT_SECONDS = 5.0
_KEPT_BYTES = 64 << 10  # more of a request's body is not remembered
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
        number: counted from 0, in the order of arrival.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes = b""
    number: int = 0

    @property
    def length(self) -> int:
        """Of the body, in bytes, as announced."""
        return int(self.headers.get("content-length") or 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer.

    Attributes:
        status: the HTTP status.
        body: sent whole, with its length if the headers say none.
        headers: sent with it.
        pieces: sent after the body, which then has no length of its own, until the
            client or the server goes.
        is_raw: body and pieces are all there is, without a status line and headers.
    """

    status: int = 200
    body: bytes | memoryview = b""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pieces: Iterable[bytes] | None = None
    is_raw: bool = False


Serve = Callable[[Request], Reply | None]
"""From a request to its answer; None drops the connection."""


@dataclasses.dataclass(slots=True)
class Fault:
    """What is done to the next requests to which it applies.

    Attributes:
        kind: of those of one kind a request meets one, in the order of the orders.
        left: how many requests.
        around: answers in place of what it is given, or with its help.
        applies: whether it is meant for a request, whose body has not come yet.
        reads: bytes of the body that are taken in.
    """

    kind: str
    left: float
    around: Callable[[Serve, Request], Reply | None]
    applies: Callable[[Request], bool] = lambda head: True
    reads: float = math.inf


class FakeServer(http.server.ThreadingHTTPServer):
    """A server on a free port of 127.0.0.1; a context manager.

    Attributes:
        requests: what was asked, the newest last; without bodies over 64 KiB.
        request_count: requests that have come so far; the next one has this number.
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
        self.request_count = 0
        self._faults: list[Fault] = []
        self._releases = 0  # how often those who wait for the end of a stall were told
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
        self._forget("fail")
        self._order(Fault("fail", count, lambda serve, request: self.failure(status)))

    def stall(self, count: int | None = None) -> None:
        """Accepts requests and answers none, until `up()`.

        Args:
            count: how many requests; None: all.
        """

        before = self._releases

        def stalled(serve: Serve, request: Request) -> Reply | None:
            self._await_release(before)
            return serve(request)

        self._order(Fault("stall", math.inf if count is None else count, stalled))

    def down(self) -> None:
        """Drops all connections, and each new one at once, until `up()`."""
        with self.changed:
            self._is_down = True
            self._drop_connections()

    def up(self) -> None:
        """Ends `stall()` and `down()`."""
        with self.changed:
            self._forget("stall")
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
        self.changed.wait_for(
            lambda: is_met() or self._is_closing or self._is_down, seconds
        )

    def pause(self, seconds: float) -> bool:
        """Waits; returns whether the server goes on."""
        with self.changed:
            self.changed.wait_for(lambda: self._is_closing, seconds)
            return not self._is_closing

    # --- a request, and what was ordered for it --------------------------------------

    def serve(self, head: Request, read: Callable[[int], bytes]) -> Reply | None:
        """The answer, or what was ordered in its place; None to drop the connection.

        Args:
            head: the request without its body.
            read: gives so many bytes of the body.
        """
        with self.changed:
            head = dataclasses.replace(head, number=self.request_count)
            self.request_count += 1
            faults = self._due(head)
        wanted = min([head.length, *(fault.reads for fault in faults)])
        body = read(int(wanted))
        if len(body) < wanted:
            raise ConnectionAbortedError("the client went away")
        request = dataclasses.replace(head, body=body)
        with self.changed:
            self.requests.append(request if len(body) <= _KEPT_BYTES else head)
            self.changed.notify_all()
        serve: Serve = self._unless_gone
        for fault in faults:
            serve = functools.partial(fault.around, serve)
        reply = serve(request)
        return None if self._is_closing or self._is_down else reply

    def _unless_gone(self, request: Request) -> Reply | None:
        return None if self._is_closing or self._is_down else self.answer(request)

    def _due(self, head: Request) -> list[Fault]:
        """Those that a request meets, the outermost last: what holds it up."""
        due: dict[str, Fault] = {}
        for fault in self._faults:
            if fault.kind not in due and fault.applies(head):
                due[fault.kind] = fault
                fault.left -= 1
        self._faults = [fault for fault in self._faults if fault.left > 0]
        return sorted(due.values(), key=lambda fault: fault.kind == "stall")

    def _order(self, fault: Fault) -> None:
        if fault.left:
            with self.changed:
                self._faults.append(fault)

    def _forget(self, kind: str) -> None:
        """Takes back what was ordered of a kind."""
        with self.changed:
            self._faults = [fault for fault in self._faults if fault.kind != kind]

    def _await_release(self, before: int) -> None:
        """Waits for the end, or for an `up()` after those that there were before."""
        with self.changed:
            self.changed.wait_for(lambda: self._is_closing or self._releases != before)

    # --- connections, as http.server calls it ----------------------------------------

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether a new connection is served."""
        with self.changed:
            if self._is_down or self._is_closing:
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
        if reply is None or reply.pieces is not None:
            self.close_connection = True
        if reply is None:
            return
        if not reply.is_raw:
            self.send_response(reply.status)
            for name, text in reply.headers.items():
                self.send_header(name, text)
            if reply.pieces is None and reply.status not in (204, 304):
                self.send_header("Content-Length", str(len(reply.body)))
            self.end_headers()
        for piece in itertools.chain((reply.body,), reply.pieces or ()):
            self.wfile.write(piece)

    do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815  (names that http.server calls)

    def log_message(self, format: str, *args: Any) -> None:
        pass
