"""What all fake servers share: a port of the loopback interface, threads, an end."""

from __future__ import annotations

import http.server
import itertools
import socket
import threading
from collections.abc import Callable
from typing import Any

from tfpreempt.core.threads import OwnedThread

_POLL_SECONDS = 0.01
_CLOSE_LIMIT_SECONDS = 5.0
_names = itertools.count()


class LoopbackServer(http.server.ThreadingHTTPServer):
    """A server on a free port of 127.0.0.1; a context manager.

    Args:
        name: of its threads, so that a test can tell them from its own.
        handler: what serves a connection; it reaches this object as `server`.
    """

    request_queue_size = 32
    _port = 0  # any free one

    def __init__(
        self, name: str, handler: type[http.server.BaseHTTPRequestHandler]
    ) -> None:
        super().__init__(("127.0.0.1", self._port), handler)
        self.changed = threading.Condition()
        self._name = name
        self._is_closing = False
        self._is_down = False
        self._is_stalled = False
        self._connections: set[socket.socket] = set()
        self._thread = OwnedThread(
            f"{name}-{next(_names)}", lambda: self.serve_forever(_POLL_SECONDS)
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


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection: each request is served by `serve`; nothing is printed."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet: no delay between the two

    def serve(self) -> None:
        """Reads a request whose head is known, and answers it."""
        raise NotImplementedError

    def do_GET(self) -> None:
        self.serve()

    def do_PUT(self) -> None:
        self.serve()

    def do_POST(self) -> None:
        self.serve()

    def log_message(self, format: str, *args: Any) -> None:
        pass
