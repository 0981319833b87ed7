"""ObjectStore of files in a file system of fsspec, or of pyarrow by fsspec.

Of such a place nobody knows whether it can create a file only if there is none. So
`put_if_absent` is best effort here: it looks, and writes. Of two writers that put one
name at the same moment both may be told that they did, and the last one's bytes stay.
And it alone knows time-outs, so `timeout` is not looked at. For gs:// and s3:// our own
stores promise more; a mirror takes no other.

The user hands the file system over. Whether a file is durable when it is closed, and
whether a move is atomic, is for its library to say. Neither library is a dependency:
who passes an object of one has it.
"""

from __future__ import annotations

import contextlib
import io
import secrets
from collections.abc import Iterable, Iterator
from typing import Any

from tfpreempt import errors
from tfpreempt.storage import pieces
from tfpreempt.storage.interface import (
    ObjectMissingError,
    ObjectStat,
    check_name,
)
from tfpreempt.storage.local import TEMPORARY
from tfpreempt.storage.pieces import Source, Target

_PIECE = 4 << 20


class FsspecStore:
    """Objects as files below a directory of a file system of fsspec; links are none.

    Args:
        filesystem: of fsspec.
        root: the directory; made by the first put.
    """

    def __init__(self, filesystem: Any, root: str) -> None:
        self._root = str(filesystem._strip_protocol(root)).rstrip("/")
        protocol = filesystem.protocol
        scheme = protocol if isinstance(protocol, str) else protocol[0]
        self.uri = f"{scheme}:{self._root}"
        self._fs = filesystem

    def put_if_absent(
        self, name: str, source: Source, *, timeout: float | None = None
    ) -> bool:
        return self.stat(name) is None and self._write(name, source, is_new=True)

    def replace(self, name: str, data: bytes, *, timeout: float | None = None) -> None:
        self._write(name, io.BytesIO(data), is_new=False)

    def get(
        self,
        name: str,
        target: Target,
        *,
        offset: int = 0,
        length: int | None = None,
        timeout: float | None = None,
    ) -> int:
        found = self.stat(name)
        if found is None:
            raise ObjectMissingError(f"There is no object {name!r} in {self.uri!r}.")
        if offset >= found.size:
            return 0  # some refuse to look there
        doing = f"read {name!r}"
        with self._edge(doing, errors.CheckpointError):
            file = self._fs.open(self._path(name), "rb")
        copied = 0
        with contextlib.closing(file):
            with self._edge(doing, errors.CheckpointError):
                file.seek(offset)
            while length is None or copied < length:
                wanted = _PIECE if length is None else min(_PIECE, length - copied)
                with self._edge(doing, errors.CheckpointError):
                    piece = file.read(wanted)
                if not piece:
                    break
                target.write(piece)
                copied += len(piece)
        return copied

    def list(self, prefix: str = "") -> Iterator[str]:
        with self._edge("list files", errors.CheckpointError):
            found = sorted(self._names())
        yield from (name for name in found if name.startswith(prefix))

    def folders(self, *, timeout: float | None = None) -> Iterator[str]:
        yield from sorted({n.partition("/")[0] for n in self.list() if "/" in n})

    def stat(self, name: str, *, timeout: float | None = None) -> ObjectStat | None:
        path = self._path(name)
        with self._edge(f"look at {name!r}", errors.CheckpointError):
            try:
                self._fs.invalidate_cache()  # other processes write too
                info = self._fs.info(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
            return ObjectStat(size=int(info["size"])) if _is_file(info) else None

    def delete(self, name: str, *, timeout: float | None = None) -> None:
        if self.stat(name) is not None:
            with self._edge(f"delete {name!r}", errors.SaveError):
                self._fs.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_name(name)}"

    @contextlib.contextmanager
    def _edge(self, doing: str, kind: type[errors.CheckpointError]) -> Iterator[None]:
        try:
            yield
        except errors.TfpreemptError:
            raise
        except Exception as error:  # each file system has some of its own
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

    def _write(self, name: str, source: Source, *, is_new: bool) -> bool:
        path, doing = self._path(name), f"write {name!r}"
        folder = path.rpartition("/")[0]
        temporary = f"{folder}/{TEMPORARY}{secrets.token_hex(8)}"
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


def is_local(filesystem: Any) -> bool:
    """Whether paths in a file system of pyarrow or fsspec are paths of this machine."""
    protocols = getattr(filesystem, "protocol", ())  # fsspec: a name, or several
    return getattr(filesystem, "type_name", "") == "local" or (
        as_fsspec(filesystem) is filesystem
        and "file" in ((protocols,) if isinstance(protocols, str) else protocols)
    )


def _is_file(info: Any) -> bool:
    return info.get("type") == "file" and not info.get("islink")
