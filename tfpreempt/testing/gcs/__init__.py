"""A server of Google Cloud Storage on the loopback interface, with faults to order.

    with GcsServer() as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        store = open_store("gs://bucket/run")
        server.fail(2)  # the next two requests are answered 503

It speaks the JSON API as google-cloud-storage uses it: uploads in one request, in two
parts and in resumable chunks, preconditions with real generations, crc32c and md5,
downloads with ranges, listings in pages. It is a real HTTP server, so any client can be
tested against it, in this process or in another.

_faults   what goes wrong on the way to and from the fake, as the test ordered it
_objects  the objects of the fake: generations, preconditions, checksums, listings
_server   the fake's sockets: bodies come and go in large pieces
_service  the fake's JSON API: from a request to a reply
_uploads  uploads of the fake: in one request, in two parts, and in many chunks
"""

from __future__ import annotations

from tfpreempt.testing.gcs._server import GcsServer
from tfpreempt.testing.gcs._service import Request

__all__ = ["GcsServer", "Request"]
