"""crc32c of files, in chunks, several files at a time.

google-crc32c releases the GIL on large buffers and runs at about 13 GB/s here, so
reading the bytes is what costs; threads pay when there is more than one file.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Iterable

import google_crc32c

_CHUNK_BYTES = 4 << 20
_THREADS = 4


def of_bytes(data: bytes) -> int:
    """The crc32c of some bytes, as an unsigned 32-bit number."""
    return int(google_crc32c.value(data))


def of_file(path: str) -> tuple[int, int]:
    """Size in bytes and crc32c of a file.

    Raises:
        OSError: it cannot be read.
    """
    size, crc = 0, 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = google_crc32c.extend(crc, chunk)
            size += len(chunk)
    return size, int(crc)


def of_files(paths: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Size and crc32c of many files, by path.

    Raises:
        OSError: one of them cannot be read; `filename` tells which.
    """
    todo = sorted(paths)
    threads = min(_THREADS, os.cpu_count() or 1, len(todo))
    if threads <= 1:
        return {path: of_file(path) for path in todo}
    with concurrent.futures.ThreadPoolExecutor(
        threads, thread_name_prefix="tfpreempt-crc"
    ) as pool:
        return dict(zip(todo, pool.map(of_file, todo), strict=True))
