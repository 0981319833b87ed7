"""A server that is no metadata server: a captive portal, a bug, or an attacker."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

from tests.fakes.replies import BrokenReply
from tfpreempt.testing._server import FakeServer, Reply, Request

_FLAVOR = {"Metadata-Flavor": "Google"}
_PORTAL = b"<!DOCTYPE html><html><body>Please log in: TRUE</body></html>\n" * 20
_CHUNK = b"T" * 65536
_DRIP_SECONDS = 0.02


class HostileServer(FakeServer):
    """Answers every request in one wrong way. Some kinds have the header of GCE.

    Args:
        kind: one of `KINDS`:
            html: a login page, without the flavour header.
            html-with-flavor: the same with the header.
            html-with-nonce: with the header, and a new number in each reply.
            no-flavor: a correct reply without the header.
            huge: 10 MB.
            redirect: to `elsewhere`.
            endless: an endless body, at full speed.
            drip: an endless body, byte by byte.
            drip-head: endless headers, byte by byte.
            negative-chunk: a chunk of length -1, then an endless body.
            cut: half of the announced body.
            noise: no HTTP.
            bomb: compressed without a request for compression.
        elsewhere: destination of a redirect.
    """

    def __init__(self, kind: str, elsewhere: str = "http://127.0.0.1:9/") -> None:
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r}: expected one of {KINDS}")
        self._kind = kind
        self._elsewhere = elsewhere
        self._nonces = itertools.count()
        super().__init__()

    def environment(self) -> dict[str, str]:
        return {
            "GCE_METADATA_HOST": self.host,
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": self.url,
            "TFPREEMPT_AZURE_METADATA": self.host,
        }

    def answer(self, request: Request) -> Reply:
        return _REPLIES[self._kind](self)

    def nonce(self) -> Reply:
        """A page that is never the same."""
        page = b"<html>'%d' \"%d\"</html>" % ((next(self._nonces),) * 2)
        return Reply(body=page, headers=_FLAVOR)

    def redirect(self) -> Reply:
        """To elsewhere."""
        headers = {**_FLAVOR, "Location": self._elsewhere}
        return Reply(status=302, headers=headers)

    def drip(self, first: bytes) -> Iterator[bytes]:
        """A byte at a time, until the server is closed."""
        yield first
        while self.pause(_DRIP_SECONDS):
            yield b"T"

    def endless(self, first: bytes = b"") -> Iterator[bytes]:
        """Yields bytes at full speed until the server is closed."""
        yield first
        while self.pause(0.0):
            yield _CHUNK


@functools.cache
def _ten_megabytes() -> bytes:
    return b'"' + b"T" * 10_000_000


_REPLIES: dict[str, Callable[[HostileServer], Reply]] = {
    "html": lambda server: Reply(body=_PORTAL),
    "html-with-flavor": lambda server: Reply(body=_PORTAL, headers=_FLAVOR),
    "html-with-nonce": HostileServer.nonce,
    "no-flavor": lambda server: Reply(body=b'"TRUE"', headers={"ETag": "1"}),
    "huge": lambda server: Reply(body=_ten_megabytes(), headers=_FLAVOR),
    "redirect": HostileServer.redirect,
    "endless": lambda server: BrokenReply(pieces=server.endless(), headers=_FLAVOR),
    "drip": lambda server: BrokenReply(pieces=server.drip(b'"'), headers=_FLAVOR),
    "drip-head": lambda server: BrokenReply(
        pieces=server.drip(b"HTTP/1.1 200 OK\r\nX-Slow: "), is_raw=True
    ),
    "negative-chunk": lambda server: BrokenReply(
        pieces=server.endless(b"-1\r\n"),
        headers={**_FLAVOR, "Transfer-Encoding": "chunked"},
    ),
    "cut": lambda server: BrokenReply(
        pieces=iter([b'"TRUE"']), headers={**_FLAVOR, "Content-Length": "1000"}
    ),
    "noise": lambda server: BrokenReply(pieces=iter([b"\x00\xff" * 500]), is_raw=True),
    "bomb": lambda server: Reply(
        body=b"\x1f\x8b\x08\x00" * 100, headers={**_FLAVOR, "Content-Encoding": "gzip"}
    ),
}
KINDS = tuple(_REPLIES)
