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
from typing import Any

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
        before_marker: called with the folder that is about to be marked; may refuse.

    Attributes:
        commit: see above.
    """

    def __init__(
        self,
        store: ObjectStore,
        commit: Entry,
        *,
        threads: int = THREADS,
        on_bytes: Callable[[int], None] = lambda count: None,
        before_marker: Callable[[str], None] = lambda folder: None,
    ) -> None:
        self.commit = commit
        self._store = store
        self._folder = catalog.folder_name(commit.step or 0, commit.token)
        self._threads = threads
        self._on_bytes = on_bytes
        self._before_marker = before_marker
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
        manifest, commit = self.commit.manifest, self.commit
        assert manifest is not None
        there = self._names()
        if os.path.join(self._folder, layout.MARKER) in there:
            return
        map_in_threads(
            functools.partial(self._put, there),
            sorted(manifest.files, key=lambda entry: -entry.size),
            threads=self._threads,
            name="tfpreempt-upload",
            watch=self._check,
            patience=PATIENCE_SECONDS,
        )
        self._put(there, _entry(layout.MANIFEST, commit.data), commit.data)
        names = [layout.MANIFEST, *(entry.name for entry in manifest.files)]
        self._check_names(names)
        self._before_marker(self._folder)
        self._put(there, _entry(layout.MARKER, commit.marker), commit.marker)

    def _names(self) -> set[str]:
        return set(self._store.list(self._folder + "/"))

    def _check_names(self, names: list[str]) -> None:
        """All is there still: somebody may have cleaned up behind an old run."""
        gone = {os.path.join(self._folder, name) for name in names} - self._names()
        if gone:
            raise errors.SaveError(
                f"{self._store.uri}/{min(gone)} was deleted while its commit was "
                "uploaded; does another run use this place?"
            )

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise UploadCancelledError

    def _put(
        self, there: set[str], entry: FileEntry, data: bytes | None = None
    ) -> None:
        """One object: of a file of the commit, or of some bytes."""
        self._check()
        name = os.path.join(self._folder, entry.name)
        if name in there:
            if self._is_whole(name, entry):
                self._on_bytes(entry.size if data is None else 0)
                return
            self._store.delete(name)  # what a broken transfer left
        path = self.commit.file(entry.name)
        with self._opened(path) if data is None else io.BytesIO(data) as source:
            self._store.put_if_absent(name, source)
        if self._is_whole(name, entry):
            return
        self._store.delete(name)
        expected = (entry.size, entry.crc32c)
        if data is None and (found := checksum.of_file(path)) != expected:
            raise CommitDamagedError(
                f"{path!r} has {found[0]} bytes and crc32c {found[1]:08x}; its "
                f"manifest says {entry.size} and {entry.crc32c:08x}. It is not "
                "uploaded; look at the disk."
            )
        raise errors.SaveError(
            f"{self._store.uri}/{name} arrived with another checksum than it was sent "
            "with; it was deleted, to be sent again."
        )

    def _opened(self, path: str) -> _CountedFile:
        try:
            return _CountedFile(path, self._check, self._on_bytes)
        except FileNotFoundError as error:
            raise CommitGoneError(f"{path} was deleted before it was copied") from error

    def _is_whole(self, name: str, entry: FileEntry) -> bool:
        found = summed(self._store, name)
        expected = (entry.size, entry.crc32c)
        return found is not None and (found.size, found.crc32c) == expected


def point(store: ObjectStore, commit: Entry) -> None:
    """Lets TensorFlow's own `latest_checkpoint` find a commit; a convenience.

    Raises:
        CheckpointError: the store.
    """
    prefix = None if commit.manifest is None else commit.manifest.prefix
    if prefix is not None:
        folder = catalog.folder_name(commit.step or 0, commit.token)
        latest = os.path.join(folder, prefix)
        found = pointer.Pointer(latest=latest, paths=(latest,))
        store.replace(layout.POINTER, pointer.to_bytes(found))


def _entry(name: str, data: bytes) -> FileEntry:
    return FileEntry(name=name, size=len(data), crc32c=checksum.of_bytes(data))


class _CountedFile(io.FileIO):
    """A file that counts what is read, and that stops when it is told to."""

    def __init__(
        self, path: str, check: Callable[[], None], on_bytes: Callable[[int], None]
    ) -> None:
        super().__init__(path)
        self._check = check
        self._on_bytes = on_bytes
        self._seen = 0  # a store that tries again reads the same bytes twice

    def read(self, size: int | None = -1, /) -> Any:
        self._check()
        data = super().read(size)
        position = self.tell()
        if position > self._seen:
            self._on_bytes(position - self._seen)
            self._seen = position
        return data
