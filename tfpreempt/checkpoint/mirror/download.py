"""Fetches a commit from an object store into a local directory, and verifies it.

Files, and ranges of large ones, are fetched by a few threads and written where they
belong, in pieces, so memory doesn't grow with the checkpoint. A file counts when its
size and crc32c are those of the manifest, whatever was fetched, kept or retried.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time

from tfpreempt import errors
from tfpreempt.checkpoint.directory.catalog import Entry
from tfpreempt.checkpoint.directory.manifest import FileEntry, Manifest
from tfpreempt.checkpoint.mirror.download_target import (
    Destination,
    Range,
    RangeWriter,
    split,
)
from tfpreempt.core.progress import ByteBar
from tfpreempt.core.threads import map_in_threads
from tfpreempt.storage import checksum, failure
from tfpreempt.storage.files import Files, LocalFiles
from tfpreempt.storage.interface import ObjectMissingError

_STALL_SECONDS = 900.0  # no byte for so long: a store tries again for minutes at most
_PATIENCE_SECONDS = 5.0  # that the threads have to leave after an error
_ATTEMPTS = 2  # at a file that comes with another checksum


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
    destination = Destination(target, checkpoint, files or LocalFiles(target))
    with (
        failure.translated(f"download {checkpoint.path}", destination.path),
        destination.filling(),
        ByteBar(checkpoint.path, manifest.bytes if progress else 0) as bar,
    ):
        work = _Download(checkpoint, destination, timeout, bar)
        work.run(manifest, threads)


@dataclasses.dataclass(slots=True, kw_only=True)
class _File:
    """One file, and what is known of it.

    Attributes:
        entry: what the manifest says.
        parts: its ranges.
        sums: the checksums of those that have come; None where the length is wrong.
        fault: what was wrong with it in the last attempt.
        is_whole: it is there, verified and durable.
    """

    entry: FileEntry
    parts: list[Range]
    sums: dict[Range, int | None] = dataclasses.field(default_factory=dict)
    fault: str = ""
    is_whole: bool = False


class _Download:
    """One download: what its threads share."""

    def __init__(
        self,
        checkpoint: Entry,
        destination: Destination,
        timeout: float | None,
        bar: ByteBar,
    ) -> None:
        self._checkpoint = checkpoint
        self._destination = destination
        self._timeout = timeout
        self._bar = bar
        self._began = self._moved = time.monotonic()
        self._lock = threading.Lock()
        self._bytes = 0
        self._failed = threading.Event()

    def run(self, manifest: Manifest, threads: int) -> None:
        """Fetches all files; returns when each is there, verified and durable."""
        in_threads = functools.partial(
            map_in_threads,
            threads=threads,
            name="tfpreempt-download",
            watch=self._watch,
            failed=self._failed,
            patience=_PATIENCE_SECONDS,
        )
        files = [
            _File(entry=each, parts=split(each.size, manifest.bytes))
            for each in manifest.files
        ]
        in_threads(self._look, files)
        for _ in range(_ATTEMPTS):
            missing = [each for each in files if not each.is_whole]
            in_threads(self._bring, [(each, p) for each in missing for p in each.parts])
        for each in files:
            if not each.is_whole:
                raise self._damaged(each.entry, each.fault)

    def _watch(self) -> None:
        now, why = time.monotonic(), ""
        if self._timeout is not None and now - self._began > self._timeout:
            why = f"took more than {self._timeout:g} s"
        elif now - self._moved > _STALL_SECONDS:
            why = f"stands still: no byte came for {_STALL_SECONDS:g} s"
        if why:
            raise errors.CheckpointError(
                f"Downloading {self._checkpoint.path} {why}. What was fetched is kept; "
                "call again to go on."
            )
        self._bar.show(self._bytes)

    def _look(self, file: _File) -> None:
        """Is it there already, and can the store have it?"""
        entry = file.entry
        if self._destination.is_whole(entry):
            self._advance(entry.size)
            self._destination.sync(entry)
            file.is_whole = True
            return
        if not file.parts:
            self._destination.open(entry).close()
            self._check(file)
        # What fits into one range needs no look at its size: asking for one byte more
        # than it should have tells as much, with one request less.
        elif len(file.parts) > 1:
            name = self._checkpoint.object(entry.name)
            found = self._checkpoint.store.stat(name, timeout=self._time_left())
            if found is None:
                raise self._damaged(entry, "is missing")
            if found.size != entry.size:
                raise self._damaged(entry, f"has {found.size} bytes")

    def _bring(self, job: tuple[_File, Range]) -> None:
        """One range: kept from a predecessor, or fetched; the last one is the file."""
        file, part = job
        crc = None if file.fault else self._destination.kept(file.entry, part)
        if crc is None:
            crc = self._fetch(file, part)
        else:
            self._advance(part.length)
        with self._lock:
            file.sums[part] = crc
            is_last = len(file.sums) == len(file.parts)
        if is_last:
            self._check(file)

    def _fetch(self, file: _File, part: Range) -> int | None:
        """Returns the checksum of what has come; None if it has another length."""
        entry = file.entry
        is_last = part.offset + part.length == entry.size  # is there more than that?
        with self._destination.open(entry) as opened:
            writer = RangeWriter(opened, part, self._piece)
            try:
                self._checkpoint.store.get(
                    self._checkpoint.object(entry.name),
                    writer,
                    offset=part.offset,
                    length=part.length + is_last,
                    timeout=self._time_left(),
                )
            except ObjectMissingError as error:
                raise self._damaged(entry, "is missing") from error
        if writer.fault:
            file.fault = writer.fault
            return None
        if len(file.parts) > 1:
            self._destination.record(entry, part, writer.crc32c)
        return writer.crc32c

    def _check(self, file: _File) -> None:
        """All ranges have come: are they the file?"""
        crc, entry = 0, file.entry
        for part in file.parts:
            crc = checksum.joined(crc, file.sums[part] or 0, part.length)
        if None not in file.sums.values():
            file.fault = "" if crc == entry.crc32c else f"has crc32c {crc:08x}"
        file.is_whole = not file.fault
        if file.is_whole:
            self._destination.sync(entry)
            return
        file.sums.clear()
        self._advance(-entry.size)

    def _piece(self, count: int) -> None:
        if self._failed.is_set():
            raise _CancelledError
        self._advance(count)

    def _advance(self, count: int) -> None:
        with self._lock:
            self._bytes += count
            self._moved = time.monotonic()

    def _time_left(self) -> float | None:
        if self._timeout is None:
            return None
        return max(0.1, self._began + self._timeout - time.monotonic())

    def _damaged(self, entry: FileEntry, found: str) -> Exception:
        return errors.CheckpointDamagedError(
            f"{self._checkpoint.path}/{entry.name} {found}; the manifest says "
            f"{entry.size} bytes, crc32c {entry.crc32c:08x}. Use another checkpoint."
        )


class _CancelledError(Exception):
    """Another thread has failed; nobody hears of this one."""
