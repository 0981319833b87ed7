"""Measures uploads and downloads of commits, beside plain transfers by `requests`.

Both sides transfer the same files to and from the same server, a separate process; a
round is one transfer of each side. `requests` sends each file in one request, or one
request per part if tfpreempt sends parts, and downloads each file in one request, with
as many requests at a time as tfpreempt uses threads. This side checks nothing, and does
not assemble the parts into an object. tfpreempt computes and compares the checksums of
all bytes, sends preconditions, and makes written files durable (in memory here, so that
no disk is measured).

There are three shapes: a checkpoint as TensorFlow writes it, with nearly all bytes in
one file; the same bytes in eight files; and one larger file, which is only uploaded.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import requests

from benchmarks import bucket
from benchmarks.row import compare
from tfpreempt.checkpoint.directory import catalog, layout
from tfpreempt.checkpoint.directory.catalog import Entry
from tfpreempt.checkpoint.directory.manifest import FileEntry, Manifest, to_json
from tfpreempt.checkpoint.mirror import download, upload
from tfpreempt.checkpoint.mirror.download_target import Range
from tfpreempt.storage import checksum
from tfpreempt.storage.local import LocalStore
from tfpreempt.storage.object_store import ObjectStore
from tfpreempt.storage.open_store import open_store

BAR = 0.8  # of the speed
LARGE_BAR = 0.9
THREADS = 8
WAYS = ("upload", "download")
_Job = TypeVar("_Job")
PIECE = 4 << 20
SMALL = {"ckpt.index": 20_000, "states/epoch.state": 100, "states/rng.state": 5_000}
DATA = "ckpt.data-{:05d}-of-{:05d}"


def rows(
    rounds: int = 5, mebibytes: int = 512, large_mebibytes: int = 2048
) -> Iterator[dict[str, Any]]:
    """Yields a row for each direction and shape.

    Args:
        rounds: number of rounds of each row.
        mebibytes: size of the commits that are uploaded and downloaded.
        large_mebibytes: size of the commit that is only uploaded.
    """
    for count, size, bar, ways in (
        (1, mebibytes, BAR, WAYS),
        (THREADS, mebibytes, BAR, WAYS),
        (1, large_mebibytes, LARGE_BAR, WAYS[:1]),
    ):
        with workplace() as root, bucket.serving() as url:
            source = make_commit(root / "commit", count, size << 20)
            found = Moves(source, url, root).measure(ways, rounds)
        for way, seconds in found.items():
            yield compare(
                "mirror_speed",
                *seconds,
                unit="s",
                bar=round(1 / bar, 3),
                way=way,
                data_files=count,
                mebibytes=size,
                threads=THREADS,
            )


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """Context manager: creates a directory in memory."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="tfpreempt-bench-", dir=memory) as name:
        yield Path(name)


def make_commit(base: Path, count: int, size: int, *, step: int = 1) -> Entry:
    """Writes files like those of a checkpoint, with `count` large files."""
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
    return catalog.read(catalog.unread_entry(LocalStore(str(base))))


class Moves:
    """Transfers one commit by tfpreempt and by `requests`."""

    def __init__(self, source: Entry, url: str, root: Path) -> None:
        self._source = source
        self._folder = catalog.folder_name(source.step or 0, source.token)
        self._url = url
        self._target = root / "target"
        self._store = open_store("gs://bucket/run")

    def measure(
        self, ways: Sequence[str], rounds: int
    ) -> dict[str, tuple[list[float], list[float]]]:
        """Returns the seconds of tfpreempt and of `requests`; round one is a warm-up.

        Args:
            ways: names of `WAYS`, in order: a download needs an earlier upload.
            rounds: number of rounds of each way.
        """
        acts = {
            "upload": (self._post, self._upload),
            "download": (self._get, self._download),
        }
        seconds: dict[str, tuple[list[float], list[float]]] = {
            way: ([], []) for way in ways
        }
        for number in range(rounds + 1):
            for way in ways:
                theirs, ours = (self._timed(way, act) for act in acts[way])
                if number:
                    seconds[way][0].append(ours)
                    seconds[way][1].append(theirs)
        return seconds

    def _timed(self, way: str, act: Callable[[], None]) -> float:
        """Returns the seconds of one side, after the removal of earlier files."""
        if way == "upload":
            empty(self._store)
        else:
            shutil.rmtree(self._target, ignore_errors=True)
        return timed(act)

    def _upload(self) -> None:
        upload.Upload(self._store, self._source, threads=THREADS).run()

    def _download(self) -> None:
        found = catalog.read(catalog.unread_entry(self._store, self._folder))
        download.download(found, str(self._target), threads=THREADS)

    def _post(self) -> None:
        """Uploads in as many streams as tfpreempt."""
        manifest, source = self._source.manifest, self._source
        assert manifest is not None
        self._crew(
            self._post_part,
            [
                (entry.name, part)
                for entry in manifest.files
                for part in upload.parts_of(
                    entry.size,
                    manifest.bytes,
                    threads=THREADS,
                    smallest=upload.SMALLEST,
                )
            ],
        )
        controls = {layout.MANIFEST: source.data, layout.MARKER: source.marker}
        for name, data in controls.items():
            with requests.Session() as session:
                self._send(session, name, data)

    def _post_part(self, session: requests.Session, job: tuple[str, Range]) -> None:
        name, part = job
        with _Part(self._source.file(name), part) as file:
            self._send(session, f"{name}.{part.offset}", file)

    def _send(self, session: requests.Session, name: str, data: Any) -> None:
        session.post(
            f"{self._url}/upload/storage/v1/b/bucket/o",
            params={"uploadType": "media", "name": self._key(name)},
            data=data,
            timeout=60,
        ).raise_for_status()

    def _get(self) -> None:
        files = self._source.manifest.files if self._source.manifest else ()
        self._crew(self._get_file, [entry.name for entry in files])

    def _get_file(self, session: requests.Session, name: str) -> None:
        path = self._target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        url = f"{self._url}/bucket/{self._key(name)}"
        with session.get(url, stream=True, timeout=60) as reply, path.open("wb") as out:
            reply.raise_for_status()
            for piece in reply.iter_content(1 << 20):
                out.write(piece)

    def _crew(
        self, act: Callable[[requests.Session, _Job], None], jobs: Sequence[_Job]
    ) -> None:
        with (
            requests.Session() as session,
            concurrent.futures.ThreadPoolExecutor(THREADS) as pool,
        ):
            session.mount("http://", requests.adapters.HTTPAdapter(pool_maxsize=32))
            for _ in pool.map(lambda job: act(session, job), jobs):
                pass

    def _key(self, name: str) -> str:
        return f"run/{self._folder}/{name}"


class _Part(io.FileIO):
    """A part of a file as a file object, which `requests` sends."""

    def __init__(self, path: str, part: Range) -> None:
        super().__init__(path)
        self._length, self._left = part.length, part.length
        self.seek(part.offset)

    def __len__(self) -> int:
        return self._length

    def tell(self) -> int:
        return self._length - self._left

    def read(self, size: int | None = -1, /) -> Any:
        wanted = self._left if size is None or size < 0 else min(size, self._left)
        data = super().read(wanted)
        self._left -= len(data)
        return data


def empty(store: ObjectStore) -> None:
    """Deletes all objects of the store."""
    for name in list(store.list()):
        store.delete(name)


def timed(act: Callable[[], None]) -> float:
    """Returns the seconds of a call."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began
