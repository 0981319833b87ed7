"""ObjectStore in a file system of fsspec that the user hands over; pyarrow's by fsspec.

What such an object can promise differs with what is behind it, and few can create a
file only if there is none. So `put_if_absent` is best effort here: it writes under
another name, looks, and moves. Of two writers that put one name at the same moment both
may be told that they did, and the last one's bytes stay. Whether a file is durable when
it is closed, and whether a move is atomic, is for the file system to say; and it alone
knows time-outs, so `timeout` is not looked at. For gs:// and s3:// our own stores
promise more.

Neither library is a dependency: who passes an object of one has it.
"""

from __future__ import annotations

import contextlib
import io
import secrets
from collections.abc import Iterator
from typing import IO, Any

from tfpreempt import errors
from tfpreempt.storage import pieces
from tfpreempt.storage.interface import (
    ObjectMissingError,
    ObjectStat,
    check_name,
)

_TEMPORARY = ".tfpreempt-put-"
_PIECE = 4 << 20
# What may tell that a file was replaced; file systems differ in what they know.
_CHANGING = ("etag", "ETag", "generation", "mtime", "created", "ino", "size")


def as_fsspec(filesystem: Any) -> Any:
    """A file system of fsspec, or of pyarrow, as one of fsspec; None for all else.

    Raises:
        ConfigurationError: it is pyarrow's, and fsspec is not installed.
    """
    if all(hasattr(filesystem, name) for name in ("info", "find", "mv", "rm_file")):
        return filesystem
    if not all(hasattr(filesystem, name) for name in ("get_file_info", "delete_file")):
        return None
    try:
        from fsspec.implementations.arrow import ArrowFSWrapper
    except ImportError as error:
        raise errors.ConfigurationError(
            f"Got the pyarrow file system {filesystem!r}, which is read by fsspec, and "
            f"that cannot be imported: {error}. Run `pip install fsspec`."
        ) from error
    return ArrowFSWrapper(filesystem)


class FilesystemStore:
    """Objects as files below a directory of a file system; links are no objects.

    Args:
        filesystem: of fsspec.
        root: the directory; made by the first put.
    """

    def __init__(self, filesystem: Any, root: str) -> None:
        self._fs = filesystem
        self._root = str(filesystem._strip_protocol(root)).rstrip("/")

    @property
    def uri(self) -> str:
        protocol = self._fs.protocol
        scheme = protocol if isinstance(protocol, str) else protocol[0]
        return f"{scheme}:{self._root}"

    def put_if_absent(
        self, name: str, source: IO[bytes], *, timeout: float | None = None
    ) -> bool:
        del timeout
        if self.stat(name) is not None:
            return False
        return self._write(name, source, is_new=True)

    def replace(self, name: str, data: bytes, *, timeout: float | None = None) -> None:
        del timeout
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
        if self.stat(name) is None:
            raise ObjectMissingError(f"There is no object {name!r} in {self.uri}.")
        doing, path = f"read {name!r}", self._path(name)
        with self._edge(doing, errors.CheckpointError):
            file = self._fs.open(path, "rb")

        def read(position: int, size: int) -> bytes:
            del position  # one after the other: a seek may be a request
            with self._edge(doing, errors.CheckpointError):
                return pieces.read(file, size)

        with contextlib.closing(file):
            with self._edge(doing, errors.CheckpointError):
                file.seek(offset)
            return pieces.copy(read, target, offset=offset, length=length, size=_PIECE)

    def list(self, prefix: str = "") -> Iterator[str]:
        with self._edge("list files", errors.CheckpointError):
            self._fs.invalidate_cache()
            found = self._fs.find(self._root, detail=True)
        for path, info in sorted(found.items()):
            name = path.removeprefix(self._root + "/")
            is_temporary = name.rpartition("/")[2].startswith(_TEMPORARY)
            if _is_file(info) and name.startswith(prefix) and not is_temporary:
                yield name

    def folders(self, *, timeout: float | None = None) -> Iterator[str]:
        del timeout
        yield from sorted({n.partition("/")[0] for n in self.list() if "/" in n})

    def stat(self, name: str, *, timeout: float | None = None) -> ObjectStat | None:
        del timeout
        path = self._path(name)
        with self._edge(f"look at {name!r}", errors.CheckpointError):
            # fsspec caches listings, and other processes write too.
            self._fs.invalidate_cache()
            try:
                info = self._fs.info(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
        if not _is_file(info):
            return None
        changing = "-".join(str(info[key]) for key in _CHANGING if key in info)
        return ObjectStat(
            name=name, size=info["size"], crc32c=None, generation=changing
        )

    def delete(self, name: str, *, timeout: float | None = None) -> bool:
        del timeout
        if self.stat(name) is None:
            return False
        with self._edge(f"delete {name!r}", errors.SaveError):
            self._fs.rm_file(self._path(name))
        return True

    def _write(self, name: str, source: IO[bytes], *, is_new: bool) -> bool:
        """Writes under another name and moves; whether it did."""
        path, doing = self._path(name), f"write {name!r}"
        folder = path.rpartition("/")[0]
        temporary = f"{folder}/{_TEMPORARY}{secrets.token_hex(8)}"
        try:
            with self._edge(doing, errors.SaveError):
                self._fs.makedirs(folder, exist_ok=True)
                file = self._fs.open(temporary, "wb")
            with contextlib.closing(file):
                for piece in pieces.of(source, _PIECE):
                    with self._edge(doing, errors.SaveError):
                        file.write(piece)
            with self._edge(doing, errors.SaveError):
                if is_new and self.stat(name) is not None:
                    return False
                self._fs.mv(temporary, path)
                return True
        finally:
            with contextlib.suppress(Exception):  # it was moved, or never was
                self._fs.rm_file(temporary)

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


def _is_file(info: Any) -> bool:
    return info.get("type") == "file" and not info.get("islink")
