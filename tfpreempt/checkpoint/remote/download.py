"""Fetches a commit from an object store into a local directory, and verifies it.

Files, and ranges of large ones, are fetched by a few threads and written where they
belong, in pieces, so memory doesn't grow with the checkpoint. A file counts when its
size and crc32c are those of the manifest, whatever was fetched, kept or retried.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import time
from typing import IO, cast

from tfpreempt import errors
from tfpreempt.checkpoint.catalog import Entry
from tfpreempt.checkpoint.manifest import FileEntry, Manifest
from tfpreempt.checkpoint.remote.bar import Bar
from tfpreempt.checkpoint.remote.landing import Landing, Range
from tfpreempt.checkpoint.remote.sink import Sink
from tfpreempt.storage import checksum, failure
from tfpreempt.storage.crew import Crew
from tfpreempt.storage.files import Files, LocalFiles
from tfpreempt.storage.interface import ObjectMissingError

_RANGE_BYTES = 32 << 20  # each costs a request
_ATTEMPTS = 2
_STALL_SECONDS = 900.0  # no byte for so long: a store tries again for minutes at most
_QUIET_SECONDS = 2.0  # a download that takes less shows no progress bar


def download(
    checkpoint: Entry,
    target: str,
    *,
    threads: int = 8,
    timeout: float | None = None,
    progress: bool = False,
    files: Files | None = None,
) -> None:
    """Fetches and verifies a checkpoint's files; writes MANIFEST.json and no marker.

    All is durable when this returns. What a killed predecessor left in the directory is
    used; what else lies there stays, and a file of others in the way is refused.

    Args:
        checkpoint: which one; a commit, or anything whose files are known with size and
            checksum, which then gets no MANIFEST.json.
        target: the directory, made if need be; it has no symbolic links of others.
        threads: requests at a time.
        timeout: seconds for all of it; None: as long as bytes keep coming.
        progress: show a bar if it takes more than 2 s and stderr is a terminal.
        files: the file operations.

    Raises:
        CheckpointDamagedError: an object is missing, or differs from the manifest twice
            in a row; or the manifest names what cannot be.
        CheckpointError: no room, no answer from the store, or not in time; the
            directory cannot be written, or another file has a name that is needed.
    """
    manifest = checkpoint.manifest
    assert manifest is not None
    marker = checkpoint.marker if checkpoint.is_committed else None
    landing = Landing(target, manifest, checkpoint.path, files or LocalFiles())
    with failure.translated(f"download {checkpoint.path}", landing.target):
        try:
            landing.prepare(marker, checkpoint.data or None)
            _Download(checkpoint, manifest, landing, timeout).run(threads, progress)
            landing.finish(checkpoint.data or None)
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
        checkpoint: Entry,
        manifest: Manifest,
        landing: Landing,
        timeout: float | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._store = checkpoint.store
        self._source = checkpoint.path
        self._manifest = manifest
        self._landing = landing
        self._timeout = timeout
        self._started = self._moved = time.monotonic()
        self._lock = threading.Lock()
        self._bytes = 0
        self._crew: Crew

    def run(self, threads: int, progress: bool) -> None:
        """Fetches all files; returns when each is there, verified and durable."""
        jobs = [
            _Job(entry=entry, parts=_parts(entry.size))
            for entry in self._manifest.files
        ]
        count = sum(max(1, len(job.parts)) for job in jobs)
        self._crew = Crew("tfpreempt-download", max(1, min(threads, count)))
        self._crew.add(functools.partial(self._look, job) for job in jobs)
        bar = Bar(self._source, self._manifest.bytes) if progress else None
        try:
            self._crew.run(functools.partial(self._watch, bar))
        finally:
            if bar is not None:
                bar.close()

    def _watch(self, bar: Bar | None) -> None:
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
        name = self._checkpoint.object(entry.name)
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
            sink = Sink(descriptor, part, self._piece)
            self._store.get(
                self._checkpoint.object(entry.name),
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


def _parts(size: int) -> list[Range]:
    """The ranges of a file; none for an empty one."""
    return [
        (offset, min(_RANGE_BYTES, size - offset))
        for offset in range(0, size, _RANGE_BYTES)
    ]
