"""A server of Google Cloud Storage on the loopback interface, with faults on request.

    with GcsServer() as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        store = open_store("gs://bucket/run")
        server.fail(2)  # the next two requests are answered 503

The server has the part of the JSON API that google-cloud-storage uses: uploads in one
request, in two parts and in resumable chunks, preconditions with real generations,
crc32c and md5, composed objects, downloads with ranges, listings in pages. Any client
can be tested with the server, from any process, because it is a real HTTP server.

_objects  the objects of the fake: generations, preconditions, checksums, listings
_server   the fake itself: its faults and its contents
_service  the JSON API of the fake: from a request to a reply
"""

from __future__ import annotations

from tests.fakes.gcs._server import GcsServer
from tfpreempt.testing._server import Request

__all__ = ["GcsServer", "Request"]
