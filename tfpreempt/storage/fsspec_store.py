"""ObjectStore in a file system object of fsspec, or of pyarrow (wrapped by fsspec).

Such a file system may have no atomic "create only if absent". So `put_if_absent` first
checks for the name, and then writes. If two writers create one name at the same moment,
both calls may return True, and the bytes of the last writer remain. Therefore a mirror
cannot use this store.

The user passes the file system object. The object's library determines whether a closed
file is durable and whether a move is atomic. The library has its own timeouts, so the
argument `timeout` is ignored. tfpreempt does not depend on fsspec or pyarrow: a user
who has a file system object has installed the library.
"""

from __future__ import annotations

import contextlib
import io
import secrets
from collections.abc import Iterable, Iterator
from typing import Any

from tfpreempt import errors
from tfpreempt.storage import chunks
from tfpreempt.storage.chunks import SeekableReader, SequentialWriter
from tfpreempt.storage.local import TEMPORARY
from tfpreempt.storage.object_store import (
    ObjectNotFoundError,
    ObjectStat,
    check_name,
)

_PIECE = 4 << 20


class FsspecStore:
    """Store of the files below a directory of an fsspec file system.

    A link counts as missing.

    Args:
        filesystem: file system object of fsspec.
        root: path of the directory; created by the first write.
    """

    def __init__(self, filesystem: Any, root: str) -> None:
        self._root = str(filesystem._strip_protocol(root)).rstrip("/")
        protocol = filesystem.protocol
        scheme = protocol if isinstance(protocol, str) else protocol[0]
        self.uri = f"{scheme}:{self._root}"
        self._fs = filesystem

    def put_if_absent(
        self, name: str, source: SeekableReader, *, timeout: float | None = None
    ) -> bool:
        return self.stat(name) is None and self._write(name, source, is_new=True)

    def replace(self, name: str, data: bytes, *, timeout: float | None = None) -> None:
        self._write(name, io.BytesIO(data), is_new=False)

    def get(
        self,
        name: str,
        target: SequentialWriter,
        *,
        offset: int = 0,
        length: int | None = None,
        timeout: float | None = None,
    ) -> int:
        found = self.stat(name)
        if found is None:
            raise ObjectNotFoundError(
                f"The object {name!r} does not exist in {self.uri!r}."
            )
        if offset >= found.size:
            return 0  # send no request: some file systems refuse such an offset
        doing = f"read {name!r}"
        with self._translate_errors(doing, errors.CheckpointError):
            file = self._fs.open(self._path(name), "rb")
        copied = 0
        with contextlib.closing(file):
            with self._translate_errors(doing, errors.CheckpointError):
                file.seek(offset)
            while length is None or copied < length:
                wanted = _PIECE if length is None else min(_PIECE, length - copied)
                with self._translate_errors(doing, errors.CheckpointError):
                    piece = file.read(wanted)
                if not piece:
                    break
                target.write(piece)
                copied += len(piece)
        return copied

    def list(self, prefix: str = "") -> Iterator[str]:
        with self._translate_errors("list files", errors.CheckpointError):
            found = sorted(self._names())
        yield from (name for name in found if name.startswith(prefix))

    def folders(self, *, timeout: float | None = None) -> Iterator[str]:
        yield from sorted({n.partition("/")[0] for n in self.list() if "/" in n})

    def stat(self, name: str, *, timeout: float | None = None) -> ObjectStat | None:
        path = self._path(name)
        with self._translate_errors(f"look up {name!r}", errors.CheckpointError):
            try:
                self._fs.invalidate_cache()  # other processes write as well
                info = self._fs.info(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
            return ObjectStat(size=int(info["size"])) if _is_file(info) else None

    def delete(self, name: str, *, timeout: float | None = None) -> None:
        if self.stat(name) is not None:
            with self._translate_errors(f"delete {name!r}", errors.SaveError):
                self._fs.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_name(name)}"

    @contextlib.contextmanager
    def _translate_errors(
        self, doing: str, kind: type[errors.CheckpointError]
    ) -> Iterator[None]:
        try:
            yield
        except errors.TfpreemptError:
            raise
        except Exception as error:  # each file system has its own exception classes
            raise kind(
                f"Could not {doing} in {self.uri!r}: {type(error).__name__}: {error}. "
                "Check the path and the permissions of the file system that was "
                "passed as filesystem=."
            ) from error

    def _names(self) -> Iterable[str]:
        self._fs.invalidate_cache()
        for path, info in self._fs.find(self._root, detail=True).items():
            name = path.removeprefix(self._root + "/")
            is_temporary = name.rpartition("/")[2].startswith(TEMPORARY)
            if _is_file(info) and not is_temporary:
                yield name

    def _write(self, name: str, source: SeekableReader, *, is_new: bool) -> bool:
        path, doing = self._path(name), f"write {name!r}"
        folder = path.rpartition("/")[0]
        temporary = f"{folder}/{TEMPORARY}{secrets.token_hex(8)}"
        try:
            with self._translate_errors(doing, errors.SaveError):
                self._fs.makedirs(folder, exist_ok=True)
                file = self._fs.open(temporary, "wb")
            with contextlib.closing(file):
                for piece in chunks.of(source, _PIECE):
                    with self._translate_errors(doing, errors.SaveError):
                        file.write(piece)
            with self._translate_errors(doing, errors.SaveError):
                if is_new and self.stat(name) is not None:
                    return False
                self._fs.mv(temporary, path)
                return True
        finally:
            with contextlib.suppress(Exception):  # the file was moved, or never created
                self._fs.rm_file(temporary)


def as_fsspec(filesystem: Any) -> Any:
    """Returns the fsspec file system for a file system object of fsspec or pyarrow.

    Returns None for any other object.

    Raises:
        ConfigurationError: the file system is pyarrow's, and fsspec is not installed.
    """
    if all(hasattr(filesystem, name) for name in ("info", "find", "mv", "rm_file")):
        return filesystem
    if not all(hasattr(filesystem, name) for name in ("get_file_info", "delete_file")):
        return None
    try:
        from fsspec.implementations.arrow import ArrowFSWrapper
    except ImportError as error:
        raise errors.ConfigurationError(
            f"Got the pyarrow file system {filesystem!r}, which can only be used with "
            f"fsspec, but fsspec cannot be imported: {error}. Run `pip install fsspec`."
        ) from error
    return ArrowFSWrapper(filesystem)


def is_local(filesystem: Any) -> bool:
    """Returns whether a pyarrow or fsspec object is the local file system."""
    protocols = getattr(filesystem, "protocol", ())  # fsspec: a str, or a tuple of str
    return getattr(filesystem, "type_name", "") == "local" or (
        as_fsspec(filesystem) is filesystem
        and "file" in ((protocols,) if isinstance(protocols, str) else protocols)
    )


def _is_file(info: Any) -> bool:
    return info.get("type") == "file" and not info.get("islink")
