"""ObjectStore of a directory that TensorFlow serves by a URL, such as ram://.

For reading commits and keeping notes beside them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

from tfpreempt import errors
from tfpreempt.storage import pieces, reading
from tfpreempt.storage.files import files_for
from tfpreempt.storage.filesystem import FilesystemStore
from tfpreempt.storage.pieces import Source

_PIECE = 4 << 20


class UrlStore(FilesystemStore):
    """The files below a URL as objects."""

    foreign = OSError
    advice = "Check the URL, the network and the credentials."

    def _open(self, path: str) -> IO[bytes]:
        return reading.open_file(path)

    def _names(self) -> Iterable[str]:
        return reading.tree(self._root)

    def _look(self, path: str) -> int | None:
        return reading.stat(path).size if reading.is_file(path) else None

    def _write(self, name: str, source: Source, *, is_new: bool) -> bool:
        path, data = self._path(name), b"".join(pieces.of(source, _PIECE))
        with self._edge(f"put {name!r}", errors.SaveError):
            files = files_for(path)
            files.make_dirs(path.rpartition("/")[0])
            files.write(path, data)
        return True

    def _remove(self, path: str) -> None:
        # A folder stays, where there are any: TensorFlow removes it only with all that
        # another put may just have written there.
        files_for(path).remove(path)
