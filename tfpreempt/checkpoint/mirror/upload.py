"""Uploads one commit: its files by parallel threads, the manifest, the marker last.

Every object is compared with the manifest by size and crc32c after it was put, and what
an earlier upload of the same commit left is used again if it is whole. Whoever dies at
any request leaves a folder without a marker, which no reader takes for a commit.

One stream to an object store is slower than the network, and a checkpoint is often one
large file. If the store can make one object of others, a large file is uploaded in
parts. They are objects of their own, apart from the commit's folder, and put by as many
threads as there are:

    parts/<folder>/<file>/<offset>  some bytes of a file of the commit in <folder>

The folder's name stands for the commit's content, so a part that a dead upload has left
is used again. Once there is a marker, or a newer commit, no upload needs the parts any
more: then retention deletes them.
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
from tfpreempt.checkpoint.mirror.download_target import Range
from tfpreempt.core import contained
from tfpreempt.core.threads import map_in_threads
from tfpreempt.storage import checksum
from tfpreempt.storage.interface import (
    MAX_PARTS,
    ComposingStore,
    ObjectStore,
    summed,
)

PARTS = "parts"
SMALLEST = 64 << 20  # each part is three requests: its begin, its bytes, its deletion
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
        threads: how many files, or parts of files, at a time.
        smallest_part: bytes; no file of up to this size goes up in parts.
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
        divided = self._divided(there)
        self._put_files(there, divided)
        self._in_threads(
            functools.partial(self._compose, entry, ranges)
            for entry, ranges in divided.items()
        )
        self._put(there, _entry(layout.MANIFEST, commit.data), commit.data)
        names = [layout.MANIFEST, *(entry.name for entry in manifest.files)]
        self._check_names(names)
        self._before_marker(self._folder)
        self._put(there, _entry(layout.MARKER, commit.marker), commit.marker)

    def _divided(self, there: set[str]) -> dict[FileEntry, list[Range]]:
        """The parts of each file that goes up in parts."""
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
        """All files, or their parts, the largest first."""
        manifest = self.commit.manifest
        assert manifest is not None
        if divided:
            there = there | set(self._store.list(parts_folder(self._folder)))
        jobs = []
        for entry in manifest.files:
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
            patience=PATIENCE_SECONDS,
        )

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
        if self._is_there(there, name, entry):
            self._on_bytes(entry.size if data is None else 0)
            return
        path = self.commit.file(entry.name)
        with self._opened(path) if data is None else io.BytesIO(data) as source:
            self._store.put_if_absent(name, source)
        if not self._is_whole(name, entry):
            self._store.delete(name)
            raise self._broken(name, entry, None if data is not None else path)

    def _put_part(self, there: set[str], entry: FileEntry, part: Range) -> None:
        """One part of a file; what is checked in the end is the object of them all."""
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
        """Makes the object of a file of its parts; retention deletes those."""
        assert isinstance(self._store, ComposingStore)
        self._check()
        name = os.path.join(self._folder, entry.name)
        sources = [part_name(self._folder, entry.name, each) for each in ranges]
        self._store.compose(name, sources)
        if not self._is_whole(name, entry):
            for each in (name, *sources):
                self._store.delete(each)
            raise self._broken(name, entry, self.commit.file(entry.name))

    def _broken(
        self, name: str, entry: FileEntry, path: str | None
    ) -> errors.CheckpointError:
        """Why an object, which was deleted again, had the wrong bytes.

        Args:
            name: of the object.
            entry: what it should be.
            path: the file that was sent; None if it was none.
        """
        expected = (entry.size, entry.crc32c)
        if path is not None and (found := checksum.of_file(path)) != expected:
            return CommitDamagedError(
                f"{path!r} has {found[0]} bytes and crc32c {found[1]:08x}; its "
                f"manifest says {entry.size} and {entry.crc32c:08x}. It is not "
                "uploaded; look at the disk."
            )
        return errors.SaveError(
            f"{self._store.uri}/{name} arrived with another checksum than it was sent "
            "with; it was deleted, to be sent again."
        )

    def _opened(self, path: str, part: Range | None = None) -> _CountedFile:
        root = self.commit.store.uri
        try:
            return _CountedFile(path, part, self._check, self._on_bytes, root)
        except FileNotFoundError as error:
            raise CommitGoneError(f"{path} was deleted before it was copied") from error

    def _is_there(
        self, there: set[str], name: str, expected: FileEntry | checksum.Sum
    ) -> bool:
        """Whether an earlier upload has put an object; what is broken goes."""
        if name not in there:
            return False
        if self._is_whole(name, expected):
            return True
        self._store.delete(name)
        return False

    def _is_whole(self, name: str, expected: FileEntry | checksum.Sum) -> bool:
        found = summed(self._store, name)
        wanted = (expected.size, expected.crc32c)
        return found is not None and (found.size, found.crc32c) == wanted


def _entry(name: str, data: bytes) -> FileEntry:
    return FileEntry(name=name, size=len(data), crc32c=checksum.of_bytes(data))


def parts_of(size: int, total: int, *, threads: int, smallest: int) -> list[Range]:
    """The parts of a file; itself alone if it needs none.

    A file that is no more than a thread's share of the commit holds nobody up. A larger
    one is split into more parts than there are threads: they end together, and an
    upload that dies has lost only the parts that were under way.

    Args:
        size: of the file.
        total: of all files of the commit.
        threads: that upload them.
        smallest: the least size of a part, but for the last one.
    """
    if size * threads <= total or size <= smallest:
        return [Range(0, size)]
    length = max(smallest, -(-size // MAX_PARTS))
    return [
        Range(offset, min(length, size - offset)) for offset in range(0, size, length)
    ]


def parts_folder(commit: str) -> str:
    """What the names of all parts of a commit's files begin with.

    Args:
        commit: its folder.
    """
    return f"{PARTS}/{commit}/"


def part_name(commit: str, file: str, part: Range) -> str:
    """The object that holds a part of a file of a commit."""
    return f"{parts_folder(commit)}{file}/{part.offset:015d}"


class _CountedFile(io.FileIO):
    """A file, or a part of one, that counts what is read and stops when it is told to.

    Args:
        path: of the file.
        part: its bytes that are seen, as if there were no others; None: all.
        check: called before each read; what it raises ends the upload.
        on_bytes: called with the number of bytes of each read.
        root: the directory below which no link is followed.
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
        self._seen = 0  # a store that tries again reads the same bytes twice
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
