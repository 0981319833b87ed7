"""A server of Google Cloud Storage on the loopback interface, with faults to order.

    with GcsServer() as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        store = open_store("gs://bucket/run")
        server.fail(2)  # the next two requests are answered 503

It speaks the JSON API as google-cloud-storage uses it: uploads in one request, in two
parts and in resumable chunks, preconditions with real generations, crc32c and md5,
composed objects, downloads with ranges, listings in pages. It is a real HTTP server, so
any client can be tested against it, in this process or in another.

_objects  the objects of the fake: generations, preconditions, checksums, listings
_server   the fake itself: what goes wrong on demand, and what there is in it
_service  the fake's JSON API: from a request to a reply
"""

from __future__ import annotations

from tests.fakes.gcs._server import GcsServer
from tfpreempt.testing._server import Request

__all__ = ["GcsServer", "Request"]
