"""Downloads a commit from an object store to a local directory, and verifies it.

Several threads download files, and ranges of large files. Each piece is written to its
position in the local file as soon as it arrives, so memory use does not grow with the
checkpoint. A file is complete when its size and crc32c equal those in the manifest. A
range that an earlier attempt has written is not downloaded again.
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
    DownloadTarget,
    Range,
    RangeWriter,
    split,
)
from tfpreempt.core.progress_bar import ByteBar
from tfpreempt.core.threads import map_in_threads
from tfpreempt.storage import checksum, os_errors
from tfpreempt.storage.files import Files, LocalFiles
from tfpreempt.storage.object_store import ObjectNotFoundError

_STALL_SECONDS = 900.0  # timeout without a byte; longer than the retries of any store
_STOP_TIMEOUT_SECONDS = 5.0  # time for the threads to end after an error
_ATTEMPTS = 2  # maximum number of downloads of a file whose checksum is wrong


def download(
    checkpoint: Entry,
    target: str,
    *,
    threads: int = 8,
    timeout: float | None = None,
    progress: bool = False,
    files: Files | None = None,
    root: str | None = None,
) -> None:
    """Downloads and verifies a checkpoint's files; writes MANIFEST.json, but no marker.

    The files are durable when the function returns. Files and ranges that a killed
    download left in the directory are not downloaded again. Unrelated files in the
    directory stay.

    Args:
        checkpoint: a commit, or any checkpoint whose files have a known size and
            checksum. Only a commit gets a MANIFEST.json.
        target: path of the directory, created if missing. A symbolic link in place of
            the directory or of a file is refused.
        threads: number of concurrent requests.
        timeout: seconds for the whole download; None: no timeout while bytes keep
            arriving.
        progress: whether to show a progress bar after 2 s, if stderr is a terminal.
        files: file operations on the directory; None: `LocalFiles`.
        root: directory inside which no link is followed; None: the target.

    Raises:
        CheckpointCorruptedError: an object is missing, or differs from the manifest in
            two attempts; or the manifest is invalid.
        CheckpointError: the disk is full, the store does not respond, or the timeout
            has passed. Or the directory is not writable, or contains a file that no
            download has written, under a name that the checkpoint needs.
    """
    manifest = checkpoint.manifest
    assert manifest is not None
    files = files or LocalFiles(target)
    destination = DownloadTarget(target, checkpoint, files, root)
    with (
        os_errors.translated(f"download {checkpoint.path}", destination.path),
        destination.filling(),
        ByteBar(checkpoint.path, manifest.bytes if progress else 0) as bar,
    ):
        work = _Download(checkpoint, destination, timeout, bar)
        work.run(manifest, threads)


@dataclasses.dataclass(slots=True, kw_only=True)
class _File:
    """State of one file of a download.

    Attributes:
        entry: name, size and checksum of the file, from the manifest.
        parts: the ranges in which the file is downloaded.
        sums: checksum of every range received so far; None for a range of the wrong
            length.
        fault: description of the fault of the file after the last attempt; "" for an
            intact file.
        is_intact: whether the file is present, verified and durable.
    """

    entry: FileEntry
    parts: list[Range]
    sums: dict[Range, int | None] = dataclasses.field(default_factory=dict)
    fault: str = ""
    is_intact: bool = False


class _Download:
    """One download, with the state shared by its threads."""

    def __init__(
        self,
        checkpoint: Entry,
        destination: DownloadTarget,
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
        """Downloads the files; returns once every file is verified and durable."""
        in_threads = functools.partial(
            map_in_threads,
            threads=threads,
            name="tfpreempt-download",
            watch=self._watch,
            failed=self._failed,
            stop_timeout=_STOP_TIMEOUT_SECONDS,
        )
        files = [
            _File(entry=each, parts=split(each.size, manifest.bytes))
            for each in manifest.files
        ]
        in_threads(self._look, files)
        for _ in range(_ATTEMPTS):
            missing = [each for each in files if not each.is_intact]
            in_threads(self._bring, [(each, p) for each in missing for p in each.parts])
        for each in files:
            if not each.is_intact:
                raise self._corrupt(each.entry, each.fault)

    def _watch(self) -> None:
        now, why = time.monotonic(), ""
        if self._timeout is not None and now - self._began > self._timeout:
            why = f"the download took more than {self._timeout:g} s"
        elif now - self._moved > _STALL_SECONDS:
            why = f"no byte arrived for {_STALL_SECONDS:g} s"
        if why:
            raise errors.CheckpointError(
                f"{self._checkpoint.path} was not downloaded: {why}. The downloaded "
                "bytes are kept; call the function again to continue the download."
            )
        self._bar.show(self._bytes)

    def _look(self, file: _File) -> None:
        """Checks whether a local file is complete already. If not, checks that the
        object in the store has the right size."""
        entry = file.entry
        if self._destination.is_intact(entry):
            self._advance(entry.size)
            self._destination.sync(entry)
            file.is_intact = True
            return
        if not file.parts:
            self._destination.open(entry).close()
            self._check(file)
        # A file of one range needs no `stat`: `_fetch` requests one byte more than
        # the file should have, which detects a wrong size with one request less.
        elif len(file.parts) > 1:
            name = self._checkpoint.object(entry.name)
            found = self._checkpoint.store.stat(name, timeout=self._time_left())
            if found is None:
                raise self._corrupt(entry, "is missing")
            if found.size != entry.size:
                raise self._corrupt(entry, f"has {found.size} bytes")

    def _bring(self, job: tuple[_File, Range]) -> None:
        """Downloads one range, unless an earlier download has written the range.

        The thread that finishes the last range of a file verifies the file.
        """
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
        """Downloads a range; returns its crc32c, or None if the length is wrong."""
        entry = file.entry
        # One byte more is requested at the end of a file, to detect a longer object.
        is_last = part.offset + part.length == entry.size
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
            except ObjectNotFoundError as error:
                raise self._corrupt(entry, "is missing") from error
        if writer.fault:
            file.fault = writer.fault
            return None
        if len(file.parts) > 1:
            self._destination.record(entry, part, writer.crc32c)
        return writer.crc32c

    def _check(self, file: _File) -> None:
        """Verifies a file after all its ranges were received.

        If the checksum is wrong, the next attempt downloads every range again.
        """
        crc, entry = 0, file.entry
        for part in file.parts:
            crc = checksum.joined(crc, file.sums[part] or 0, part.length)
        if None not in file.sums.values():
            file.fault = "" if crc == entry.crc32c else f"has crc32c {crc:08x}"
        file.is_intact = not file.fault
        if file.is_intact:
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

    def _corrupt(self, entry: FileEntry, found: str) -> Exception:
        return errors.CheckpointCorruptedError(
            f"{self._checkpoint.path}/{entry.name} {found}; expected {entry.size} "
            f"bytes with crc32c {entry.crc32c:08x}, as in the manifest. Use another "
            "checkpoint."
        )


class _CancelledError(Exception):
    """Ends a thread after another thread has failed. The caller of `download` gets only
    the error of the other thread."""
