"""Measures the speed of `tfpreempt verify`, beside a plain read of the same files.

Both sides read with the same number of threads and in pieces of the same size; rounds
are interleaved. The data are one large file, as TensorFlow writes it, and the same
bytes in many files. The files are read from the page cache, where the checksum matters
most (a checksum at 25 GB/s takes a fifth to a quarter of the time of a copy at 7 GB/s),
and from the disk, as an older checkpoint is read.
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

from benchmarks.row import compare, file_system
from tfpreempt.checkpoint.directory.catalog import Entry, Kind
from tfpreempt.checkpoint.directory.manifest import FileEntry, Manifest
from tfpreempt.checkpoint.restore.verification import faults
from tfpreempt.storage import checksum
from tfpreempt.storage.local import LocalStore

BAR = 0.8  # of the speed
PIECE = 2 << 20
RANGE = 64 << 20
MANY = 256


def rows(rounds: int = 5, mebibytes: int = 512) -> Iterator[dict[str, Any]]:
    """Yields a row for one large file and a row for many files, cached and uncached.

    Args:
        rounds: number of rounds of each row.
        mebibytes: total size of the files.
    """
    threads = min(8, os.cpu_count() or 1)
    for count in (1, MANY):
        root = Path(tempfile.mkdtemp(prefix="tfpreempt-bench-"))
        place = file_system(root)
        has_disk = place not in ("", "tmpfs", "ramfs")
        try:
            files = _write(root, count, (mebibytes << 20) // count)
            for is_cached in (True, False) if has_disk else (True,):
                ours, theirs = [], []
                for _ in range(rounds):
                    theirs.append(_seconds(_plain, root, files, threads, is_cached))
                    ours.append(_seconds(_verify, root, files, threads, is_cached))
                yield compare(
                    "verify_speed",
                    ours,
                    theirs,
                    unit="s",
                    bar=round(1 / BAR, 3),
                    digits=4,
                    place=place,
                    read_from="cache" if is_cached else "disk",
                    files=count,
                    mebibytes=mebibytes,
                    threads=threads,
                )
        finally:
            shutil.rmtree(root)


def _write(root: Path, count: int, size: int) -> list[FileEntry]:
    block = random.Random(0).randbytes(PIECE)
    entries = []
    for index in range(count):
        path = root / f"{index:04d}.bin"
        with path.open("wb") as file:
            for left in range(size, 0, -PIECE):
                file.write(block[:left])
            os.fsync(file.fileno())  # only synced pages can leave the cache
        written, crc = checksum.of_file(str(path))
        entries.append(FileEntry(name=path.name, size=written, crc32c=crc))
    return entries


def _seconds(
    do: Callable[[Path, list[FileEntry], int], None],
    root: Path,
    files: list[FileEntry],
    threads: int,
    is_cached: bool,
) -> float:
    for entry in () if is_cached else files:
        descriptor = os.open(root / entry.name, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    begin = time.perf_counter()
    do(root, files, threads)
    return time.perf_counter() - begin


def _verify(root: Path, files: list[FileEntry], threads: int) -> None:
    manifest = Manifest(
        step=1, sequence=1, world_size=1, workers=(), files=tuple(files)
    )
    store = LocalStore(str(root))
    commit = Entry(store=store, name="", kind=Kind.OWN, manifest=manifest)
    assert faults(commit, every_byte=True, threads=threads) == {}


def _plain(root: Path, files: list[FileEntry], threads: int) -> None:
    """Reads and drops all bytes."""
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
