"""Is the checkpoint directory still the same storage as at the start?

A file system can be unmounted during training, or the directory moved away. Its path
then leads to another disk, where a commit would count until the first disk is mounted
again. Device and inode numbers tell the two disks apart. A network file system may have
new numbers after a remount; a file with a random token, in the directory, then shows
that the storage is the same. The lease's record cannot replace the token: the record is
removed when the lease is released, and the supervisor has no lease.
"""

from __future__ import annotations

import os
import secrets
import stat

from tfpreempt import errors
from tfpreempt.checkpoint.directory import layout
from tfpreempt.storage import file_reading
from tfpreempt.storage.files import Files, write_durably


class DirectoryIdentity:
    """The storage of a checkpoint directory at the creation of the object.

    Any thread.

    Args:
        directory: path of the checkpoint directory.

    Raises:
        OSError: the file system does not respond.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._identity = _identity(directory)
        self._token = read_token(directory)

    def check(self) -> None:
        """Raises an error if the path leads to different storage now.

        Raises:
            SaveError: the path leads to different storage, or nowhere; the message has
                advice.
            OSError: the file system does not respond.
        """
        if self.is_same():
            return
        found = (
            "something else" if file_reading.is_there(self._directory) else "nothing"
        )
        raise errors.SaveError(
            f"{self._directory!r} is not the directory any more that it was at the "
            f"start: {found} is there. A file system was unmounted, or the directory "
            "was moved, deleted or replaced. Mount the file system or restore the "
            "directory, and saving continues. Nothing was written; the last commit "
            "is in the directory of the start."
        )

    def is_same(self) -> bool:
        """Returns whether the path leads to the same storage.

        Raises:
            OSError: the file system does not respond.
        """
        if self._identity is not None and _identity(self._directory) == self._identity:
            return True
        return self._token != "" and read_token(self._directory) == self._token


def write_token(files: Files, directory: str) -> None:
    """Writes the token of a directory that has no token yet; on the chief.

    Raises:
        OSError: the file system reports an error.
    """
    path = os.path.join(directory, layout.TOKEN)
    if not file_reading.is_there(path):
        write_durably(files, path, secrets.token_hex(16).encode())


def _identity(directory: str) -> tuple[int, int] | None:
    """Returns device and inode numbers; None if there is no directory."""
    try:
        status = os.stat(directory)
    except (FileNotFoundError, NotADirectoryError):
        return None
    is_directory = stat.S_ISDIR(status.st_mode)  # a file may get the old inode number
    return (status.st_dev, status.st_ino) if is_directory else None


def read_token(directory: str) -> str:
    """Returns the token written by `write_token`; empty if the token cannot be read."""
    try:
        with file_reading.open_file(os.path.join(directory, layout.TOKEN)) as file:
            return file.read(64).decode("ascii", "replace")
    except OSError:
        return ""
