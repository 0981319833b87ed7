"""How fast `tfpreempt verify` reads, against reading the same files and no more.

Both read with the same number of threads and in pieces of the same size; rounds are
interleaved. One large data file, as TensorFlow writes it, and the same bytes in many.
On a disk both are as fast as the disk; here the files are in the page cache, where the
checksum shows most.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.bench.row import compare
from tfpreempt.checkpoint import checksum
from tfpreempt.checkpoint.manifest import FileEntry
from tfpreempt.checkpoint.storage.readonly import ReadingStore
from tfpreempt.checkpoint.verification import Effort, check_bytes

BAR = 0.8  # of the speed
PIECE = 2 << 20
RANGE = 64 << 20
MANY = 256


def rows(rounds: int, mebibytes: int) -> Iterator[dict[str, Any]]:
    """A row for one large file, and one for many small ones."""
    threads = min(8, os.cpu_count() or 1)
    for count in (1, MANY):
        root = Path(tempfile.mkdtemp(prefix="tfpreempt-bench-"))
        try:
            files = _write(root, count, (mebibytes << 20) // count)
            ours, theirs = [], []
            for _ in range(rounds):
                theirs.append(_seconds(_plain, root, files, threads))
                ours.append(_seconds(_verify, root, files, threads))
        finally:
            shutil.rmtree(root)
        yield compare(
            "verify",
            ours,
            theirs,
            unit="s",
            bar=round(1 / BAR, 3),
            digits=4,
            files=count,
            mebibytes=mebibytes,
            threads=threads,
        )


def _write(root: Path, count: int, size: int) -> list[FileEntry]:
    block = random.Random(0).randbytes(PIECE)
    entries = []
    for index in range(count):
        path = root / f"{index:04d}.bin"
        with path.open("wb") as file:
            for left in range(size, 0, -PIECE):
                file.write(block[:left])
        written, crc = checksum.of_file(str(path))
        entries.append(FileEntry(name=path.name, size=written, crc32c=crc))
    return entries


def _seconds(
    do: Callable[[Path, list[FileEntry], int], None],
    root: Path,
    files: list[FileEntry],
    threads: int,
) -> float:
    begin = time.perf_counter()
    do(root, files, threads)
    return time.perf_counter() - begin


def _verify(root: Path, files: list[FileEntry], threads: int) -> None:
    assert check_bytes(ReadingStore(str(root)), "", files, Effort(threads)) == []


def _plain(root: Path, files: list[FileEntry], threads: int) -> None:
    """Reads all bytes, and drops them."""
    lock = threading.Lock()
    ranges = itertools.chain.from_iterable(
        ((entry.name, offset) for offset in range(0, entry.size, RANGE))
        for entry in files
    )

    def work() -> None:
        while True:
            with lock:
                part = next(ranges, None)
            if part is None:
                return
            name, offset = part
            with open(root / name, "rb", buffering=0) as file:
                file.seek(offset)
                left = RANGE
                while left and (piece := file.read(min(PIECE, left))):
                    left -= len(piece)

    crew = [threading.Thread(target=work) for _ in range(threads)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
