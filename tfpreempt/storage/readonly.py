"""ObjectStore of a directory that is only looked at: nothing made, no link followed.

What lies in a checkpoint directory may have been put there by anybody. So every part
of a name is opened from the directory above it and must be what it should: a directory,
and at the end a regular file. A pipe is never waited for, a link never leads elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import IO

from tfpreempt import errors
from tfpreempt.storage import checksum, pieces
from tfpreempt.storage.interface import (
    ObjectMissingError,
    ObjectStat,
    check_name,
)
from tfpreempt.storage.reading import telling_shortage

# Small enough to be in the processor's cache still when it is summed up; smaller ones
# cost more, because the sum holds the interpreter's lock.
_PIECE = 2 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


class ReadingStore:
    """The files below a directory as objects, to be read.

    Args:
        root: an existing directory; links on the way to it are the caller's.

    Raises:
        ConfigurationError: it is no directory.
    """

    def __init__(self, root: str) -> None:
        self._root = os.path.abspath(root)
        if not os.path.isdir(self._root):
            raise errors.ConfigurationError(
                f"There is no directory {root!r}. Check the path."
            )

    @property
    def uri(self) -> str:
        return self._root

    def put_if_absent(
        self, name: str, source: IO[bytes], *, timeout: float | None = None
    ) -> bool:
        del source, timeout
        raise self._refusal("put", name)

    def replace(self, name: str, data: bytes, *, timeout: float | None = None) -> None:
        del data, timeout
        raise self._refusal("replace", name)

    def delete(self, name: str, *, timeout: float | None = None) -> bool:
        del timeout
        raise self._refusal("delete", name)

    def get(
        self,
        name: str,
        target: IO[bytes],
        *,
        offset: int = 0,
        length: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """As in the interface; also raises CheckpointDamagedError for what is no file.

        Args:
            name: of the object.
            target: written to from its position on, in pieces.
            offset: first byte that is wanted.
            length: bytes wanted; None: all that follow.
            timeout: a disk has none.

        Raises:
            CheckpointDamagedError: it is a link, no regular file, or unreadable.
        """
        del timeout
        with self._opened(name) as descriptor:

            def read(position: int, size: int) -> bytes:
                try:
                    return os.pread(descriptor, size, position)
                except OSError as error:
                    raise self._damaged(name, error) from error

            return pieces.copy(read, target, offset=offset, length=length, size=_PIECE)

    def list(self, prefix: str = "") -> Iterator[str]:
        yield from sorted(self._names(prefix))

    def folders(self, *, timeout: float | None = None) -> Iterator[str]:
        del timeout
        with os.scandir(self._root) as entries:
            yield from sorted(
                e.name for e in entries if e.is_dir(follow_symlinks=False)
            )

    def stat(self, name: str, *, timeout: float | None = None) -> ObjectStat | None:
        del timeout
        try:
            with self._opened(name) as descriptor:
                status = os.fstat(descriptor)
                crc = 0
                while piece := os.read(descriptor, _PIECE):
                    crc = checksum.extended(crc, piece)
        except ObjectMissingError:
            return None
        except OSError as error:
            raise self._damaged(name, error) from error
        return ObjectStat(
            name=name,
            size=status.st_size,
            crc32c=crc,
            generation=f"{status.st_ino}-{status.st_mtime_ns}",
        )

    def size(self, name: str) -> int | None:
        """Bytes of a file, without reading them; None if there is none.

        Raises:
            CheckpointDamagedError: it is a link, no regular file, or unreadable.
        """
        try:
            with self._opened(name) as descriptor:
                return os.fstat(descriptor).st_size
        except ObjectMissingError:
            return None

    def seems_of_size(self, name: str, size: int) -> bool:
        """Whether a file of this size seems to be there; quick, and links fool it."""
        try:
            return os.lstat(os.path.join(self._root, check_name(name))).st_size == size
        except OSError:
            return False

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        try:
            with telling_shortage(os.path.join(self._root, name)):
                descriptor = self._open(check_name(name))
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise ObjectMissingError(
                    f"There is no file {name!r} in {self._root!r}."
                ) from error
            raise self._damaged(name, error) from error
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise errors.CheckpointDamagedError(
                    f"{name!r} in {self._root!r} is no regular file."
                )
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

    def _names(self, prefix: str) -> Iterator[str]:
        """Files and links that begin with it; only folders that can are entered."""
        above = prefix.rpartition("/")[0]
        top = os.path.join(self._root, above) if above else self._root
        if above and (check_name(above) and os.path.islink(top)):
            return
        for folder, folders, names in os.walk(top):
            links = [n for n in folders if os.path.islink(os.path.join(folder, n))]
            for name in (*names, *links):
                path = os.path.relpath(os.path.join(folder, name), self._root)
                if path.startswith(prefix):
                    yield path

    def _damaged(self, name: str, error: OSError) -> errors.CheckpointDamagedError:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            reason = "is a link, or behind one, or behind a file; links aren't followed"
        else:
            reason = f"cannot be read: {error.strerror or error}"
        return errors.CheckpointDamagedError(f"{name!r} in {self._root!r} {reason}.")

    def _refusal(self, doing: str, name: str) -> errors.UsageError:
        return errors.UsageError(
            f"Cannot {doing} {name!r}: {self._root!r} was opened for looking only. Use "
            "LocalStore."
        )
