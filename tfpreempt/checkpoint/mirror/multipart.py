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

from tfpreempt.checkpoint.mirror.download_target import Range
from tfpreempt.storage.interface import MAX_PARTS

FOLDER = "parts"
SMALLEST = 64 << 20  # each part is three requests: its begin, its bytes, its deletion


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
