"""Is the checkpoint directory still the same storage as at the start?

A file system can be unmounted during training, or the directory moved away. Its path
then leads to another disk, where a commit would count until the first disk is mounted
again. Device and inode numbers tell the two apart. A network file system may have new
numbers when it is mounted again; a file with a random token, in the directory, tells
that the storage is the same. The lease's record would not do: it is removed when the
lease is released, and the supervisor has no lease.
"""

from __future__ import annotations

import os
import secrets
import stat

from tfpreempt import errors
from tfpreempt.checkpoint.directory import layout
from tfpreempt.storage import reading
from tfpreempt.storage.files import Files, write_durably


class DirectoryIdentity:
    """The storage that a checkpoint directory was on when this object was made.

    Any thread.

    Args:
        directory: path of the checkpoint directory.

    Raises:
        OSError: the file system does not answer.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._identity = _identity(directory)
        self._token = read_token(directory)

    def check(self) -> None:
        """Raises an error if the path leads to other storage now.

        Raises:
            SaveError: the path does; says what to do.
            OSError: the file system does not answer.
        """
        if self.is_same():
            return
        found = "something else" if reading.is_there(self._directory) else "nothing"
        raise errors.SaveError(
            f"{self._directory!r} is not the directory any more that it was at the "
            f"start: {found} is there. A file system was unmounted, or the directory "
            "was moved, deleted or replaced. Mount it again or put it back, and saving "
            "goes on. Nothing was written in its place; the last commit is in what was "
            "there before."
        )

    def is_same(self) -> bool:
        """Returns whether the path leads to the same storage.

        Raises:
            OSError: the file system does not answer.
        """
        if self._identity is not None and _identity(self._directory) == self._identity:
            return True
        return self._token != "" and read_token(self._directory) == self._token


def write_token(files: Files, directory: str) -> None:
    """Writes the token of a directory, unless it has one; on the chief.

    Raises:
        OSError: as the file system says.
    """
    path = os.path.join(directory, layout.TOKEN)
    if not reading.is_there(path):
        write_durably(files, path, secrets.token_hex(16).encode())


def _identity(directory: str) -> tuple[int, int] | None:
    """Returns device and inode numbers; None where there is no directory."""
    try:
        status = os.stat(directory)
    except (FileNotFoundError, NotADirectoryError):
        return None
    is_directory = stat.S_ISDIR(status.st_mode)  # a file may get the old inode number
    return (status.st_dev, status.st_ino) if is_directory else None


def read_token(directory: str) -> str:
    """Returns the token that `write_token` wrote; empty if it cannot be read."""
    try:
        with reading.open_file(os.path.join(directory, layout.TOKEN)) as file:
            return file.read(64).decode("ascii", "replace")
    except OSError:
        return ""
