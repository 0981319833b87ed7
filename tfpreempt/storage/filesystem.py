"""ObjectStore in a file system object of fsspec or pyarrow that the user hands over.

What such an object can promise differs with what is behind it, and few can create a
file only if there is none. So `put_if_absent` is best effort here: it writes under
another name, looks, and moves. Of two writers that put one name at the same moment both
may be told that they did, and the last one's bytes stay. Whether a file is durable when
it is closed, and whether a move is atomic, is for the file system to say; and it alone
knows time-outs, so `timeout` is not looked at. For gs:// and s3:// our own stores
promise more.
"""

from __future__ import annotations

import contextlib
import io
import secrets
from collections.abc import Iterator
from typing import IO, Any

from tfpreempt import errors
from tfpreempt.storage import checksum, pieces
from tfpreempt.storage.filesystem_kinds import Kind
from tfpreempt.storage.interface import (
    ObjectMissingError,
    ObjectStat,
    check_name,
)

_TEMPORARY = ".tfpreempt-put-"
_PIECE = 4 << 20


class FilesystemStore:
    """Objects as files below a directory of a file system.

    Args:
        kind: the file system.
        root: the directory; made by the first put.
    """

    def __init__(self, kind: Kind, root: str) -> None:
        self._kind = kind
        self._root = kind.normal(root).rstrip("/")

    @property
    def uri(self) -> str:
        return f"{self._kind.name}:{self._root}"

    def put_if_absent(
        self, name: str, source: IO[bytes], *, timeout: float | None = None
    ) -> bool:
        del timeout
        path = self._path(name)
        with self._edge(f"look at {name!r}", errors.SaveError):
            if self._kind.look(path) is not None:
                return False
        return self._write(name, source, is_new=True)

    def replace(self, name: str, data: bytes, *, timeout: float | None = None) -> None:
        del timeout
        check_name(name)
        self._write(name, io.BytesIO(data), is_new=False)

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
        with self._edge(f"read {name!r}", errors.CheckpointError):
            file = self._open(name, path)

        def read(position: int, size: int) -> bytes:
            del position  # one after the other: a seek may be a request
            with self._edge(f"read {name!r}", errors.CheckpointError):
                return bytes(file.read(size))

        with contextlib.closing(file):
            with self._edge(f"read {name!r}", errors.CheckpointError):
                file.seek(offset)
            return pieces.copy(read, target, offset=offset, length=length, size=_PIECE)

    def list(self, prefix: str = "") -> Iterator[str]:
        with self._edge("list files", errors.CheckpointError):
            found = sorted(
                path[len(self._root) + 1 :]
                for path in self._kind.files(self._root)
                if path.startswith(self._root + "/")
            )
        for name in found:
            is_temporary = name.rpartition("/")[2].startswith(_TEMPORARY)
            if name.startswith(prefix) and not is_temporary:
                yield name

    def folders(self, *, timeout: float | None = None) -> Iterator[str]:
        del timeout
        yield from sorted({n.partition("/")[0] for n in self.list() if "/" in n})

    def stat(self, name: str, *, timeout: float | None = None) -> ObjectStat | None:
        del timeout
        path = self._path(name)
        with self._edge(f"look at {name!r}", errors.CheckpointError):
            found = self._kind.look(path)
            if found is None:
                return None
            size, crc = 0, 0
            with contextlib.closing(self._open(name, path)) as file:
                while piece := file.read(_PIECE):
                    size, crc = size + len(piece), checksum.extended(crc, piece)
        return ObjectStat(name=name, size=size, crc32c=crc, generation=found)

    def delete(self, name: str, *, timeout: float | None = None) -> bool:
        del timeout
        path = self._path(name)
        with self._edge(f"delete {name!r}", errors.SaveError):
            if self._kind.look(path) is None:
                return False
            self._kind.remove(path)
        return True

    def _write(self, name: str, source: IO[bytes], *, is_new: bool) -> bool:
        """Writes under another name and moves; whether it did."""
        path = self._path(name)
        temporary = f"{path.rpartition('/')[0]}/{_TEMPORARY}{secrets.token_hex(8)}"
        try:
            with self._edge(f"write {name!r}", errors.SaveError):
                self._kind.make_parent(path)
                file = self._kind.create(temporary)
            with contextlib.closing(file):
                for piece in pieces.of(source, _PIECE):
                    with self._edge(f"write {name!r}", errors.SaveError):
                        file.write(piece)
            with self._edge(f"write {name!r}", errors.SaveError):
                if is_new and self._kind.look(path) is not None:
                    return False
                self._kind.move(temporary, path)
                return True
        finally:
            with contextlib.suppress(Exception):  # it may be moved, or never was
                if self._kind.look(temporary) is not None:
                    self._kind.remove(temporary)

    def _open(self, name: str, path: str) -> Any:
        if self._kind.look(path) is None:
            raise ObjectMissingError(f"There is no object {name!r} in {self.uri}.")
        return self._kind.open(path)

    @contextlib.contextmanager
    def _edge(self, doing: str, kind: type[errors.CheckpointError]) -> Iterator[None]:
        try:
            yield
        except errors.TfpreemptError:
            raise
        except Exception as error:  # each file system has exceptions of its own
            raise kind(
                f"Could not {doing} in {self.uri}: {type(error).__name__}: {error}. "
                "Check the path and the permissions of the file system that was passed "
                "as filesystem=."
            ) from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_name(name)}"
