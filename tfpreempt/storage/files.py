"""The file operations a commit is made of, one method each.

Every change that a commit makes to a disk goes through one of these, so that a test can
record them, or fail at any one of them (`tfpreempt.testing.storage.FaultyFiles`).
Reading needs no such seam, as it changes nothing: see `reading.py`.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Iterable, Iterator
from typing import IO, Protocol

from tfpreempt.storage import paths, pieces

_CANNOT_BE_SYNCED = (errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP)


class Files(Protocol):
    """What a commit asks of a file system. All methods raise OSError."""

    def make_dirs(self, path: str) -> None:
        """Makes a directory and its parents; one that exists is fine."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Creates or overwrites a file; not durable before `sync_file`."""
        ...

    def write_pieces(self, path: str, data: Iterable[bytes | memoryview]) -> None:
        """The same with bytes that come one piece after the other."""
        ...

    def sync_file(self, path: str) -> None:
        """Returns when the file's bytes and size are on the device."""
        ...

    def sync_dir(self, path: str) -> None:
        """Returns when the directory's entries are on the device."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Gives a file or directory another name, atomically."""
        ...

    def remove(self, path: str) -> None:
        """Deletes a file; one that is gone already is fine."""
        ...

    def remove_dir(self, path: str) -> None:
        """Deletes an empty directory; one that is gone already is fine."""
        ...


class LocalFiles:
    """The file system of this machine."""

    def make_dirs(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def write(self, path: str, data: bytes) -> None:
        with open(path, "wb") as file:
            file.write(data)

    def write_pieces(self, path: str, data: Iterable[bytes | memoryview]) -> None:
        with open(path, "wb", buffering=0) as file:
            for piece in data:
                pieces.write(file, piece)

    def sync_file(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync_dir(self, path: str) -> None:
        self.sync_file(path)

    def rename(self, source: str, target: str) -> None:
        os.replace(source, target)

    def remove(self, path: str) -> None:
        try:
            os.remove(path)
        except FileNotFoundError:
            pass

    def remove_dir(self, path: str) -> None:
        try:
            os.rmdir(path)
        except FileNotFoundError:
            pass


def files_for(directory: str) -> Files:
    """The operations that reach a checkpoint directory, a path or a URL."""
    if not paths.is_url(directory):
        return LocalFiles()
    from tfpreempt.storage.gfile import GfileFiles

    return GfileFiles()


@contextlib.contextmanager
def create(path: str) -> Iterator[IO[bytes]]:
    """A new file to write into, in a directory that is made if need be.

    Yields:
        A file; what is written to a URL appears when the body ends without an error.

    Raises:
        OSError: as the storage says.
    """
    files = files_for(path)
    files.make_dirs(os.path.dirname(path))
    if not paths.is_url(path):
        with open(path, "xb") as file:
            yield file
        return
    buffer = io.BytesIO()
    yield buffer
    files.write(path, buffer.getvalue())


def write_durably(files: Files, path: str, data: bytes) -> None:
    """Writes a small file so that a reader sees all of it or none of it.

    Args:
        files: the operations to use.
        path: where it goes; on a disk, `<path>.tmp` is used on the way.
        data: all of its bytes.

    Raises:
        OSError: as the file system says.
    """
    if paths.is_url(path):
        files.write(path, data)  # an object is there whole or not at all
        return
    temporary = path + ".tmp"
    files.write(temporary, data)
    files.sync_file(temporary)
    files.rename(temporary, path)
    files.sync_dir(os.path.dirname(path))


def make_lasting_dirs(files: Files, path: str) -> None:
    """Makes a directory and its parents on a disk, and syncs the names that are new.

    What is synced in a directory is lost with it, where its own name is not.

    Args:
        files: the operations to use.
        path: absolute; a directory that exists is fine.

    Raises:
        OSError: as the file system says.
    """
    new = []
    above = path
    while not os.path.isdir(above):
        new.append(above)
        above = os.path.dirname(above)
    files.make_dirs(path)
    for each in new:
        sync_name(files, each)


def sync_name(files: Files, path: str) -> None:
    """Returns when the name of a file or directory is on the device.

    What lies in a directory that may not be read is the matter of who may, and some
    file systems (autofs, squashfs) cannot sync a directory.

    Raises:
        OSError: as the file system says.
    """
    try:
        files.sync_dir(os.path.dirname(path))
    except OSError as error:
        if error.errno not in _CANNOT_BE_SYNCED:
            raise


def remove_if_empty(files: Files, path: str) -> None:
    """Deletes a directory unless something is in it.

    Raises:
        OSError: as the file system says.
    """
    try:
        files.remove_dir(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
