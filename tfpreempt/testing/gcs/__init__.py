"""A server of Google Cloud Storage on the loopback interface, with faults to order.

    with GcsServer() as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        store = open_store("gs://bucket/run")
        server.fail(2)  # the next two requests are answered 503

It speaks the JSON API as google-cloud-storage uses it: uploads in one request, in two
parts and in resumable chunks, preconditions with real generations, crc32c and md5,
downloads with ranges, listings in pages. It is a real HTTP server, so any client can be
tested against it, in this process or in another.
"""

from __future__ import annotations

from tfpreempt.testing.gcs._server import GcsServer
from tfpreempt.testing.gcs._service import Request

__all__ = ["GcsServer", "Request"]
