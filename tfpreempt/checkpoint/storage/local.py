"""ObjectStore in a directory of this machine."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from typing import IO

from tfpreempt import errors
from tfpreempt.checkpoint import checksum
from tfpreempt.checkpoint.storage import failure
from tfpreempt.checkpoint.storage.files import Files, LocalFiles
from tfpreempt.checkpoint.storage.interface import (
    ObjectMissingError,
    ObjectStat,
    check_name,
)

_TEMPORARY = ".tfpreempt-put-"
_PIECE = 4 << 20


class LocalStore:
    """Objects as files below a directory.

    Args:
        root: made if need be.
        files: the file operations.

    Raises:
        ConfigurationError: the root is a file or cannot be written.
    """

    def __init__(self, root: str, files: Files | None = None) -> None:
        self._root = failure.check_directory(root)
        self._files = files or LocalFiles()

    @property
    def uri(self) -> str:
        return self._root

    def put_if_absent(
        self, name: str, source: IO[bytes], *, timeout: float | None = None
    ) -> bool:
        del timeout  # a disk has none
        path = self._path(name)
        temporary = os.path.join(self._root, _TEMPORARY + secrets.token_hex(8))
        with failure.translated(f"put {name!r}", self._root):
            self._files.make_dirs(os.path.dirname(path))
            try:
                with open(temporary, "xb") as file:
                    shutil.copyfileobj(source, file)
                self._files.sync_file(temporary)
                os.link(temporary, path)  # unlike a rename, refuses to replace
            except FileExistsError:
                return False
            finally:
                self._files.remove(temporary)
            self._files.sync_dir(os.path.dirname(path))
        return True

    def replace(self, name: str, data: bytes, *, timeout: float | None = None) -> None:
        del timeout
        path = self._path(name)
        temporary = os.path.join(self._root, _TEMPORARY + secrets.token_hex(8))
        with failure.translated(f"put {name!r}", self._root):
            self._files.make_dirs(os.path.dirname(path))
            try:
                self._files.write(temporary, data)
                self._files.sync_file(temporary)
                self._files.rename(temporary, path)
            finally:
                self._files.remove(temporary)
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
        try:
            with open(self._path(name), "rb", buffering=0) as file:
                file.seek(offset)
                return _copy(file, target, length)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise ObjectMissingError(
                f"There is no object {name!r} in {self._root!r}."
            ) from error
        except OSError as error:
            raise errors.CheckpointError(
                f"Object {name!r} in {self._root!r} cannot be read: {error}"
            ) from error

    def list(self, prefix: str = "") -> Iterator[str]:
        found = []
        for folder, _, names in os.walk(self._root):
            for name in names:
                relative = os.path.relpath(os.path.join(folder, name), self._root)
                relative = relative.replace(os.sep, "/")
                if relative.startswith(prefix) and not name.startswith(_TEMPORARY):
                    found.append(relative)
        yield from sorted(found)

    def folders(self) -> Iterator[str]:
        with os.scandir(self._root) as entries:
            yield from sorted(
                e.name for e in entries if e.is_dir(follow_symlinks=False)
            )

    def stat(self, name: str, *, timeout: float | None = None) -> ObjectStat | None:
        del timeout
        path = self._path(name)
        try:
            status = os.stat(path)
            if not os.path.isfile(path):
                return None
            size, crc = checksum.of_file(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise errors.CheckpointError(
                f"Object {name!r} in {self._root!r} cannot be read: {error}"
            ) from error
        return ObjectStat(
            name=name,
            size=size,
            crc32c=crc,
            generation=f"{status.st_ino}-{status.st_mtime_ns}",
        )

    def delete(self, name: str, *, timeout: float | None = None) -> bool:
        del timeout
        path = self._path(name)
        if not os.path.isfile(path):
            return False
        with failure.translated(f"delete {name!r}", self._root):
            self._files.remove(path)
            self._files.sync_dir(os.path.dirname(path))
        return True

    def _path(self, name: str) -> str:
        return os.path.join(self._root, check_name(name))


def _copy(source: IO[bytes], target: IO[bytes], length: int | None) -> int:
    """Copies up to so many bytes, in pieces; returns how many there were."""
    copied = 0
    while length is None or copied < length:
        left = _PIECE if length is None else min(_PIECE, length - copied)
        piece = source.read(left)
        if not piece:
            break
        target.write(piece)
        copied += len(piece)
    return copied
