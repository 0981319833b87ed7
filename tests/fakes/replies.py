"""Replies that no correct server gives."""

from __future__ import annotations

import dataclasses
import http.server
from collections.abc import Iterable

from tfpreempt.testing._server import Reply


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BrokenReply(Reply):
    """A reply without a correct length; the connection ends after the reply.

    Attributes:
        pieces: data sent after the body, until the client or the server closes.
        is_raw: whether only body and pieces are sent, without a status line and
            headers.
    """

    pieces: Iterable[bytes] = ()
    is_raw: bool = False

    def send(self, to: http.server.BaseHTTPRequestHandler) -> None:
        to.close_connection = True
        if not self.is_raw:
            to.send_response(self.status)
            for name, text in self.headers.items():
                to.send_header(name, text)
            to.end_headers()
        to.wfile.write(self.body)
        for piece in self.pieces:
            to.wfile.write(piece)
