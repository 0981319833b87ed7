"""HTTP over sockets with a total deadline, a byte limit, and a way to be cut off.

The time-outs of `requests` hold for one read of a socket each: a server that sends a
byte now and then is never late. So the limits are set where all bytes pass, at the
socket: head, body, chunk sizes and trailers count alike.

This module imports requests; `_http.py` imports it when the first request is made.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import requests.adapters
import urllib3
import urllib3.connection

from tfpreempt.notice._http import Limits


class Budget:
    """What one request may still cost; shared by a session's sockets.

    Any thread may `close()` it, all else is for the thread that makes the requests.

    Attributes:
        verdict: why the last request was cut off; "" if it was not.
    """

    def __init__(self) -> None:
        self.verdict = ""
        self._until = 0.0
        self._bytes_left = 0
        self._lock = threading.Lock()
        self._sockets: set[BoundedSocket] = set()
        self._is_closed = False

    def begin(self, limits: Limits) -> None:
        """A new request begins."""
        self.verdict = ""
        self._until = time.monotonic() + limits.total_seconds
        self._bytes_left = limits.answer_bytes

    def remaining_seconds(self) -> float:
        """The seconds that are left, more than 0.

        Raises:
            TimeoutError: none are.
        """
        remaining = self._until - time.monotonic()
        if remaining <= 0:
            self.note_late()
            raise TimeoutError(self.verdict)
        return remaining

    def note_late(self) -> None:
        """The time is up."""
        self.verdict = "its answer was not complete in time"

    def spend(self, count: int) -> None:
        """So many bytes have come.

        Raises:
            ConnectionAbortedError: more than an answer may have.
        """
        self._bytes_left -= count
        if self._bytes_left < 0:
            self.verdict = "its answer is longer than any that is expected"
            raise ConnectionAbortedError(self.verdict)

    def adopt(self, plain: socket.socket) -> BoundedSocket:
        """Takes a connected socket over.

        Raises:
            ConnectionAbortedError: the session is closed.
        """
        bounded = BoundedSocket(plain, self)
        with self._lock:
            # Connections that were closed elsewhere are let go of here.
            self._sockets = {each for each in self._sockets if each.fileno() >= 0}
            if not self._is_closed:
                self._sockets.add(bounded)
                return bounded
        bounded.close()
        raise ConnectionAbortedError("the session was closed")

    def close(self) -> None:
        """Ends whatever waits for an answer, at once. Any thread."""
        with self._lock:
            self._is_closed = True
            sockets, self._sockets = self._sockets, set()
        for each in sockets:
            try:
                each.shutdown(socket.SHUT_RDWR)  # wakes its reader; close() would not
            except OSError:
                pass  # it is closed, or the other side was first


class BoundedSocket(socket.socket):
    """A socket that reads within a budget."""

    def __init__(self, plain: socket.socket, budget: Budget) -> None:
        family, kind, protocol = plain.family, plain.type, plain.proto
        timeout = plain.gettimeout()
        super().__init__(family, kind, protocol, fileno=plain.detach())
        self.settimeout(timeout)
        self._budget = budget

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Reads as any socket, until the time or the bytes are used up."""
        self.settimeout(self._budget.remaining_seconds())
        try:
            count = super().recv_into(buffer, nbytes, flags)
        except TimeoutError:
            self._budget.note_late()
            raise
        self._budget.spend(count)
        return count


class BoundedAdapter(requests.adapters.HTTPAdapter):
    """Sends requests over sockets of one budget, one connection at a time."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        super().__init__(pool_connections=1, pool_maxsize=1, max_retries=0)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        # No pool for https: only plain http is ever asked for.
        pools = {"http": _pool_class(self._budget)}
        self.poolmanager.pool_classes_by_scheme = pools


def _pool_class(budget: Budget) -> type[urllib3.HTTPConnectionPool]:
    class Connection(urllib3.connection.HTTPConnection):
        def connect(self) -> None:
            super().connect()
            self.sock = budget.adopt(self.sock)

    class Pool(urllib3.HTTPConnectionPool):
        ConnectionCls = Connection

    return Pool
