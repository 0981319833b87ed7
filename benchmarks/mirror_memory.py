"""Measures the memory that an upload and a download of a large commit need.

Upload and download each run in a separate process. A tiny commit is transferred first,
so that imports and one-time initialization do not count. Then a large commit is
transferred, and the largest resident set is compared with that after the tiny commit.
On a network with random faults (`campaigns/stores.py`), failed transfers are retried,
as a mirror and a start retry them.

Usage, by the bench itself: python -m benchmarks.mirror_memory upload|download ...
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import bucket
from benchmarks.mirror_speed import THREADS, make_commit, workplace
from benchmarks.row import alone
from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog
from tfpreempt.checkpoint.directory.catalog import Entry
from tfpreempt.checkpoint.mirror import download, upload
from tfpreempt.storage.object_store import ObjectStore
from tfpreempt.storage.open_store import open_store

BAR = 64.0  # MiB
SMALL = 64 << 10
PLACE = "gs://bucket/run"
TRIES = 20


def rows(mebibytes: int = 1024) -> Iterator[dict[str, Any]]:
    """Yields rows for an upload and a download, with one large file and with eight.

    Args:
        mebibytes: size of the commit.
    """
    for count in (1, THREADS):
        with workplace() as root, bucket.serving():
            for way in ("upload", "download"):
                yield alone(
                    "mirror_memory",
                    [grown(way, root, count, mebibytes)],
                    unit="MiB",
                    bar=BAR,
                    digits=1,
                    way=way,
                    data_files=count,
                    mebibytes=mebibytes,
                    threads=THREADS,
                )


def grown(
    way: str, root: Path, count: int, mebibytes: int, place: str = PLACE
) -> float:
    """Returns the MiB by which a process grows during the transfer of a commit.

    Args:
        way: "upload", or "download" after the upload.
        root: local directory of the commit.
        count: number of large files.
        mebibytes: size of the commit.
        place: URL of the uploaded commit.
    """
    command = [sys.executable, "-m", __name__, way, place, str(root), str(count)]
    done = subprocess.run(
        [*command, str(mebibytes)],
        cwd=bucket.ROOT,
        check=True,
        stdout=subprocess.PIPE,
        timeout=600,
    )
    return float(done.stdout)


# --- the process ---------------------------------------------------------------------


def program(way: str, place: str, root: Path, count: int, size: int) -> None:
    """Prints the MiB by which the process grew."""
    act = _upload if way == "upload" else _download
    store = open_store(place)
    small = make_commit(root / "small", count, SMALL, step=1)
    large = make_commit(root / "large", count, size, step=2)
    _until_through(act, store, small, root)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    _until_through(act, store, large, root)
    print((_resident("VmHWM") - before) / 1024)


def _until_through(
    act: Callable[[ObjectStore, Entry, Path], None],
    store: ObjectStore,
    commit: Entry,
    root: Path,
) -> None:
    for left in reversed(range(TRIES)):
        try:
            act(store, commit, root)
            break
        except errors.CheckpointError:
            if not left:
                raise


def _upload(store: ObjectStore, source: Entry, root: Path) -> None:
    upload.Upload(store, source, threads=THREADS).run()


def _download(store: ObjectStore, source: Entry, root: Path) -> None:
    folder = catalog.folder_name(source.step or 0, source.token)
    found = catalog.read(catalog.unread_entry(store, folder))
    download.download(found, str(root / "target" / folder))


def _resident(field: str) -> int:
    """Returns a memory field of /proc/self/status in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0])
    raise KeyError(field)


if __name__ == "__main__":
    way, place, root, count, mebibytes = sys.argv[1:]
    program(way, place, Path(root), int(count), int(mebibytes) << 20)
