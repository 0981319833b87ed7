"""How fast commits come to a bucket and back, against `requests` and nothing else.

Both move the same files to and from the same server, which is a process of its own; a
round is one of each. `requests` sends each file in one request and gets it in one, as
many files at a time as we use threads. It checks nothing; our side computes and
compares the checksums of all that it moves, asks for preconditions, and makes what it
writes durable (in memory here, so that no disk is measured).

Two shapes: a checkpoint as TensorFlow writes it, nearly all of it in one file, and the
same bytes in eight.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import requests

from tests.bench import bucket
from tests.bench.row import compare
from tfpreempt.checkpoint import catalog, layout
from tfpreempt.checkpoint.catalog import Entry
from tfpreempt.checkpoint.manifest import FileEntry, Manifest, to_json
from tfpreempt.checkpoint.remote import download, upload
from tfpreempt.storage import checksum
from tfpreempt.storage.interface import ObjectStore
from tfpreempt.storage.local import LocalStore
from tfpreempt.storage.opening import open_store

BAR = 0.8  # of the speed
THREADS = 8
PIECE = 4 << 20
SMALL = {"ckpt.index": 20_000, "states/epoch.state": 100, "states/rng.state": 5_000}
DATA = "ckpt.data-{:05d}-of-{:05d}"


def rows(wanted: set[str], rounds: int, mebibytes: int) -> Iterator[dict[str, Any]]:
    """Rows of `mirror_upload` and `mirror_download`, for both shapes."""
    for count in (1, THREADS):
        with workplace() as root, bucket.serving() as url:
            source = make_commit(root / "commit", count, mebibytes << 20)
            found = Moves(source, url, root).measure(rounds)
        for bench in ("mirror_upload", "mirror_download"):
            if bench in wanted:
                yield compare(
                    bench,
                    *found[bench],
                    unit="s",
                    bar=round(1 / BAR, 3),
                    data_files=count,
                    mebibytes=mebibytes,
                    threads=THREADS,
                )


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A directory in memory."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="tfpreempt-bench-", dir=memory) as name:
        yield Path(name)


def make_commit(base: Path, count: int, size: int, *, step: int = 1) -> Entry:
    """Writes files as a checkpoint has them, `count` large ones among them."""
    sizes = {DATA.format(i, count): size // count for i in range(count)} | SMALL
    block = random.Random(step).randbytes(PIECE)
    entries = []
    for name, length in sorted(sizes.items()):
        path = base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for left in range(length, 0, -PIECE):
                file.write(block[:left])
        written, crc = checksum.of_file(str(path))
        entries.append(FileEntry(name=name, size=written, crc32c=crc))
    manifest = Manifest(
        step=step,
        sequence=step,
        world_size=1,
        workers=(0,),
        files=tuple(entries),
        prefix="ckpt",
    )
    data = to_json(manifest)
    (base / layout.MANIFEST).write_bytes(data)
    (base / layout.MARKER).write_bytes(catalog.marker_bytes(data, step))
    return catalog.read(catalog.unread(LocalStore(str(base))))


class Moves:
    """One commit, to be moved in all ways."""

    def __init__(self, source: Entry, url: str, root: Path) -> None:
        self._source = source
        self._folder = catalog.folder_name(source.step or 0, source.token)
        self._url = url
        self._target = root / "target"
        self._store = open_store("gs://bucket/run")

    def measure(self, rounds: int) -> dict[str, tuple[list[float], list[float]]]:
        """Seconds of ours and of theirs."""
        seconds: dict[str, tuple[list[float], list[float]]] = {
            "mirror_upload": ([], []),
            "mirror_download": ([], []),
        }
        for number in range(rounds + 1):
            for bench, ways in (
                ("mirror_upload", (self._upload, self._post)),
                ("mirror_download", (self._download, self._get)),
            ):
                for way, found in zip(ways, seconds[bench], strict=True):
                    if bench == "mirror_upload":
                        empty(self._store)
                    else:
                        shutil.rmtree(self._target, ignore_errors=True)
                    took = timed(way)
                    if number:  # the first is a warm-up
                        found.append(took)
        return seconds

    def _upload(self) -> None:
        upload.Upload(self._store, self._source, threads=THREADS).run()

    def _download(self) -> None:
        found = catalog.read(catalog.unread(self._store, self._folder))
        download.download(found, str(self._target), threads=THREADS)

    def _post(self) -> None:
        """Into the same names, for the reading that follows."""
        self._crew(self._post_file)
        source = self._source
        controls = {layout.MANIFEST: source.data, layout.MARKER: source.marker}
        for name, data in controls.items():
            with requests.Session() as session:
                self._send(session, name, data)

    def _post_file(self, session: requests.Session, name: str) -> None:
        with open(self._source.file(name), "rb") as file:
            self._send(session, name, file)

    def _send(self, session: requests.Session, name: str, data: Any) -> None:
        session.post(
            f"{self._url}/upload/storage/v1/b/bucket/o",
            params={"uploadType": "media", "name": self._key(name)},
            data=data,
            timeout=60,
        ).raise_for_status()

    def _get(self) -> None:
        self._crew(self._get_file)

    def _get_file(self, session: requests.Session, name: str) -> None:
        path = self._target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        url = f"{self._url}/bucket/{self._key(name)}"
        with session.get(url, stream=True, timeout=60) as reply, path.open("wb") as out:
            reply.raise_for_status()
            for piece in reply.iter_content(1 << 20):
                out.write(piece)

    def _crew(self, act: Callable[[requests.Session, str], None]) -> None:
        files = self._source.manifest.files if self._source.manifest else ()
        names = [entry.name for entry in files]
        with (
            requests.Session() as session,
            concurrent.futures.ThreadPoolExecutor(THREADS) as pool,
        ):
            session.mount("http://", requests.adapters.HTTPAdapter(pool_maxsize=32))
            for _ in pool.map(lambda name: act(session, name), names):
                pass

    def _key(self, name: str) -> str:
        return f"run/{self._folder}/{name}"


def empty(store: ObjectStore) -> None:
    """Deletes all that is there."""
    for name in list(store.list()):
        store.delete(name)


def timed(act: Callable[[], None]) -> float:
    """Seconds."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began
