"""Checks that a checkpoint directory is the same storage as at the start of the run.

During training, a file system can be unmounted, or the directory can be moved. The path
then leads to another disk. A commit on that disk would disappear once the first disk is
mounted again. Device and inode numbers distinguish the two disks. A network file system
may have new numbers after a remount. So the directory also contains a file with a
random token: if the token is unchanged, the storage is the same. The record of the
lease cannot serve as the token, because the record is removed when the lease is
released, and because the supervisor, which also checks the directory, has no lease.
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
    """Remembers the storage to which the path of a checkpoint directory leads when the
    object is created. Any thread may call the methods.

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
        """Checks that the path still leads to the same storage.

        Raises:
            SaveError: the path leads to different storage, or nowhere; the message has
                advice.
            OSError: the file system does not respond.
        """
        if self.is_same():
            return
        found = (
            "another directory or file"
            if file_reading.is_there(self._directory)
            else "no directory"
        )
        raise errors.SaveError(
            f"The path {self._directory!r} now leads to {found}; expected the "
            "directory of the start of this run. A file system was unmounted, or the "
            "directory was moved, deleted or replaced. Mount the file system, or put "
            "the directory back; later saves then succeed. This save wrote nothing; "
            "the last commit is in the directory of the start."
        )

    def is_same(self) -> bool:
        """Returns whether the path still leads to the same storage.

        Raises:
            OSError: the file system does not respond.
        """
        if self._identity is not None and _identity(self._directory) == self._identity:
            return True
        return self._token != "" and read_token(self._directory) == self._token


def write_token(files: Files, directory: str) -> None:
    """Writes a random token into a directory without a token. Called on the chief.

    Raises:
        OSError: error of the file system.
    """
    path = os.path.join(directory, layout.TOKEN)
    if not file_reading.is_there(path):
        write_durably(files, path, secrets.token_hex(16).encode())


def _identity(directory: str) -> tuple[int, int] | None:
    """Returns the device and inode numbers of a directory. None if there is no
    directory."""
    try:
        status = os.stat(directory)
    except (FileNotFoundError, NotADirectoryError):
        return None
    # A file may have the inode number of a deleted directory.
    is_directory = stat.S_ISDIR(status.st_mode)
    return (status.st_dev, status.st_ino) if is_directory else None


def read_token(directory: str) -> str:
    """Returns the token written by `write_token`; an empty string if the token cannot
    be read."""
    try:
        with file_reading.open_file(os.path.join(directory, layout.TOKEN)) as file:
            return file.read(64).decode("ascii", "replace")
    except OSError:
        return ""
