"""Uploads one commit: its files by parallel threads, the manifest, the marker last.

Every object is compared with the manifest by size and crc32c after it was put, and what
an earlier upload of the same commit left is used again if it is whole. Whoever dies at
any request leaves a folder without a marker, which no reader takes for a commit.
"""

from __future__ import annotations

import functools
import io
import os
import threading
from collections.abc import Callable
from typing import IO, cast

from tfpreempt import errors
from tfpreempt.checkpoint import catalog, layout, pointer
from tfpreempt.checkpoint.catalog import Entry
from tfpreempt.checkpoint.manifest import FileEntry
from tfpreempt.core.threads import map_in_threads
from tfpreempt.storage import checksum
from tfpreempt.storage.interface import ObjectStore, summed

THREADS = 8
PATIENCE_SECONDS = 5.0  # that the threads have to leave after an error


class UploadCancelledError(Exception):
    """Something else is to be uploaded first; not a fault."""


class CommitGoneError(Exception):
    """There is nothing (any more) that is to be copied; says why. Not a fault."""


class CommitDamagedError(errors.CheckpointDamagedError):
    """A file that is to be copied is not what its manifest says."""


class Upload:
    """One attempt to upload a commit; `run` on any thread, `cancel` on any other.

    Args:
        store: where to.
        commit: which local commit.
        threads: how many files at a time.
        on_bytes: called with the number of bytes that a thread has just read.
    """

    def __init__(
        self,
        store: ObjectStore,
        commit: Entry,
        *,
        threads: int = THREADS,
        on_bytes: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._store = store
        self._commit = commit
        self._folder = catalog.folder_name(commit.step or 0, commit.token)
        self._threads = threads
        self._on_bytes = on_bytes
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Ends it at the next piece."""
        self._cancelled.set()

    def run(self) -> None:
        """Uploads what is not there yet.

        Raises:
            UploadCancelledError: by `cancel`.
            CommitGoneError: the local files were deleted meanwhile.
            CommitDamagedError: a local file is not what the manifest says.
            CheckpointError: the store, whatever is wrong with it.
        """
        folder = self._folder
        there = set(self._store.list(folder + "/"))
        if catalog.joined(folder, layout.MARKER) in there:
            return
        self._put_files(there)
        name = catalog.joined(folder, layout.MANIFEST)
        self._put_bytes(name, self._commit.data)
        self._check_names()
        name = catalog.joined(folder, layout.MARKER)
        self._put_bytes(name, self._commit.marker)

    def _put_files(self, there: set[str]) -> None:
        """Largest first."""
        entries = sorted(self._files(), key=lambda entry: -entry.size)
        map_in_threads(
            functools.partial(self._put_file, there),
            entries,
            threads=self._threads,
            name="tfpreempt-upload",
            watch=self._check,
            patience=PATIENCE_SECONDS,
        )

    def _files(self) -> tuple[FileEntry, ...]:
        assert self._commit.manifest is not None
        return self._commit.manifest.files

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise UploadCancelledError

    def _put_file(self, there: set[str], entry: FileEntry) -> None:
        name = catalog.joined(self._folder, entry.name)
        is_there = name in there
        if is_there and self._is_whole(name, entry.size, entry.crc32c):
            self._on_bytes(entry.size)
            return
        if is_there:
            self._store.delete(name)  # what a broken transfer left
        path = self._commit.file(entry.name)
        with _opened(path) as file:
            reader = cast(IO[bytes], _Reader(file, self._cancelled, self._on_bytes))
            self._store.put_if_absent(name, reader)
        if self._is_whole(name, entry.size, entry.crc32c):
            return
        self._store.delete(name)
        found = checksum.of_file(path)
        if found != (entry.size, entry.crc32c):
            raise CommitDamagedError(
                f"{path!r} has {found[0]} bytes and crc32c {found[1]:08x}; its "
                f"manifest says {entry.size} and {entry.crc32c:08x}. It is not "
                "uploaded; look at the disk."
            )
        raise errors.SaveError(
            f"{self._store.uri}/{name} arrived with another checksum than it was sent "
            "with; it was deleted, to be sent again."
        )

    def _put_bytes(self, name: str, data: bytes) -> None:
        self._check()
        expected = len(data), checksum.of_bytes(data)
        for _ in range(2):
            self._store.put_if_absent(name, io.BytesIO(data))
            if self._is_whole(name, *expected):
                return
            self._store.delete(name)
        raise errors.SaveError(
            f"{self._store.uri}/{name} arrived twice with another checksum than it "
            "was sent with."
        )

    def _is_whole(self, name: str, size: int, crc32c: int) -> bool:
        found = summed(self._store, name)
        return found is not None and (found.size, found.crc32c) == (size, crc32c)

    def _check_names(self) -> None:
        """All is there still: somebody may have cleaned up behind an old run."""
        folder = self._folder
        there = set(self._store.list(folder + "/"))
        names = [entry.name for entry in self._files()]
        for name in (*names, layout.MANIFEST):
            if catalog.joined(folder, name) not in there:
                raise errors.SaveError(
                    f"{self._store.uri}/{catalog.joined(folder, name)} was deleted "
                    "while its commit was uploaded; does another run use this place?"
                )


def point(store: ObjectStore, commit: Entry) -> None:
    """Lets TensorFlow's own `latest_checkpoint` find a commit; a convenience.

    Raises:
        CheckpointError: the store.
    """
    prefix = None if commit.manifest is None else commit.manifest.prefix
    if prefix is not None:
        folder = catalog.folder_name(commit.step or 0, commit.token)
        latest = catalog.joined(folder, prefix)
        found = pointer.Pointer(latest=latest, paths=(latest,))
        store.replace(layout.POINTER, pointer.to_bytes(found))


def _opened(path: str) -> IO[bytes]:
    try:
        return open(path, "rb")
    except FileNotFoundError as error:
        raise CommitGoneError(f"{path} was deleted before it was copied") from error


class _Reader(io.RawIOBase):
    """A file that counts what is read, and that stops when it is told to."""

    def __init__(
        self,
        file: IO[bytes],
        cancelled: threading.Event,
        on_bytes: Callable[[int], None],
    ) -> None:
        self._file = file
        self._cancelled = cancelled
        self._on_bytes = on_bytes
        self._seen = 0  # a store that tries again reads the same bytes twice

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if self._cancelled.is_set():
            raise UploadCancelledError
        data = self._file.read(size)
        position = self._file.tell()
        if position > self._seen:
            self._on_bytes(position - self._seen)
            self._seen = position
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()
