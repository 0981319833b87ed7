"""Azurite, Microsoft's emulator of Azure Blob Storage, in a process of its own."""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import hmac
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import requests

from tests.ports import free_ports

_INSTALLED = Path(__file__).parents[2] / "build/azurite/node_modules/.bin"
_PROGRAM = shutil.which("azurite-blob", path=f"{_INSTALLED}:{os.environ['PATH']}")
MISSING = "" if _PROGRAM else "Azurite is not installed; make test-more installs it"
_ACCOUNT = "devstoreaccount1"
# The key of this account is the same everywhere, and public.
_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoG"
    "MGw=="
)


@contextlib.contextmanager
def serving() -> Iterator[dict[str, str]]:
    """Context with Azurite and its container "bucket".

    Yields:
        The environment by which clients find the server.
    """
    assert _PROGRAM is not None
    (port,) = free_ports(1)
    options = ["--silent", "--inMemoryPersistence", "--disableTelemetry"]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [_PROGRAM, "--blobPort", str(port), *options],
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            assert any("successfully listen" in line for line in process.stdout)
            url = f"http://127.0.0.1:{port}"
            _create_container(url)
            yield {
                "AZURE_STORAGE_USE_EMULATOR": "true",
                "AZURITE_BLOB_STORAGE_URL": url,
            }
        finally:
            process.kill()  # its blobs are in memory


def _create_container(url: str) -> None:
    """Sends the one request without a function in obstore."""
    headers = {
        "x-ms-date": email.utils.formatdate(usegmt=True),
        "x-ms-version": "2021-12-02",
    }
    lines = [f"{name}:{text}" for name, text in headers.items()]
    resource = f"/{_ACCOUNT}/{_ACCOUNT}/bucket\nrestype:container"
    signed = "\n".join(["PUT", *[""] * 11, *lines, resource]).encode()
    digest = hmac.digest(base64.b64decode(_KEY), signed, hashlib.sha256)
    signature = base64.b64encode(digest).decode()
    headers["Authorization"] = f"SharedKey {_ACCOUNT}:{signature}"
    target = f"{url}/{_ACCOUNT}/bucket?restype=container"
    requests.put(target, headers=headers, timeout=60).raise_for_status()
