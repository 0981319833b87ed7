"""Uploads one commit: the files in parallel, then the manifest, then the marker.

Every uploaded object is compared with the manifest by size and crc32c. An intact object
that an earlier attempt has uploaded is not uploaded again. If the process is killed, a
folder without a marker stays, which is not a commit for readers.

One connection to an object store is slower than the network, and a checkpoint is often
one large file. So if the store can compose an object from other objects, several
threads upload a large file in parts. Parts are objects outside the commit's folder:

    parts/<folder>/<file>/<offset>  bytes from <offset> on, of a file of the commit

The folder's name identifies the commit's content, so a later upload can use the parts
of a crashed upload. No upload needs the parts once the commit's marker or a newer
commit exists; retention then deletes the parts.
"""

from __future__ import annotations

import functools
import io
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog, layout
from tfpreempt.checkpoint.directory.catalog import Entry
from tfpreempt.checkpoint.directory.manifest import FileEntry
from tfpreempt.checkpoint.mirror.download_target import Range, ranges_of
from tfpreempt.core import contained
from tfpreempt.core.threads import map_in_threads
from tfpreempt.storage import checksum
from tfpreempt.storage.object_store import (
    MAX_PARTS,
    ComposingStore,
    ObjectStore,
    summed,
)

PARTS = "parts"
SMALLEST = 64 << 20  # smallest part in bytes; each part costs three requests
THREADS = 8
STOP_TIMEOUT_SECONDS = 5.0  # time for the threads to end after an error


class UploadCancelledError(Exception):
    """The upload was cancelled by `Upload.cancel`; not a failure of the mirror."""


class CommitGoneError(Exception):
    """The commit was deleted, or needs no upload; not a failure of the mirror."""


class CommitCorruptError(errors.CheckpointCorruptedError):
    """A file to be uploaded differs from its manifest."""


