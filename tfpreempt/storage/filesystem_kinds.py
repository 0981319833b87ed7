"""The few operations that we need of a file system of fsspec, and of one of pyarrow.

Neither library is a dependency: who passes an object of one has it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, Protocol


class Kind(Protocol):
    """What both have in common. Everything raises what the file system raises."""

    @property
    def name(self) -> str:
        """Of the file system, for messages."""
        ...

    def normal(self, path: str) -> str:
        """The path as the file system itself writes it."""
        ...

    def look(self, path: str) -> str | None:
        """What changes when a file is replaced; None if there is no such file."""
        ...

    def files(self, root: str) -> Iterator[str]:
        """Paths of all files below a directory, links left out."""
        ...

    def open(self, path: str) -> Any:
        """A file to read from."""
        ...

    def create(self, path: str) -> Any:
        """A file to write to."""
        ...

    def make_parent(self, path: str) -> None:
        """Makes the directory of a path."""
        ...

    def move(self, source: str, target: str) -> None:
        """Gives a file another name."""
        ...

    def remove(self, path: str) -> None:
        """Deletes a file."""
        ...


class FsspecKind:
    """A file system of fsspec."""

    _CHANGING = ("etag", "ETag", "generation", "mtime", "created", "ino", "size")

    def __init__(self, filesystem: Any) -> None:
        self._fs = filesystem

    @property
    def name(self) -> str:
        protocol = self._fs.protocol
        return str(protocol if isinstance(protocol, str) else protocol[0])

    def normal(self, path: str) -> str:
        return str(self._fs._strip_protocol(path))

    def look(self, path: str) -> str | None:
        # fsspec caches listings, and other processes write too.
        self._fs.invalidate_cache()
        try:
            info = self._fs.info(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if info["type"] != "file" or info.get("islink"):
            return None
        return "-".join(str(info[key]) for key in self._CHANGING if key in info)

    def files(self, root: str) -> Iterator[str]:
        self._fs.invalidate_cache()
        for path, info in self._fs.find(root, detail=True).items():
            if info["type"] == "file" and not info.get("islink"):
                yield path

    def open(self, path: str) -> Any:
        return self._fs.open(path, "rb")

    def create(self, path: str) -> Any:
        return self._fs.open(path, "wb")

    def make_parent(self, path: str) -> None:
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def move(self, source: str, target: str) -> None:
        self._fs.mv(source, target)

    def remove(self, path: str) -> None:
        self._fs.rm_file(path)


class PyarrowKind:
    """A file system of pyarrow."""

    def __init__(self, filesystem: Any) -> None:
        self._fs = filesystem

    @property
    def name(self) -> str:
        return str(self._fs.type_name)

    def normal(self, path: str) -> str:
        return str(self._fs.normalize_path(path))

    def look(self, path: str) -> str | None:
        info = self._fs.get_file_info(path)
        return f"{info.mtime_ns}-{info.size}" if info.is_file else None

    def files(self, root: str) -> Iterator[str]:
        fs = importlib.import_module("pyarrow.fs")  # its owner has it

        selector = fs.FileSelector(root, allow_not_found=True, recursive=True)
        for info in self._fs.get_file_info(selector):
            if info.is_file:
                yield info.path

    def open(self, path: str) -> Any:
        return self._fs.open_input_file(path)

    def create(self, path: str) -> Any:
        return self._fs.open_output_stream(path)

    def make_parent(self, path: str) -> None:
        self._fs.create_dir(path.rpartition("/")[0], recursive=True)

    def move(self, source: str, target: str) -> None:
        self._fs.move(source, target)

    def remove(self, path: str) -> None:
        self._fs.delete_file(path)


def kind_of(filesystem: object) -> Kind | None:
    """How to speak to a file system object; None if it is none that we know."""
    if all(hasattr(filesystem, name) for name in ("info", "find", "mv", "rm_file")):
        return FsspecKind(filesystem)
    if all(hasattr(filesystem, name) for name in ("get_file_info", "delete_file")):
        return PyarrowKind(filesystem)
    return None
