"""ObjectStore in a directory of this machine.

What lies in a directory may have been put there by anybody. So every part of a name is
opened from the directory above it and must be what it should: a directory, and at the
end a regular file. A pipe is never waited for, and a link never leads elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import stat
import threading
from collections.abc import Iterator
from typing import IO

from tfpreempt import errors
from tfpreempt.storage import failure, pieces
from tfpreempt.storage.files import Files, LocalFiles, remove_if_empty
from tfpreempt.storage.interface import (
    ObjectMissingError,
    ObjectStat,
    check_name,
)
from tfpreempt.storage.reading import telling_shortage

TEMPORARY = ".tfpreempt-put-"  # begins the name of a file until it is whole
# Small enough to be in the processor's cache still when it is summed up; smaller ones
# cost more, because the sum holds the interpreter's lock.
_PIECE = 2 << 20
# A put that wrote nothing for that long was killed. If it was only stopped, it fails
# when it goes on, and says so.
_LEFT_OVER_SECONDS = 3600.0
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_REGULAR = (errno.ENXIO, errno.ENODEV)  # of a socket, or a device without a driver


class LocalStore:
    """Objects as files below a directory, which itself may be a link.

    A link below it is listed, so that it is not lost in silence, and what it points to
    is never read, written or deleted. Reading makes nothing.

    Args:
        root: a directory that is not there is empty; made by the first put.
        files: the file operations.
        unreadable: raised for a file that the disk does not give back now. It may in a
            moment, so that is damage only where an older commit is as good.

    Raises:
        ConfigurationError: the root is a file.
    """

    def __init__(
        self,
        root: str,
        files: Files | None = None,
        *,
        unreadable: type[errors.CheckpointError] = errors.CheckpointError,
    ) -> None:
        self._root = os.path.abspath(root)
        if os.path.exists(self._root) and not os.path.isdir(self._root):
            raise errors.ConfigurationError(
                f"{self._root!r} is a file; expected a directory. Remove the file or "
                "choose another directory."
            )
        self._files = files or LocalFiles()
        self._unreadable = unreadable
        self._lock = threading.Lock()
        self._is_swept = False

    @property
    def uri(self) -> str:
        return self._root

    def put_if_absent(
        self, name: str, source: IO[bytes], *, timeout: float | None = None
    ) -> bool:
        del timeout  # a disk has none
        with self._written(name, source) as (temporary, path):
            if not self._link(temporary, path):
                return False
            self._files.sync_dir(os.path.dirname(path))
        return True

    def replace(self, name: str, data: bytes, *, timeout: float | None = None) -> None:
        del timeout
        with self._written(name, io.BytesIO(data)) as (temporary, path):
            self._files.rename(temporary, path)
            self._files.sync_dir(os.path.dirname(path))

    def get(
        self,
        name: str,
        target: IO[bytes],
        *,
        offset: int = 0,
        length: int | None = None,
        timeout: float | None = None,
    ) -> int:
        del timeout
        with self._opened(name) as descriptor:

            def read(position: int, size: int) -> bytes:
                try:
                    with telling_shortage(self._path(name)):
                        return os.pread(descriptor, size, position)
                except OSError as error:
                    raise self._refusal(name, error) from error

            return pieces.copy(read, target, offset=offset, length=length, size=_PIECE)

    def list(self, prefix: str = "") -> Iterator[str]:
        try:
            yield from sorted(self._names(prefix))
        except OSError as error:
            raise self._unlisted(error) from error

    def folders(self, *, timeout: float | None = None) -> Iterator[str]:
        del timeout
        try:
            with os.scandir(self._root) as entries:
                found = sorted(
                    e.name for e in entries if e.is_dir(follow_symlinks=False)
                )
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._unlisted(error) from error
        yield from found

    def stat(self, name: str, *, timeout: float | None = None) -> ObjectStat | None:
        del timeout
        try:
            with self._opened(name) as descriptor:
                status = os.fstat(descriptor)
        except ObjectMissingError:
            return None
        return ObjectStat(
            name=name,
            size=status.st_size,
            crc32c=None,
            generation=f"{status.st_ino}-{status.st_mtime_ns}",
        )

    def delete(self, name: str, *, timeout: float | None = None) -> bool:
        del timeout
        path = self._path(name)
        if self._is_linked(name) or not os.path.isfile(path):
            return False
        with failure.translated(f"delete {name!r}", self._root):
            self._files.remove(path)
            self._files.sync_dir(os.path.dirname(path))
            self._remove_empty(os.path.dirname(path))
        return True

    def _link(self, temporary: str, path: str) -> bool:
        """Unlike a rename, this refuses to replace; whether it was done."""
        try:
            try:
                os.link(temporary, path)
            except FileNotFoundError:  # the folder went with its last object meanwhile
                self._files.make_dirs(os.path.dirname(path))
                os.link(temporary, path)
        except FileExistsError:
            return False
        return True

    def _remove_empty(self, folder: str) -> None:
        """Object storage has no empty folders: the store would list them for ever."""
        while folder != self._root and not os.listdir(folder):
            remove_if_empty(self._files, folder)
            folder = os.path.dirname(folder)

    @contextlib.contextmanager
    def _written(self, name: str, source: IO[bytes]) -> Iterator[tuple[str, str]]:
        """A durable file under another name, and the path that is to be its own.

        What reading the source raises is the caller's; what the disk says is ours.
        """
        path, doing = self._path(name), f"put {name!r}"
        if self._is_linked(name):
            raise errors.SaveError(
                f"{path!r} leads through a symbolic link; expected plain directories "
                f"below {self._root!r}. Remove the link, or choose another directory."
            )
        temporary = os.path.join(self._root, TEMPORARY + secrets.token_hex(8))
        try:
            with failure.translated(doing, self._root):
                self._files.make_dirs(os.path.dirname(path))
                file = io.FileIO(temporary, "x")
            with file:
                self._sweep(os.fstat(file.fileno()).st_mtime)
                for piece in pieces.of(source, _PIECE):
                    with failure.translated(doing, self._root):
                        _write_all(file, piece)
            with failure.translated(doing, self._root):
                self._files.sync_file(temporary)
                yield temporary, path
        finally:
            with failure.translated("clean up", self._root):
                self._files.remove(temporary)

    def _sweep(self, now: float) -> None:
        """Deletes what killed puts left behind, once, at this store's first put.

        Args:
            now: when a file was just made, by the clock of whoever dates them.
        """
        with self._lock:
            if self._is_swept:
                return
            self._is_swept = True
        with contextlib.suppress(OSError):  # no reason for the put to fail
            with os.scandir(self._root) as entries:
                found = [e.path for e in entries if e.name.startswith(TEMPORARY)]
            for path in found:
                if now - os.lstat(path).st_mtime > _LEFT_OVER_SECONDS:
                    self._files.remove(path)

    def _names(self, prefix: str) -> Iterator[str]:
        """Files and links that begin with it; only folders that can are entered."""

        def refuse(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise error  # what could not be listed must not pass for empty

        above = prefix.rpartition("/")[0]
        if above and self._is_linked(check_name(above)):
            return
        top = os.path.join(self._root, above) if above else self._root
        start = len(os.path.join(self._root, ""))
        for folder, folders, files in os.walk(top, onerror=refuse):
            links = [n for n in folders if os.path.islink(os.path.join(folder, n))]
            for each in (*files, *links):
                name = os.path.join(folder, each)[start:]
                if name.startswith(prefix) and not name.startswith(TEMPORARY):
                    yield name

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        """A regular file, for reading.

        Raises:
            ObjectMissingError: there is none of this name.
            CheckpointDamagedError: it is a link, or something else that is no file.
            CheckpointError: it cannot be opened; see `unreadable`.
        """
        missing = f"There is no object {name!r} in {self._root!r}."
        try:
            with telling_shortage(self._path(name)):
                descriptor = self._open(name)
        except FileNotFoundError as error:
            raise ObjectMissingError(missing) from error
        except OSError as error:
            if error.errno == errno.ENOTDIR and not self._is_linked(name):
                raise ObjectMissingError(missing) from error
            raise self._refusal(name, error) from error
        try:
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISDIR(mode):
                raise ObjectMissingError(missing)
            if not stat.S_ISREG(mode):
                raise self._damaged(name, "is no regular file")
            yield descriptor
        finally:
            os.close(descriptor)

    def _open(self, name: str) -> int:
        *folders, last = name.split("/")
        here = os.open(self._root, _FOLDER)
        try:
            for part in folders:
                inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=here)
                os.close(here)
                here = inner
            return os.open(last, _FILE, dir_fd=here)
        finally:
            os.close(here)

    def _is_linked(self, name: str) -> bool:
        """Whether a part of a name's path is a symbolic link."""
        path = self._root
        for part in name.split("/"):
            path = os.path.join(path, part)
            if os.path.islink(path):
                return True
        return False

    def _refusal(self, name: str, error: OSError) -> errors.CheckpointError:
        """What is wrong with the object is damage; with the disk, perhaps not."""
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            return self._damaged(
                name, "is a link, or behind one; links aren't followed"
            )
        if error.errno in _NOT_REGULAR:
            return self._damaged(name, "is no regular file")
        return self._unreadable(
            f"{name!r} in {self._root!r} cannot be read: {error.strerror or error}. "
            "Check the disk or the mount, and the permissions."
        )

    def _damaged(self, name: str, reason: str) -> errors.CheckpointDamagedError:
        return errors.CheckpointDamagedError(f"{name!r} in {self._root!r} {reason}.")

    def _unlisted(self, error: OSError) -> errors.CheckpointError:
        return errors.CheckpointError(f"{self._root!r} cannot be listed: {error}.")

    def _path(self, name: str) -> str:
        return os.path.join(self._root, check_name(name))


def _write_all(file: io.FileIO, piece: bytes) -> None:
    rest = memoryview(piece)
    while rest:
        rest = rest[file.write(rest) :]