class Upload:
    """An attempt to upload a commit.

    `run` uploads on the caller's thread, and `cancel` is called on another thread.

    Args:
        store: object store that receives the commit.
        commit: the local commit.
        threads: number of files, or parts of files, uploaded at a time.
        smallest_part: size in bytes; files up to this size are not uploaded in parts.
        on_bytes: function called after each read, with the number of bytes read.
        before_marker: function called with the commit's folder before the marker is
            written; if the function raises, the upload ends with that error.

    Attributes:
        commit: the local commit.
    """

    def __init__(
        self,
        store: ObjectStore,
        commit: Entry,
        *,
        threads: int = THREADS,
        smallest_part: int = SMALLEST,
        on_bytes: Callable[[int], None] = lambda count: None,
        before_marker: Callable[[str], None] = lambda folder: None,
    ) -> None:
        self.commit = commit
        self._store = store
        self._folder = catalog.folder_name(commit.step or 0, commit.token)
        self._threads = threads
        self._smallest_part = smallest_part
        self._on_bytes = on_bytes
        self._before_marker = before_marker
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Makes `run` stop before the next read from a file."""
        self._cancelled.set()

    def run(self) -> None:
        """Uploads the objects of the commit that are missing from the store.

        Raises:
            UploadCancelledError: `cancel` was called.
            CommitGoneError: the local files were deleted before their upload.
            CommitCorruptError: a local file differs from the manifest.
            CheckpointError: the store failed.
        """
        commit = self.commit
        there = self._names()
        if os.path.join(self._folder, layout.MARKER) in there:
            return
        divided = self._divided(there)
        self._put_files(there, divided)
        self._in_threads(
            functools.partial(self._compose, entry, ranges)
            for entry, ranges in divided.items()
        )
        self._put(there, _entry(layout.MANIFEST, commit.data), commit.data)
        names = [layout.MANIFEST, *(entry.name for entry in commit.files)]
        self._check_names(names)
        self._before_marker(self._folder)
        self._put(there, _entry(layout.MARKER, commit.marker), commit.marker)

    def _divided(self, there: set[str]) -> dict[FileEntry, list[Range]]:
        """Returns the files to upload in parts, each with the ranges of its parts.

        Args:
            there: names of the objects in the commit's folder; such files are omitted.
        """
        manifest = self.commit.manifest
        if manifest is None or not isinstance(self._store, ComposingStore):
            return {}
        found = {}
        for entry in manifest.files:
            ranges = parts_of(
                entry.size,
                manifest.bytes,
                threads=self._threads,
                smallest=self._smallest_part,
            )
            is_there = os.path.join(self._folder, entry.name) in there
            if len(ranges) > 1 and not is_there:
                found[entry] = ranges
        return found

    def _put_files(
        self, there: set[str], divided: dict[FileEntry, list[Range]]
    ) -> None:
        """Uploads the undivided files, and the parts of the divided files.

        The largest files and parts are uploaded first.

        Args:
            there: names of the objects in the commit's folder.
            divided: files to upload in parts, from `_divided`.
        """
        if divided:
            there = there | set(self._store.list(parts_folder(self._folder)))
        jobs = []
        for entry in self.commit.files:
            if entry not in divided:
                jobs.append((entry.size, functools.partial(self._put, there, entry)))
            for part in divided.get(entry, ()):
                put = functools.partial(self._put_part, there, entry, part)
                jobs.append((part.length, put))
        jobs.sort(key=lambda job: -job[0])
        self._in_threads(put for _, put in jobs)

    def _in_threads(self, jobs: Iterable[Callable[[], None]]) -> None:
        map_in_threads(
            lambda job: job(),
            jobs,
            threads=self._threads,
            name="tfpreempt-upload",
            watch=self._check,
            stop_timeout=STOP_TIMEOUT_SECONDS,
        )

    def _names(self) -> set[str]:
        return set(self._store.list(self._folder + "/"))

    def _check_names(self, names: list[str]) -> None:
        """Raises SaveError if an uploaded object is missing: another run has deleted
        the object."""
        gone = {os.path.join(self._folder, name) for name in names} - self._names()
        if gone:
            raise errors.SaveError(
                f"{self._store.uri}/{min(gone)} was deleted during the upload of its "
                f"commit. Check whether another run writes to {self._store.uri}, and "
                "use a separate URI for each run."
            )

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise UploadCancelledError

    def _put(
        self, there: set[str], entry: FileEntry, data: bytes | None = None
    ) -> None:
        """Uploads one object, unless the store has the object intact.

        Args:
            there: names of the objects in the commit's folder.
            entry: name, size and checksum of the object's content.
            data: content of the object; None uploads the commit's file of that name.
        """
        self._check()
        name = os.path.join(self._folder, entry.name)
        if self._is_there(there, name, entry):
            self._on_bytes(entry.size if data is None else 0)
            return
        path = self.commit.file(entry.name)
        with self._opened(path) if data is None else io.BytesIO(data) as source:
            self._store.put_if_absent(name, source)
        if not self._is_intact(name, entry):
            self._store.delete(name)
            raise self._checksum_error(name, entry, None if data is not None else path)

    def _put_part(self, there: set[str], entry: FileEntry, part: Range) -> None:
        """Uploads a part of a file; `_compose` verifies the whole file later."""
        self._check()
        name = part_name(self._folder, entry.name, part)
        with self._opened(self.commit.file(entry.name), part) as source:
            if name in there and self._is_there(
                there, name, checksum.of_source(source)
            ):
                return
            source.seek(0)
            self._store.put_if_absent(name, source)

    def _compose(self, entry: FileEntry, ranges: list[Range]) -> None:
        """Composes the object of a file from its parts; retention deletes the parts."""
        assert isinstance(self._store, ComposingStore)
        self._check()
        name = os.path.join(self._folder, entry.name)
        sources = [part_name(self._folder, entry.name, each) for each in ranges]
        self._store.compose(name, sources)
        if not self._is_intact(name, entry):
            for each in (name, *sources):
                self._store.delete(each)
            raise self._checksum_error(name, entry, self.commit.file(entry.name))

    def _checksum_error(
        self, name: str, entry: FileEntry, path: str | None
    ) -> errors.CheckpointError:
        """Returns the error for an object that arrived with a wrong checksum.

        Reads the local file again, to tell a corrupt file from a faulty transfer.

        Args:
            name: name of the object, which the caller has deleted.
            entry: expected size and checksum.
            path: local file that was sent; None if the content came from memory.
        """
        expected = (entry.size, entry.crc32c)
        if path is not None and (found := checksum.of_file(path)) != expected:
            return CommitCorruptError(
                f"{path!r} has {found[0]} bytes and crc32c {found[1]:08x}; expected "
                f"{entry.size} bytes and crc32c {entry.crc32c:08x}, as in its "
                "manifest. The file is not uploaded. Check the disk."
            )
        return errors.SaveError(
            f"The object {self._store.uri}/{name} had a wrong checksum after the "
            "upload, so the object was deleted, and the upload is retried. If this "
            "repeats, check the network and the memory of this machine."
        )

    def _opened(self, path: str, part: Range | None = None) -> _CountedFile:
        root = self.commit.store.uri
        try:
            return _CountedFile(path, part, self._check, self._on_bytes, root)
        except FileNotFoundError as error:
            raise CommitGoneError(f"{path} was deleted before the upload") from error

    def _is_there(
        self, there: set[str], name: str, expected: FileEntry | checksum.ChecksumWriter
    ) -> bool:
        """Returns whether the store has the object intact; deletes a corrupt object."""
        if name not in there:
            return False
        if self._is_intact(name, expected):
            return True
        self._store.delete(name)
        return False

    def _is_intact(
        self, name: str, expected: FileEntry | checksum.ChecksumWriter
    ) -> bool:
        found = summed(self._store, name)
        wanted = (expected.size, expected.crc32c)
        return found is not None and (found.size, found.crc32c) == wanted


def _entry(name: str, data: bytes) -> FileEntry:
    return FileEntry(name=name, size=len(data), crc32c=checksum.of_bytes(data))


def parts_of(size: int, total: int, *, threads: int, smallest: int) -> list[Range]:
    """Returns the ranges of the parts in which to upload a file.

    A file whose size is at most the commit's size divided by the number of threads is a
    single part, because the commit's other files keep the other threads busy. A larger
    file is split into parts of the smallest size. With many parts the threads end at
    about the same time, and a crashed upload loses little.

    Args:
        size: size of the file in bytes.
        total: size of the commit in bytes.
        threads: number of upload threads.
        smallest: smallest size of a part in bytes; the last part may be smaller.
    """
    if size * threads <= total or size <= smallest:
        return [Range(0, size)]
    return ranges_of(size, max(smallest, -(-size // MAX_PARTS)))


def parts_folder(commit: str) -> str:
    """Returns the common prefix of the names of a commit's parts.

    Args:
        commit: name of the commit's folder.
    """
    return f"{PARTS}/{commit}/"


def part_name(commit: str, file: str, part: Range) -> str:
    """Returns the name of the object for a part of a file of a commit.

    Args:
        commit: name of the commit's folder.
        file: name of the file in the folder.
        part: range of the file.
    """
    return f"{parts_folder(commit)}{file}/{part.offset:015d}"


class _CountedFile(io.FileIO):
    """A file, or a part of a file, that reports the bytes read, and can be stopped.

    Args:
        path: path of the file.
        part: range of the file that is read as if it were the whole file; None: the
            whole file.
        check: function called before each read; may raise to end the upload.
        on_bytes: function called with the number of bytes of each read. A byte that a
            retry reads again is not counted again.
        root: directory below which links are not followed.
    """

    def __init__(
        self,
        path: str,
        part: Range | None,
        check: Callable[[], None],
        on_bytes: Callable[[int], None],
        root: str,
    ) -> None:
        descriptor = contained.open_file(path, os.O_RDONLY, root=root)
        super().__init__(path, opener=lambda *_: descriptor)
        size = os.fstat(self.fileno()).st_size
        offset, length = part or (0, size)
        self._start, self._end = offset, max(offset, min(offset + length, size))
        self._check = check
        self._on_bytes = on_bytes
        # Highest position reported so far: a retry of the store reads bytes twice.
        self._seen = 0
        self.seek(0)

    def read(self, size: int | None = -1, /) -> Any:
        self._check()
        left = max(self._end - self._start - self.tell(), 0)
        wanted = left if size is None or size < 0 else min(size, left)
        data = super().read(wanted)
        position = self.tell()
        if position > self._seen:
            self._on_bytes(position - self._seen)
            self._seen = position
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence == io.SEEK_CUR:
            offset += self.tell()
        begin = self._end if whence == io.SEEK_END else self._start
        return super().seek(begin + offset) - self._start

    def tell(self) -> int:
        return super().tell() - self._start
