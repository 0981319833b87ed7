"""The directory that a download fills, possibly in several attempts.

Unsafe file names in a manifest, and links that another user made in the directory, are
refused before the first byte is written. Files downloaded by a killed process are used
again. A complete file is recognized by its checksum, and a range of a large file by a
line in the file `.tfpreempt-download`, with the checksum of the range. The line is
appended once the range is written. If the line is incomplete or wrong, the range is
downloaded again.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tfpreempt import errors
from tfpreempt.checkpoint.directory import layout
from tfpreempt.checkpoint.directory.catalog import Entry
from tfpreempt.checkpoint.directory.manifest import FileEntry
from tfpreempt.core import contained
from tfpreempt.storage import checksum, chunks, file_reading, paths
from tfpreempt.storage.files import Files, write_durably

# Bytes of a range. A smaller range means more requests, and each request holds Python's
# interpreter lock for milliseconds. With a larger range, a killed download loses more.
_SMALLEST, _LARGEST = 32 << 20, 64 << 20
_SHARES = 8  # wanted number of ranges: one for each of the (by default) 8 threads


class Range(NamedTuple):
    """A range of bytes of a file."""

    offset: int
    length: int


def split(size: int, total: int) -> list[Range]:
    """Returns the ranges of a file; an empty file has no ranges.

    Args:
        size: size of the file in bytes.
        total: size of all files of the checkpoint in bytes; a larger checkpoint has
            longer ranges.
    """
    return ranges_of(size, max(_SMALLEST, min(total // _SHARES, _LARGEST)))


def ranges_of(size: int, length: int) -> list[Range]:
    """Returns the ranges of a file, in order; the last range may be shorter.

    Args:
        size: size of the file in bytes.
        length: length of a range in bytes.
    """
    return [
        Range(offset, min(length, size - offset)) for offset in range(0, size, length)
    ]


def of_range(file: io.FileIO, part: Range) -> int | None:
    """Returns the crc32c of a range of a file; None if the file is too short."""
    file.seek(part.offset)
    found = checksum.of_source(file, part.length)
    return found.crc32c if found.size == part.length else None


class RangeWriter:
    """File object for a store's `get`: writes a range of a local file, and computes the
    checksum of the range.

    Bytes beyond the end of the range are counted, but not written.

    Args:
        file: the open local file; used by this writer only.
        part: range of the file.
        on_piece: function called with the size of each piece before the piece is
            written. If the function raises, `get` ends with that error.

    Attributes:
        crc32c: checksum of the bytes written so far.
    """

    def __init__(
        self, file: io.FileIO, part: Range, on_piece: Callable[[int], None]
    ) -> None:
        self.crc32c = 0
        self._file = file
        self._part = part
        self._on_piece = on_piece
        self._count = 0
        file.seek(part.offset)

    def write(self, data: bytes) -> int:
        self._on_piece(len(data))
        fits = data[: max(0, self._part.length - self._count)]
        self.crc32c = checksum.extended(self.crc32c, fits)
        chunks.write(self._file, fits)
        self._count += len(data)
        return len(data)

    @property
    def fault(self) -> str:
        """Description of a wrong number of received bytes; "" for the right number."""
        offset, length = self._part
        if self._count > length:
            return f"has more than {offset + length} bytes"
        if self._count < length:
            return f"ends after {offset + self._count} bytes"
        return ""


PROGRESS = ".tfpreempt-download"
_FILES = (layout.MANIFEST, layout.MARKER, layout.METADATA)
_CONTROL = (*_FILES, *(f"{name}.tmp" for name in _FILES), PROGRESS)
_MAX_NAME_BYTES = 255
_MAX_PROGRESS_BYTES = 64 << 20


class DownloadTarget:
    """A directory that receives the files of a checkpoint.

    Args:
        target: path of the directory; `filling` creates the directory if missing.
        checkpoint: the checkpoint to download; its manifest names the files.
        files: file operations on the directory.
        root: directory inside which no link is followed; None: the target.
    """

    def __init__(
        self, target: str, checkpoint: Entry, files: Files, root: str | None = None
    ) -> None:
        assert checkpoint.manifest is not None
        self.path = os.path.abspath(target)
        self._root = root or self.path
        self._checkpoint = checkpoint
        self._source = checkpoint.path
        self._manifest = checkpoint.manifest
        self._files = files
        self._recorded: dict[str, dict[Range, int]] = {}

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        """Context in whose body the caller downloads the files.

        Before the body, the context checks the target and creates the directories.
        After the body, the context syncs the directories, so that the names of the
        files are durable, and then writes the MANIFEST.json of a commit.

        Raises:
            CheckpointCorruptedError: the manifest has a file name that a file system
                may refuse, that leads out of the directory, or that tfpreempt uses for
                its own files.
            SaveError: the disk is full.
            CheckpointError: the directory contains another commit; or a file that no
                download has written, under a name that the checkpoint needs.
            OSError: a file operation failed.
        """
        self._check_names()
        self._check_target()
        if not self._is_begun():
            self._check_nothing_is_taken()
        for folder in self._folders:
            self._files.make_dirs(folder)
        with self._opened(PROGRESS, os.O_APPEND) as self._progress:
            size = os.fstat(self._progress.fileno()).st_size
            if size <= _MAX_PROGRESS_BYTES:  # tfpreempt writes no larger file
                self._recorded = _ranges(self._progress.readall())
            self._progress.write(b"\n")  # end an incomplete line of an earlier attempt
            # Sync the name of `.tfpreempt-download` first: by this file, a later
            # attempt knows that the files here are from a download.
            self._files.sync_dir(self.path)
            yield
        self._files.remove(os.path.join(self.path, PROGRESS))
        for folder in reversed(self._folders):
            self._files.sync_dir(folder)
        if data := self._checkpoint.data:
            write_durably(self._files, os.path.join(self.path, layout.MANIFEST), data)

    def open(self, entry: FileEntry) -> io.FileIO:
        """Opens a local file of the checkpoint to read and write, or creates it."""
        return self._opened(entry.name)

    def is_intact(self, entry: FileEntry) -> bool:
        """Returns whether a local file is present and intact.

        Otherwise prepares the download: a file with more than one hard link is removed,
        and a file that is too long is truncated.

        Raises:
            OSError: a file operation failed.
        """
        path, is_same = self._path(entry), self._is_same(entry)
        if is_same is False:
            status = os.lstat(path)
            if status.st_nlink > 1:
                # Another program may have made the second hard link.
                self._files.remove(path)
            elif status.st_size > entry.size:
                with self.open(entry) as file:
                    file.truncate(entry.size)
        return is_same is True

    def kept(self, entry: FileEntry, part: Range) -> int | None:
        """Returns the crc32c of a range that an earlier download has written.

        Returns None without such a range, or if its bytes have changed.
        """
        expected = self._recorded.get(entry.name, {}).get(part)
        if expected is None:
            return None
        with self.open(entry) as file:
            return expected if of_range(file, part) == expected else None

    def record(self, entry: FileEntry, part: Range, crc: int) -> None:
        """Records a written range and its checksum for a later attempt. Thread-safe."""
        line = json.dumps([entry.name, *part, crc]) + "\n"
        self._progress.write(line.encode())

    def sync(self, entry: FileEntry) -> None:
        """Makes the content of a local file durable."""
        self._files.sync_file(self._path(entry))

    def _path(self, entry: FileEntry) -> str:
        return os.path.join(self.path, entry.name)

    def _opened(self, name: str, flags: int = 0) -> io.FileIO:
        def opener(path: str, _: int) -> int:
            flags_of_all = os.O_RDWR | os.O_CREAT | flags
            return contained.open_file(path, flags_of_all, root=self._root, copies=True)

        return io.FileIO(os.path.join(self.path, name), "r+", opener=opener)

    def _is_same(self, entry: FileEntry) -> bool | None:
        """Returns whether a local file matches the manifest; None if it is missing."""
        path = self._path(entry)
        try:
            size = os.lstat(path).st_size
        except FileNotFoundError:
            return None
        if size != entry.size:
            return False
        with file_reading.open_inside(path, self._root) as file:
            found = checksum.of_source(file)
        return (found.size, found.crc32c) == (entry.size, entry.crc32c)

    def _check_names(self) -> None:
        names = {entry.name for entry in self._manifest.files}
        for name in names:
            reason = _why_impossible(name)
            parents = [name[:at] for at, c in enumerate(name) if c == "/"]
            if reason is None and any(parent in names for parent in parents):
                reason = "is below another file"
            if reason is not None:
                shown = repr(name if len(name) <= 120 else name[:120] + "...")
                raise errors.CheckpointCorruptedError(
                    f"The manifest of {self._source} names the file {shown}, which "
                    f"{reason}. The manifest is corrupt, or was not written by "
                    "tfpreempt. No file was written; use another checkpoint."
                )

    def _check_target(self) -> None:
        """Checks that the directory can receive the files.

        Raises:
            CheckpointError: a path is a link, a pipe or a device; or the directory is a
                commit of a different save.
            SaveError: the disk has too little room.
        """
        for folder in self._folders:
            self._check_kind(folder, stat.S_ISDIR, "a directory")
        for name in _CONTROL:
            path = os.path.join(self.path, name)
            self._check_kind(path, stat.S_ISREG, "a file")
        present = 0
        for entry in self._manifest.files:
            status = self._check_kind(self._path(entry), stat.S_ISREG, "a file")
            present += min(entry.size, status.st_blocks * 512) if status else 0
        checkpoint = self._checkpoint
        marker = checkpoint.marker if checkpoint.is_committed else None
        if self._has(layout.MARKER, marker) is False:
            raise errors.CheckpointError(
                f"{self.path!r} has a commit of another save; expected an empty "
                f"directory, or an incomplete download of {self._source}. Choose "
                "another directory."
            )
        self._check_room(self._manifest.bytes - present)

    def _is_begun(self) -> bool:
        """Returns whether the files in the directory are from an earlier download.

        During a download `.tfpreempt-download` of this user exists; after a complete
        download, MANIFEST.json exists. Another user's `.tfpreempt-download` would make
        the download overwrite files that no download has written.
        """
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(os.path.join(self.path, PROGRESS))
            if status.st_uid == os.geteuid():
                return True
        return self._has(layout.MANIFEST, self._checkpoint.data or None) is True

    def _has(self, name: str, data: bytes | None) -> bool | None:
        """Returns whether the file `name` has the content `data`; None if missing."""
        try:
            path = os.path.join(self.path, name)
            with file_reading.open_inside(path, self._root) as file:
                return data is not None and file.read(len(data) + 1) == data
        except FileNotFoundError:
            return None

    def _check_nothing_is_taken(self) -> None:
        """Raises CheckpointError if the download would overwrite a different file."""
        files = self._manifest.files
        taken = [entry.name for entry in files if self._is_same(entry) is False]
        # An old manifest or metadata file would seem to belong to this commit.
        if self._checkpoint.data:
            for name in (layout.MANIFEST, layout.METADATA):
                if os.path.lexists(os.path.join(self.path, name)):
                    taken.append(name)
        if taken:
            more = f" and {len(taken) - 1} more" if len(taken) > 1 else ""
            raise errors.CheckpointError(
                f"{self.path!r} already has a file {taken[0]!r}{more} with other "
                f"content than {self._source}. No file was written. Remove the file or "
                "choose another directory."
            )

    def _check_kind(
        self, path: str, is_kind: Callable[[int], bool], kind: str
    ) -> os.stat_result | None:
        try:
            status = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if is_kind(status.st_mode):
            return status
        is_link = stat.S_ISLNK(status.st_mode)
        found = "a symbolic link" if is_link else "a file of another kind"
        raise errors.CheckpointError(
            f"{path!r} is {found}; expected {kind} or no file, because {self._source} "
            "will be written to this path. No file was written. Remove the file or "
            "choose another directory."
        )

    def _check_room(self, need: int) -> None:
        existing = self.path
        while not os.path.isdir(existing):
            existing = os.path.dirname(existing)
        free = shutil.disk_usage(existing).free
        if need > free:
            raise errors.SaveError(
                f"{self._source} has {self._manifest.bytes:,} bytes according to its "
                f"manifest. {need:,} of these bytes are not yet in {self.path!r}, but "
                f"the file system has only {free:,} bytes free. No file was written. "
                "Free space or choose another directory."
            )

    @functools.cached_property
    def _folders(self) -> list[str]:
        """Paths of the target directory, and of each subdirectory for the files."""
        found = {""}
        for entry in self._manifest.files:
            name = os.path.dirname(entry.name)
            while name not in found:
                found.add(name)
                name = os.path.dirname(name)
        below = sorted(found - {""})
        return [self.path, *(os.path.join(self.path, name) for name in below)]


def _why_impossible(name: str) -> str | None:
    if name in _CONTROL or name.split("/")[0] in _CONTROL:
        return "is a name that tfpreempt uses beside the manifest"
    try:
        parts = name.encode().split(b"/")
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if any(len(part) > _MAX_NAME_BYTES for part in parts):
        return f"has a part of more than {_MAX_NAME_BYTES} bytes"
    return paths.why_unsafe(name)


def _ranges(record: bytes) -> dict[str, dict[Range, int]]:
    """Parses `.tfpreempt-download` of an earlier attempt; skips invalid lines."""
    found: dict[str, dict[Range, int]] = {}
    for line in record.splitlines():
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            name, offset, length, crc = json.loads(line)
            found.setdefault(name, {})[Range(offset, length)] = crc
    return found
