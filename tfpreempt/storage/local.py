"""ObjectStore in a directory of this machine."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import threading
from collections.abc import Iterator
from typing import IO

from tfpreempt import errors
from tfpreempt.storage import checksum, failure, pieces
from tfpreempt.storage.files import Files, LocalFiles, remove_if_empty
from tfpreempt.storage.interface import (
    ObjectMissingError,
    ObjectStat,
    check_name,
)

_TEMPORARY = ".tfpreempt-put-"
_PIECE = 4 << 20
# A put that wrote nothing for that long was killed. If it was only stopped, it fails
# when it goes on, and says so.
_LEFT_OVER_SECONDS = 3600.0


class LocalStore:
    """Objects as files below a directory; symbolic links in it are no objects.

    A link could lead a reader, or a writer, out of the directory, to wherever whoever
    made it wanted. The directory itself may be one.

    Args:
        root: read as it is; made by the first put.
        files: the file operations.

    Raises:
        ConfigurationError: the root is a file.
    """

    def __init__(self, root: str, files: Files | None = None) -> None:
        self._root = os.path.abspath(root)
        if os.path.exists(self._root) and not os.path.isdir(self._root):
            raise errors.ConfigurationError(
                f"{self._root!r} is a file; expected a directory. Remove the file or "
                "choose another directory."
            )
        self._files = files or LocalFiles()
        self._lock = threading.Lock()
        self._is_swept = False

    @property
    def uri(self) -> str:
        return self._root

    def put_if_absent(
        self, name: str, source: IO[bytes], *, timeout: float | None = None
    ) -> bool:
        del timeout  # a disk has none
        path = self._path_for_writing(name)
        temporary = os.path.join(self._root, _TEMPORARY + secrets.token_hex(8))
        try:
            self._write(name, path, temporary, source)
            with failure.translated(f"put {name!r}", self._root):
                if not self._link(temporary, path):
                    return False
                self._files.sync_dir(os.path.dirname(path))
        finally:
            self._forget(temporary)
        return True

    def replace(self, name: str, data: bytes, *, timeout: float | None = None) -> None:
        del timeout
        path = self._path_for_writing(name)
        temporary = os.path.join(self._root, _TEMPORARY + secrets.token_hex(8))
        try:
            self._write(name, path, temporary, io.BytesIO(data))
            with failure.translated(f"put {name!r}", self._root):
                self._files.rename(temporary, path)
                self._files.sync_dir(os.path.dirname(path))
        finally:
            self._forget(temporary)

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
        path = self._path(name)
        try:
            if self._is_linked(name):
                raise FileNotFoundError("symbolic links are not followed")
            file = io.FileIO(path)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise ObjectMissingError(
                f"There is no object {name!r} in {self._root!r}: {error}."
            ) from error
        except OSError as error:
            raise self._unreadable(name, error) from error

        def read(position: int, size: int) -> bytes:
            try:
                file.seek(position)
                return file.read(size)
            except OSError as error:
                raise self._unreadable(name, error) from error

        with file:
            return pieces.copy(read, target, offset=offset, length=length, size=_PIECE)

    def list(self, prefix: str = "") -> Iterator[str]:
        try:
            found = sorted(self._files_below(""))
        except OSError as error:
            raise self._unreadable("", error) from error
        for name in found:
            is_temporary = name.startswith(_TEMPORARY)
            if name.startswith(prefix) and not is_temporary:
                yield name

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
            raise self._unreadable("", error) from error
        yield from found

    def stat(self, name: str, *, timeout: float | None = None) -> ObjectStat | None:
        del timeout
        path = self._path(name)
        try:
            if self._is_linked(name) or not os.path.isfile(path):
                return None
            status = os.stat(path)
            size, crc = checksum.of_file(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._unreadable(name, error) from error
        return ObjectStat(
            name=name,
            size=size,
            crc32c=crc,
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

    def _write(self, name: str, path: str, temporary: str, source: IO[bytes]) -> None:
        """Writes a durable temporary file; what reading raises is the caller's."""
        doing = f"put {name!r}"
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
                found = [e.path for e in entries if e.name.startswith(_TEMPORARY)]
            for path in found:
                if now - os.lstat(path).st_mtime > _LEFT_OVER_SECONDS:
                    self._files.remove(path)

    def _forget(self, temporary: str) -> None:
        with failure.translated("clean up", self._root):
            self._files.remove(temporary)

    def _files_below(self, folder: str) -> Iterator[str]:
        """Names of all files; directories that vanish meanwhile have none."""
        todo = [folder]
        while todo:
            below = todo.pop()
            try:
                with os.scandir(os.path.join(self._root, below)) as entries:
                    for entry in entries:
                        name = f"{below}/{entry.name}" if below else entry.name
                        if entry.is_dir(follow_symlinks=False):
                            todo.append(name)
                        elif entry.is_file(follow_symlinks=False):
                            yield name
            except FileNotFoundError:
                continue

    def _is_linked(self, name: str) -> bool:
        """Whether a part of a name's path is a symbolic link."""
        path = self._root
        for part in name.split("/"):
            path = os.path.join(path, part)
            if os.path.islink(path):
                return True
        return False

    def _path_for_writing(self, name: str) -> str:
        path = self._path(name)
        if self._is_linked(name):
            raise errors.SaveError(
                f"{path!r} leads through a symbolic link; expected plain directories "
                f"below {self._root!r}. Remove the link, or choose another directory."
            )
        return path

    def _unreadable(self, name: str, error: OSError) -> errors.CheckpointError:
        what = f"Object {name!r} in {self._root!r}" if name else repr(self._root)
        return errors.CheckpointError(f"{what} cannot be read: {error}")

    def _path(self, name: str) -> str:
        return os.path.join(self._root, check_name(name))


def _write_all(file: io.FileIO, piece: bytes) -> None:
    rest = memoryview(piece)
    while rest:
        rest = rest[file.write(rest) :]
