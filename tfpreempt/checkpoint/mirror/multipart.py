"""A large file on its way in parts, of which the store then makes one object.

One stream to an object store is slower than the network, and a checkpoint is often one
large file. Its parts are objects of their own, apart from the commit's folder, and put
by as many threads as there are:

    parts/<folder>/<file>/<offset>  some bytes of a file of the commit in <folder>

The folder's name stands for the commit's content, so a part that a dead upload has left
is used again. Once there is a marker, or a newer commit, nobody needs them any more:
then retention deletes them.
"""

from __future__ import annotations

import logging
import os

from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog
from tfpreempt.checkpoint.directory.catalog import Entry, Kind
from tfpreempt.checkpoint.mirror.download_target import Range
from tfpreempt.core.threads import map_in_threads
from tfpreempt.storage import paths
from tfpreempt.storage.interface import MAX_PARTS, ObjectStore

FOLDER = "parts"
SMALLEST = 64 << 20  # each part is three requests: its begin, its bytes, its deletion
_THREADS = 8

_log = logging.getLogger(__name__)


def split(size: int, total: int, *, threads: int, smallest: int) -> list[Range]:
    """The parts of a file; itself alone if it needs none.

    A file that is no more than a thread's share of the commit holds nobody up. A larger
    one is split into more parts than there are threads: they end together, and an
    upload that dies has lost only the parts that were under way.

    Args:
        size: of the file.
        total: of all files of the commit.
        threads: that upload them.
        smallest: the least size of a part, but for the last one.
    """
    if size * threads <= total or size <= smallest:
        return [Range(0, size)]
    length = max(smallest, -(-size // MAX_PARTS))
    return [
        Range(offset, min(length, size - offset)) for offset in range(0, size, length)
    ]


def folder_of(commit: str) -> str:
    """What the names of all parts of a commit's files begin with.

    Args:
        commit: its folder.
    """
    return f"{FOLDER}/{commit}/"


def object_name(commit: str, file: str, part: Range) -> str:
    """The object that holds a part of a file of a commit."""
    return f"{folder_of(commit)}{file}/{part.offset:015d}"


class Sweeper:
    """Deletes parts that nobody needs any more; used by one thread after the other.

    Args:
        store: where.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._is_said = False

    def run(self, committed: list[Entry]) -> None:
        """Deletes those of committed folders, and of older ones; no other upload's.

        Where the account may not delete, or the bucket keeps all objects for a time,
        they stay for now, which is said once: the copies are whole without that.

        Args:
            committed: the folders with a marker.

        Raises:
            CheckpointError: the store.
        """
        names = {each.name for each in committed}
        newest = catalog.highest_sequence(committed)
        unneeded = []
        for name in self._store.list(f"{FOLDER}/"):
            folder = name.split("/")[1]
            if catalog.kind_of(folder) is not Kind.REMOTE or paths.why_unsafe(name):
                continue  # somebody else's
            sequence = catalog.unread(self._store, folder).sequence or 0
            if folder in names or sequence < newest:
                unneeded.append(name)
        try:
            map_in_threads(
                self._store.delete, unneeded, threads=_THREADS, name="tfpreempt-sweep"
            )
        except errors.CheckpointError as error:
            if not error.is_permanent:
                raise
            if self._is_said:
                return
            self._is_said = True
            _log.warning(
                "tfpreempt: %d parts of uploads below %s cannot be deleted, though the "
                "copies are whole without them; they only take up room: %s",
                len(unneeded),
                os.path.join(self._store.uri, FOLDER),
                error,
            )
