"""ObjectStore of a directory that TensorFlow serves by a URL, such as ram://.

For reading commits and keeping notes beside them. TensorFlow's file systems have no
exclusive create, so of two that put the same name at once both may think that they won;
nothing of ours races there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import IO

from tfpreempt import errors
from tfpreempt.storage import failure, pieces, reading
from tfpreempt.storage.files import files_for
from tfpreempt.storage.interface import (
    ObjectMissingError,
    ObjectStat,
    check_name,
)

_PIECE = 4 << 20


class UrlStore:
    """The files below a URL as objects.

    Args:
        root: the URL; it need not exist.
        unreadable: raised for a file that the place does not give back now.
    """

    def __init__(
        self,
        root: str,
        *,
        unreadable: type[errors.CheckpointError] = errors.CheckpointError,
    ) -> None:
        self._root = root.rstrip("/")
        self._files = files_for(root)
        self._unreadable = unreadable

    @property
    def uri(self) -> str:
        return self._root

    def put_if_absent(
        self, name: str, source: IO[bytes], *, timeout: float | None = None
    ) -> bool:
        if reading.is_there(self._path(name)):
            return False
        self.replace(name, b"".join(pieces.of(source, _PIECE)), timeout=timeout)
        return True

    def replace(self, name: str, data: bytes, *, timeout: float | None = None) -> None:
        del timeout
        path = self._path(name)
        with failure.translated(f"put {name!r}", self._root):
            self._files.make_dirs(path.rpartition("/")[0])
            self._files.write(path, data)

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
        found = self.stat(name)
        if found is None:
            raise ObjectMissingError(f"There is no object {name!r} in {self._root!r}.")
        if offset >= found.size:
            return 0  # TensorFlow refuses to look there
        with self._edge(name):
            file = reading.open_file(self._path(name))
        with file:
            with self._edge(name):
                file.seek(offset)

            def read(position: int, size: int) -> bytes:
                del position  # one after the other
                with self._edge(name):
                    return pieces.read(file, size)

            return pieces.copy(read, target, offset=offset, length=length, size=_PIECE)

    def list(self, prefix: str = "") -> Iterator[str]:
        yield from (n for n in reading.tree(self._root) if n.startswith(prefix))

    def folders(self, *, timeout: float | None = None) -> Iterator[str]:
        del timeout
        try:
            _, found, _ = next(reading.walk(self._root), ("", [], []))
            holding = [name for name in found if self._has_any(name)]
        except OSError as error:
            raise errors.CheckpointError(
                f"{self._root!r} cannot be listed: {error}"
            ) from error
        yield from holding

    def stat(self, name: str, *, timeout: float | None = None) -> ObjectStat | None:
        del timeout
        path = self._path(name)
        with self._edge(name):
            try:
                if not reading.is_file(path):
                    return None
                found = reading.stat(path)
            except FileNotFoundError:
                return None
        return ObjectStat(
            name=name,
            size=found.size,
            crc32c=None,
            generation=str(found.modified_ns),
        )

    def delete(self, name: str, *, timeout: float | None = None) -> bool:
        del timeout
        path = self._path(name)
        if not reading.is_file(path):
            return False
        # A folder stays, where there are any: TensorFlow removes it only with all that
        # another put may just have written there.
        with failure.translated(f"delete {name!r}", self._root):
            self._files.remove(path)
        return True

    def _has_any(self, folder: str) -> bool:
        """Whether a file lies in it; an object store has no empty folders."""
        return any(names for *_, names in reading.walk(f"{self._root}/{folder}"))

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_name(name)}"

    @contextlib.contextmanager
    def _edge(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._unreadable(
                f"{name!r} in {self._root!r} cannot be read: {error}"
            ) from error
