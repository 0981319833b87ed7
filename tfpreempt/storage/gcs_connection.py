"""Connections whose every wait ends by the deadline of the call that they serve.

A socket's time-out holds for each packet anew: an upload that stalls in its last second
would wait as long again as the whole call may take.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import requests.adapters
import urllib3
import urllib3.connection

from tfpreempt.storage.limits import Limit

# More threads than this wait for a connection that another one keeps.
_CONNECTIONS = 32
_current = threading.local()


@contextlib.contextmanager
def limited(limit: Limit) -> Iterator[None]:
    """In the body, this thread's connections wait no longer than the limit says."""
    before = current()
    _current.limit = limit
    try:
        yield
    finally:
        _current.limit = before


def current() -> Limit | None:
    """The limit of the call that this thread is in."""
    limit: Limit | None = getattr(_current, "limit", None)
    return limit


class _Timed:
    """What both kinds of connection do before they wait."""

    sock: Any
    timeout: Any

    def send(self, data: Any) -> Any:
        limit = current()
        if limit is not None and self.sock is not None:
            self.sock.settimeout(limit.request())
        above: Any = super()
        return above.send(data)

    def getresponse(self) -> Any:
        limit = current()
        if limit is not None:
            self.timeout = limit.request()
        above: Any = super()
        return above.getresponse()


class PlainConnection(_Timed, urllib3.connection.HTTPConnection):
    """To a test server."""


class _SecureConnection(_Timed, urllib3.connection.HTTPSConnection):
    """To the service."""


class _PlainPool(urllib3.HTTPConnectionPool):
    ConnectionCls = PlainConnection


class _SecurePool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _SecureConnection


class TimedAdapter(requests.adapters.HTTPAdapter):
    """Makes such connections, enough for many threads."""

    def __init__(self) -> None:
        super().__init__(pool_connections=4, pool_maxsize=_CONNECTIONS)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {
            "http": _PlainPool,
            "https": _SecurePool,
        }
