"""Fetches a commit from an object store into a local directory, and verifies it.

Files, and ranges of large ones, are fetched by a few threads and written where they
belong, in pieces, so memory doesn't grow with the checkpoint. A file counts when its
size and crc32c are those of the manifest, whatever was fetched, kept or retried.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any, cast

from tfpreempt import errors
from tfpreempt.checkpoint import checksum, remote
from tfpreempt.checkpoint.crew import Crew
from tfpreempt.checkpoint.landing import Landing, Range, of_range
from tfpreempt.checkpoint.manifest import FileEntry
from tfpreempt.checkpoint.remote import RemoteCommit
from tfpreempt.checkpoint.storage import failure
from tfpreempt.checkpoint.storage.files import Files, LocalFiles
from tfpreempt.checkpoint.storage.interface import ObjectMissingError, ObjectStore

_RANGE_BYTES = 16 << 20
_ATTEMPTS = 2
_STALL_SECONDS = 900.0  # no byte for so long: a store tries again for minutes at most
_QUIET_SECONDS = 2.0  # a download that takes less shows no progress bar


def download(
    store: ObjectStore,
    commit: RemoteCommit,
    target: str,
    *,
    threads: int = 8,
    timeout: float | None = None,
    progress: bool = False,
    files: Files | None = None,
) -> None:
    """Fetches and verifies a commit's files; writes MANIFEST.json and no marker.

    All is durable when this returns. What a killed predecessor left in the directory is
    used; what else lies there stays.

    Args:
        store: where the commit is.
        commit: which one.
        target: the directory, made if need be; it has no symbolic links of others.
        threads: requests at a time.
        timeout: seconds for all of it; None: as long as bytes keep coming.
        progress: show a bar if it takes more than 2 s and stderr is a terminal.
        files: the file operations.

    Raises:
        CheckpointDamagedError: an object is missing, or differs from the manifest twice
            in a row; or the manifest names what cannot be.
        CheckpointError: no room, no answer from the store, or not in time; the
            directory cannot be written.
    """
    source = f"{store.uri}/{commit.folder}" if commit.folder else store.uri
    landing = Landing(target, commit.manifest, source, files or LocalFiles())
    with failure.translated(f"download {source}", landing.target):
        try:
            landing.prepare(commit.marker_data)
            _Download(store, commit, landing, source, timeout).run(threads, progress)
            landing.finish(commit.manifest_data)
        finally:
            landing.close()


@dataclasses.dataclass(slots=True, kw_only=True)
class _Job:
    """One file: its ranges, and the checksums of those that are there."""

    entry: FileEntry
    parts: list[Range]
    sums: dict[Range, int] = dataclasses.field(default_factory=dict)
    left: int = 0
    attempt: int = 1
    fault: str = ""


class _Download:
    """One download: what its threads share."""

    def __init__(
        self,
        store: ObjectStore,
        commit: RemoteCommit,
        landing: Landing,
        source: str,
        timeout: float | None,
    ) -> None:
        self._store = store
        self._commit = commit
        self._landing = landing
        self._source = source
        self._timeout = timeout
        self._started = self._moved = time.monotonic()
        self._lock = threading.Lock()
        self._bytes = 0
        self._crew: Crew

    def run(self, threads: int, progress: bool) -> None:
        """Fetches all files; returns when each is there, verified and durable."""
        jobs = [
            _Job(entry=entry, parts=_parts(entry.size))
            for entry in self._commit.manifest.files
        ]
        count = sum(max(1, len(job.parts)) for job in jobs)
        self._crew = Crew("tfpreempt-download", max(1, min(threads, count)))
        self._crew.add(functools.partial(self._look, job) for job in jobs)
        bar = _Bar(self._source, self._commit.manifest.bytes) if progress else None
        try:
            self._crew.run(functools.partial(self._watch, bar))
        finally:
            if bar is not None:
                bar.close()

    def _watch(self, bar: _Bar | None) -> None:
        now = time.monotonic()
        if self._timeout is not None and now - self._started > self._timeout:
            raise errors.CheckpointError(
                f"Downloading {self._source} took more than {self._timeout:g} s. What "
                "was fetched is kept; call again to go on."
            )
        if now - self._moved > _STALL_SECONDS:
            raise errors.CheckpointError(
                f"Downloading {self._source} stands still: no byte came for "
                f"{_STALL_SECONDS:g} s. What was fetched is kept; call again to go on."
            )
        if bar is not None and now - self._started > _QUIET_SECONDS:
            bar.show(self._bytes)

    def _look(self, job: _Job) -> None:
        """The first task of each file: is it there already, and is it as it should."""
        if self._landing.is_whole(job.entry):
            self._advance(job.entry.size)
            self._landing.sync(job.entry)
            return
        # What fits into one range needs no look at its size: asking for one byte more
        # than it should have tells as much, with one request less.
        if len(job.parts) != 1:
            self._check_size(job.entry)
        self._begin(job)

    def _begin(self, job: _Job) -> None:
        job.left = len(job.parts)
        job.sums.clear()
        job.fault = ""
        if not job.parts:
            os.close(self._landing.open(job.entry))
            self._finish(job)
            return
        tasks = [functools.partial(self._bring, job, part) for part in job.parts]
        self._crew.add(tasks, first=True)

    def _check_size(self, entry: FileEntry) -> None:
        name = remote.joined(self._commit.folder, entry.name)
        found = self._store.stat(name, timeout=self._time_left())
        if found is None:
            raise self._missing(entry)
        if found.size != entry.size:
            raise self._damaged(entry, f"has {found.size} bytes")

    def _bring(self, job: _Job, part: Range) -> None:
        """One range: kept from a predecessor, or fetched."""
        self._crew.check()
        crc = self._landing.kept(job.entry, part) if job.attempt == 1 else None
        if crc is not None:
            self._advance(part[1])
        else:
            crc = self._fetch(job, part)
        with self._lock:
            if crc is not None:
                job.sums[part] = crc
            job.left -= 1
            is_last = job.left == 0
        if is_last:
            self._finish(job)

    def _fetch(self, job: _Job, part: Range) -> int | None:
        """Fetches a range; its checksum, or None if it has another length."""
        entry, (offset, length) = job.entry, part
        extra = 1 if offset + length == entry.size else 0  # is there more than that?
        descriptor = self._landing.open(entry)
        try:
            sink = _Sink(descriptor, part, self._piece)
            self._store.get(
                remote.joined(self._commit.folder, entry.name),
                cast(IO[bytes], sink),
                offset=offset,
                length=length + extra,
                timeout=self._time_left(),
            )
            crc = sink.checksum()
        except ObjectMissingError as error:
            raise self._missing(entry) from error
        finally:
            os.close(descriptor)
        if crc is None:
            job.fault = sink.fault()
        elif len(job.parts) > 1:
            self._landing.record(entry, part, crc)
        return crc

    def _finish(self, job: _Job) -> None:
        """All ranges are there: is it the file?"""
        crc = 0
        for part in job.parts:
            crc = checksum.joined(crc, job.sums.get(part, 0), part[1])
        if not job.fault and crc == job.entry.crc32c:
            self._landing.sync(job.entry)
            return
        fault = job.fault or f"has crc32c {crc:08x}"
        if job.attempt == _ATTEMPTS:
            raise self._damaged(job.entry, fault)
        job.attempt += 1
        self._advance(-job.entry.size)
        self._begin(job)

    def _piece(self, count: int) -> None:
        self._crew.check()
        self._advance(count)

    def _advance(self, count: int) -> None:
        with self._lock:
            self._bytes += count
            self._moved = time.monotonic()

    def _time_left(self) -> float | None:
        if self._timeout is None:
            return None
        return max(0.1, self._started + self._timeout - time.monotonic())

    def _missing(self, entry: FileEntry) -> Exception:
        return errors.CheckpointDamagedError(
            f"{self._source}/{entry.name} is missing, though the manifest names it. "
            "Use another checkpoint."
        )

    def _damaged(self, entry: FileEntry, found: str) -> Exception:
        return errors.CheckpointDamagedError(
            f"{self._source}/{entry.name} {found}; the manifest says {entry.size} "
            f"bytes, crc32c {entry.crc32c:08x}. Use another checkpoint."
        )


class _Sink(io.RawIOBase):
    """Writes what a store sends into a range of a file, and checksums it on the way."""

    def __init__(
        self, descriptor: int, part: Range, on_piece: Callable[[int], None]
    ) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._part = part
        self._on_piece = on_piece
        self._position = self._end = 0
        self._crc = 0
        self._is_straight = True  # each byte came once, in order

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """A store that tries again goes back to where it began."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._end}
        position = start[whence] + offset
        self._is_straight = self._is_straight and position == self._position
        self._position = self._end = max(0, position)
        return self._position

    def write(self, data: Any, /) -> int:
        with memoryview(data) as view:
            count = view.nbytes
        self._on_piece(count)
        offset, length = self._part
        room = max(0, length - self._position)
        fits = data if isinstance(data, bytes) and count <= room else bytes(data)[:room]
        if self._is_straight:
            self._crc = checksum.extended(self._crc, fits)
        _write_at(self._descriptor, fits, offset + self._position)
        self._position += count
        self._end = max(self._end, self._position)
        return count

    def checksum(self) -> int | None:
        """The crc32c of the range; None if it is not as long as it should be."""
        if self._end != self._part[1]:
            return None
        if self._is_straight:
            return self._crc
        return of_range(self._descriptor, self._part)

    def fault(self) -> str:
        """What is wrong with its length."""
        offset, length = self._part
        if self._end > length:
            return f"has more than {offset + length} bytes"
        return f"ends after {offset + self._end} bytes"


class _Bar:
    """A progress bar on a terminal; nothing elsewhere."""

    def __init__(self, source: str, total: int) -> None:
        self._source = source
        self._total = total
        self._shown: Any = None
        self._task: Any = None

    def show(self, done: int) -> None:
        if not sys.stderr.isatty():
            return
        if self._shown is None:
            from rich import progress
            from rich.console import Console
            from rich.markup import escape

            self._shown = progress.Progress(
                progress.TextColumn(escape(self._source)),
                progress.BarColumn(),
                progress.DownloadColumn(),
                progress.TransferSpeedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._shown.add_task("", total=self._total)
            self._shown.start()
        self._shown.update(self._task, completed=done)

    def close(self) -> None:
        if self._shown is not None:
            self._shown.stop()


def _parts(size: int) -> list[Range]:
    """The ranges of a file; none for an empty one."""
    return [
        (offset, min(_RANGE_BYTES, size - offset))
        for offset in range(0, size, _RANGE_BYTES)
    ]


def _write_at(descriptor: int, data: bytes, offset: int) -> None:
    written = os.pwrite(descriptor, data, offset)
    while written < len(data):  # seldom: a signal, or a disk that is nearly full
        written += os.pwrite(descriptor, data[written:], offset + written)
