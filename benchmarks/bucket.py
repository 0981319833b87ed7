"""Runs a loopback bucket in a separate process, with an interpreter of its own.

Usage: python -m benchmarks.bucket; the process serves until its standard input ends.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
VARIABLE = "STORAGE_EMULATOR_HOST"


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Context manager: serves "gs://bucket/..."; yields the server's address."""
    command = [sys.executable, "-m", __name__]
    pipe = subprocess.PIPE
    before = os.environ.get(VARIABLE)
    with subprocess.Popen(
        command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True
    ) as server:
        assert server.stdout is not None
        os.environ[VARIABLE] = url = server.stdout.readline().strip()
        try:
            yield url
        finally:
            del os.environ[VARIABLE]
            if before is not None:
                os.environ[VARIABLE] = before
            server.communicate(timeout=30)  # ends its input


def serve() -> None:
    """Serves until standard input ends."""
    from tests.fakes.gcs import GcsServer

    with GcsServer() as server:
        print(server.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    serve()
