"""`Files`: the operations with which a commit changes a file system.

A commit changes the disk only by these methods, so that a test can record every change,
and make any change fail (`FaultyFiles` in `tests/fakes/storage.py`). Functions that
only read are in `file_reading.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from collections.abc import Iterable, Iterator
from typing import IO, Protocol

from tfpreempt.core import contained
from tfpreempt.storage import chunks

NOTHING_THERE = (FileNotFoundError, NotADirectoryError, contained.LinkError)
"""Errors that mean that tfpreempt has no file at a path.

LinkError is one of them, because a link leads to files of other programs.
"""

_CANNOT_BE_SYNCED = (errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP)


class Files(Protocol):
    """File system operations that a commit needs. Every method may raise OSError."""

    def make_dirs(self, path: str) -> None:
        """Makes a directory and its parents; an existing directory is no error."""
        ...

    def write(self, path: str, data: Iterable[bytes | memoryview]) -> None:
        """Creates a file with the content `data`; replaces an existing file.

        The file is durable only after `sync_file`.
        """
        ...

    def sync_file(self, path: str) -> None:
        """Makes a file's content durable: returns when the device has stored it."""
        ...

    def sync_dir(self, path: str) -> None:
        """Makes the names in a directory durable, such as the name of a new file."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Renames a file or directory atomically."""
        ...

    def remove(self, path: str) -> None:
        """Deletes a file; a missing file is no error.

        A directory stays. Whether a directory is an error depends on the class.
        """
        ...

    def remove_dir(self, path: str) -> None:
        """Deletes an empty directory; a missing directory is no error."""
        ...

    def publish(self, path: str, data: bytes) -> None:
        """Writes a small file by which readers find commits, atomically and durably.

        Args:
            path: path of the marker, or of TensorFlow's `checkpoint` file.
            data: the file's whole content.
        """
        ...


@dataclasses.dataclass(eq=False)
class LocalFiles:
    """The file system of this machine.

    Below the root no operation follows a symbolic link; see `core/contained.py`.

    Args:
        root: directory that other users may be able to write to, such as the checkpoint
            directory. If "", operations follow links to directories everywhere.
    """

    root: str = ""

    def make_dirs(self, path: str) -> None:
        with contained.directory(path, self.root, makes=True):
            pass

    def write(self, path: str, data: Iterable[bytes | memoryview]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with contained.parent(path, self.root) as (folder, name):
            try:
                descriptor = contained.open_at(folder, name, flags, path=path)
            except FileExistsError:
                # Do not write into an existing file, but create a new one. The existing
                # file may be a link, a pipe, or a hard link to another program's file;
                # or it may belong to another user, who could change the new content.
                os.remove(name, dir_fd=folder)
                descriptor = contained.open_at(folder, name, flags, path=path)
        with open(path, "wb", buffering=0, opener=lambda *_: descriptor) as file:
            for piece in data:
                chunks.write(file, piece)

    def sync_file(self, path: str) -> None:
        descriptor = contained.open_file(path, os.O_RDONLY, root=self.root)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync_dir(self, path: str) -> None:
        with contained.directory(path, self.root, reads=True) as folder:
            os.fsync(folder)

    def rename(self, source: str, target: str) -> None:
        with (
            contained.parent(source, self.root) as (old, old_name),
            contained.parent(target, self.root) as (new, new_name),
        ):
            os.replace(old_name, new_name, src_dir_fd=old, dst_dir_fd=new)

    def remove(self, path: str) -> None:
        with (
            contextlib.suppress(*NOTHING_THERE),
            contained.parent(path, self.root) as (folder, name),
        ):
            os.remove(name, dir_fd=folder)

    def remove_dir(self, path: str) -> None:
        with (
            contextlib.suppress(*NOTHING_THERE),
            contained.parent(path, self.root) as (folder, name),
        ):
            os.rmdir(name, dir_fd=folder)

    def publish(self, path: str, data: bytes) -> None:
        write_durably(self, path, data)


@contextlib.contextmanager
def create(path: str, root: str = "") -> Iterator[IO[bytes]]:
    """Context that creates a file for writing, and the file's directory if missing.

    Args:
        path: path of the file.
        root: directory below which no link is followed; see `LocalFiles`.

    Yields:
        The open file; closed when the context ends.

    Raises:
        OSError: an operation of the storage failed, or the file exists.
    """
    LocalFiles(root).make_dirs(os.path.dirname(path))
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    descriptor = contained.open_file(path, flags, root=root)
    with open(path, "wb", opener=lambda *_: descriptor) as file:
        yield file


def write_durably(
    files: Files, path: str, data: bytes, temporary: str | None = None
) -> None:
    """Writes a small file so that a reader sees the whole file or no file.

    Args:
        files: file system operations that make the changes.
        path: path of the file.
        data: the file's whole content.
        temporary: path of the file until its content is complete; by default
            `<path>.tmp`.

    Raises:
        OSError: an operation of the file system failed.
    """
    temporary = temporary or path + ".tmp"
    files.write(temporary, [data])
    files.sync_file(temporary)
    files.rename(temporary, path)
    files.sync_dir(os.path.dirname(path))


def replace(path: str, data: bytes) -> None:
    """Replaces a small file so that a reader sees a complete file; syncs nothing.

    The temporary file is new, even if another user has created a link of its name.

    Args:
        path: path of the file, which the user has named.
        data: the file's whole content.

    Raises:
        OSError: an operation of the file system failed.
    """
    files, temporary = LocalFiles(), f"{path}.{os.getpid()}"
    files.write(temporary, [data])
    files.rename(temporary, path)


def make_lasting_dirs(files: Files, path: str) -> None:
    """Makes a directory and its parents durably: syncs the name of each new directory.

    Without the sync, a crash of the machine could remove the name of the directory, and
    with the name all files inside, even synced files.

    Args:
        files: file system operations that make the changes.
        path: absolute path; an existing directory is no error.

    Raises:
        OSError: an operation of the file system failed.
    """
    new = []
    above = path
    while not os.path.isdir(above):
        new.append(above)
        above = os.path.dirname(above)
    files.make_dirs(path)
    for each in new:
        sync_name(files, each)


def sync_names(files: Files, path: str) -> None:
    """Makes the name of an existing directory durable, and the names of its parents.

    Another process or the user's program may have made the directory a moment ago,
    without a sync. The sync stops at the mount point of the file system.

    Args:
        files: file system operations that make the changes.
        path: absolute path of an existing directory.

    Raises:
        OSError: an operation of the file system failed.
    """
    device = os.stat(path).st_dev
    while (above := os.path.dirname(path)) != path and os.stat(above).st_dev == device:
        sync_name(files, path)
        path = above


def sync_name(files: Files, path: str) -> None:
    """Makes the name of a file or directory durable, by a sync of its parent directory.

    Does nothing if this user may not read the parent directory, or if the file system
    cannot sync directories (autofs, squashfs).

    Raises:
        OSError: the sync failed for another reason.
    """
    try:
        files.sync_dir(os.path.dirname(path))
    except OSError as error:
        if error.errno not in _CANNOT_BE_SYNCED:
            raise


def remove_if_empty(files: Files, path: str) -> None:
    """Deletes a directory if the directory is empty.

    Raises:
        OSError: an operation of the file system failed.
    """
    try:
        files.remove_dir(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
