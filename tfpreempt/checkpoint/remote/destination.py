"""The local side of a download: a directory that is filled, again and again if need be.

Everything that a hostile manifest or a planted directory could do is refused before the
first byte is written. What a killed predecessor has fetched is found again: whole files
by their checksum, ranges of large ones by `.tfpreempt-download`, to which every range
is added, with its checksum, when it is there. A line that is torn or untrue only costs
a range.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from collections.abc import Callable, Iterator

from tfpreempt import errors
from tfpreempt.checkpoint import layout
from tfpreempt.checkpoint.manifest import FileEntry, Manifest
from tfpreempt.checkpoint.remote.ranges import Range, of_range
from tfpreempt.storage import checksum, paths
from tfpreempt.storage.files import Files, write_durably

PROGRESS = ".tfpreempt-download"
_CONTROL = (
    layout.MANIFEST,
    layout.MANIFEST + ".tmp",
    layout.MARKER,
    layout.MARKER + ".tmp",
    layout.METADATA,
    layout.METADATA + ".tmp",
    PROGRESS,
)
_MAX_NAME_BYTES = 255
_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Destination:
    """A directory into which the files of a manifest come.

    Args:
        target: its path; made by `prepare` if need be.
        manifest: names the files.
        source: where the manifest comes from, for errors.
        files: the file operations.
    """

    def __init__(
        self, target: str, manifest: Manifest, source: str, files: Files
    ) -> None:
        self.path = os.path.abspath(target)
        self._manifest = manifest
        self._source = source
        self._files = files
        self._recorded: dict[str, dict[Range, int]] = {}
        self._progress: int | None = None
        self._lock = threading.Lock()

    def prepare(self, marker: bytes | None, manifest_data: bytes | None = None) -> None:
        """Checks everything, then makes the directories.

        Args:
            marker: of the commit that comes, None if it is none; one that lies here
                must be the same.
            manifest_data: the bytes of its MANIFEST.json, None if there is to be none.

        Raises:
            CheckpointDamagedError: the manifest names what cannot or must not be.
            SaveError: there is no room.
            CheckpointError: the directory holds something else, or a file of the same
                name that no download has written.
            OSError: as the file system says.
        """
        self._check_names()
        present = self._check_target(marker)
        self._check_room(present)
        if not self._is_begun(manifest_data):
            self._check_nothing_is_taken(manifest_data)
        for folder in sorted({self.path, *self._folders()}):
            self._files.make_dirs(folder)
        path = os.path.join(self.path, PROGRESS)
        self._recorded = _read_progress(path)
        self._progress = os.open(path, _OPEN | os.O_APPEND, 0o666)
        os.write(self._progress, b"\n")  # ends a line that was torn
        self._files.sync_dir(self.path)  # what comes next is told to be ours by it

    def close(self) -> None:
        """Closes what `prepare` opened."""
        if self._progress is not None:
            os.close(self._progress)
            self._progress = None

    def finish(self, manifest_data: bytes | None) -> None:
        """Makes the directories durable and writes MANIFEST.json, the last thing.

        Args:
            manifest_data: its bytes; None where there is no such file.

        Raises:
            OSError: as the file system says.
        """
        self.close()
        self._files.remove(os.path.join(self.path, PROGRESS))
        for folder in sorted({self.path, *self._folders()}, reverse=True):
            self._files.sync_dir(folder)
        if manifest_data is not None:
            path = os.path.join(self.path, layout.MANIFEST)
            write_durably(self._files, path, manifest_data)

    def _path(self, entry: FileEntry) -> str:
        """Where a file goes."""
        return os.path.join(self.path, entry.name)

    def open(self, entry: FileEntry) -> int:
        """A descriptor of a file that can be read and written; made if need be."""
        return os.open(self._path(entry), _OPEN, 0o666)

    def is_whole(self, entry: FileEntry) -> bool:
        """Whether the file is there with its checksum; makes room for it if it isn't.

        Raises:
            OSError: as the file system says.
        """
        path = self._path(entry)
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return False
        expected = (entry.size, entry.crc32c)
        if status.st_size == entry.size and checksum.of_file(path) == expected:
            return True
        if status.st_nlink > 1:
            self._files.remove(path)  # its other name may be somebody else's
        elif status.st_size > entry.size:
            os.truncate(path, entry.size)
        return False

    def kept(self, entry: FileEntry, part: Range) -> int | None:
        """The checksum of a range that a predecessor has fetched; None if none has."""
        expected = self._recorded.get(entry.name, {}).get(part)
        if expected is None:
            return None
        descriptor = self.open(entry)
        try:
            return expected if of_range(descriptor, part) == expected else None
        finally:
            os.close(descriptor)

    def record(self, entry: FileEntry, part: Range, crc: int) -> None:
        """Remembers a range for a successor. Any thread."""
        line = json.dumps([entry.name, *part, crc]) + "\n"
        with self._lock:
            if self._progress is not None:
                os.write(self._progress, line.encode())

    def sync(self, entry: FileEntry) -> None:
        """Makes a file durable."""
        self._files.sync_file(self._path(entry))

    def _check_names(self) -> None:
        names = {entry.name for entry in self._manifest.files}
        for name in names:
            reason = _why_impossible(name)
            parents = [name[:at] for at, c in enumerate(name) if c == "/"]
            if reason is None and any(parent in names for parent in parents):
                reason = "lies below another file"
            if reason is not None:
                shown = repr(name if len(name) <= 120 else name[:120] + "...")
                raise errors.CheckpointDamagedError(
                    f"{self._source} names the file {shown}, which {reason}. It is "
                    "damaged or wasn't written by tfpreempt; nothing was written."
                )

    def _check_target(self, marker: bytes | None) -> int:
        """Refuses planted things; returns the bytes that are there already."""
        for folder in (self.path, *self._folders()):
            self._check_kind(folder, stat.S_ISDIR, "a directory")
        for name in _CONTROL:
            path = os.path.join(self.path, name)
            self._check_kind(path, stat.S_ISREG, "a file")
        present = 0
        for entry in self._manifest.files:
            status = self._check_kind(self._path(entry), stat.S_ISREG, "a file")
            present += min(entry.size, status.st_blocks * 512) if status else 0
        try:
            with open(os.path.join(self.path, layout.MARKER), "rb") as file:
                found = file.read(len(marker or b"") + 1)
        except FileNotFoundError:
            return present
        if found != marker:
            raise errors.CheckpointError(
                f"{self.path!r} is a committed checkpoint of another save; expected "
                "a directory of its own for each. Choose another one."
            )
        return present

    def _is_begun(self, manifest_data: bytes | None) -> bool:
        """Whether an earlier download of this began here: the files are ours then.

        Its record is there from its first byte to its last, then MANIFEST.json is.
        """
        if os.path.lexists(os.path.join(self.path, PROGRESS)):
            return True
        return manifest_data is not None and self._has(layout.MANIFEST, manifest_data)

    def _has(self, name: str, data: bytes) -> bool:
        try:
            with open(os.path.join(self.path, name), "rb") as file:
                return file.read(len(data) + 1) == data
        except FileNotFoundError:
            return False

    def _check_nothing_is_taken(self, manifest_data: bytes | None) -> None:
        """Refuses to write over what somebody else keeps here; equal files may stay."""
        taken = [entry.name for entry in self._manifest.files if self._differs(entry)]
        if manifest_data is not None:  # a note of others would pass for this commit's
            for name in (layout.MANIFEST, layout.METADATA):
                if os.path.lexists(os.path.join(self.path, name)):
                    taken.append(name)
        if taken:
            more = f" and {len(taken) - 1} more" if len(taken) > 1 else ""
            raise errors.CheckpointError(
                f"{self.path!r} has a file {taken[0]!r}{more} already, which isn't "
                f"that of {self._source}. Nothing was written; remove it or choose "
                "another directory."
            )

    def _differs(self, entry: FileEntry) -> bool:
        try:
            size = os.lstat(self._path(entry)).st_size
        except FileNotFoundError:
            return False
        expected = (entry.size, entry.crc32c)
        return size != entry.size or checksum.of_file(self._path(entry)) != expected

    def _check_kind(
        self, path: str, is_kind: Callable[[int], bool], kind: str
    ) -> os.stat_result | None:
        try:
            status = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if is_kind(status.st_mode):
            return status
        found = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "something else"
        raise errors.CheckpointError(
            f"{path!r} is {found}; expected {kind} or nothing, where {self._source} is "
            "to be written. Nothing was written; remove it or choose another directory."
        )

    def _check_room(self, present: int) -> None:
        existing = self.path
        while not os.path.isdir(existing):
            existing = os.path.dirname(existing)
        room = os.statvfs(existing)
        free = room.f_bavail * room.f_frsize
        need = self._manifest.bytes - present
        if need > free:
            raise errors.SaveError(
                f"{self._source} claims to have {self._manifest.bytes:,} bytes, "
                f"{need:,} are missing in {self.path!r}, and the file system has "
                f"{free:,} left. Free space or choose another directory; nothing was "
                "written."
            )

    def _folders(self) -> Iterator[str]:
        """Every directory below the target in which a file lies."""
        seen = set()
        for entry in self._manifest.files:
            name = os.path.dirname(entry.name)
            while name and name not in seen:
                seen.add(name)
                name = os.path.dirname(name)
        for name in sorted(seen):
            yield os.path.join(self.path, name)


def _why_impossible(name: str) -> str | None:
    if name in _CONTROL or name.split("/")[0] in _CONTROL:
        return "is the name of a file that belongs beside the manifest"
    try:
        parts = name.encode().split(b"/")
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if any(len(part) > _MAX_NAME_BYTES for part in parts):
        return f"has a part of more than {_MAX_NAME_BYTES} bytes"
    return paths.why_unsafe(name)


def _read_progress(path: str) -> dict[str, dict[Range, int]]:
    """What a predecessor has recorded; lines that make no sense are passed over."""
    found: dict[str, dict[Range, int]] = {}
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return found
        raise
    with open(descriptor, "rb") as file:
        for line in file:
            try:
                name, offset, length, crc = json.loads(line)
                found.setdefault(name, {})[Range(offset, length)] = crc
            except (ValueError, TypeError):
                continue
    return found
