"""Is the checkpoint directory still the one of the start?

A file system can be unmounted while training goes on, or the directory moved away. Then
its path leads to another disk, where a commit would count until the first one is back.
Device and inode tell. They may be others when a network file system was mounted again,
so a file in the directory has a token: who still reads it there has the same storage.
"""

from __future__ import annotations

import os
import secrets
import stat

from tfpreempt import errors
from tfpreempt.checkpoint import layout
from tfpreempt.storage import paths, reading
from tfpreempt.storage.files import Files, write_durably


class Home:
    """A checkpoint directory, remembered as it is when this is made; any thread.

    Args:
        directory: the directory.

    Raises:
        OSError: the disk does not say what is there.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._identity = _identity(directory)
        self._token = _token(directory)

    def check(self) -> None:
        """Refuses what is another directory now.

        Raises:
            SaveError: says what to do.
            OSError: the disk does not say what is there.
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
        """Whether the path leads to the same storage.

        Raises:
            OSError: the disk does not say what is there.
        """
        if paths.is_url(self._directory):
            return self._is_same_url()
        if self._identity is not None and _identity(self._directory) == self._identity:
            return True
        return self._token != "" and _token(self._directory) == self._token

    def _is_same_url(self) -> bool:
        """Old objects may be deleted by rule, so a token that is gone says little."""
        try:
            token = _token(self._directory)
            return token == self._token or (
                "" in (token, self._token) and reading.is_dir(self._directory)
            )
        except OSError:
            return True  # nobody answers; the save will say so


def sign(files: Files, directory: str) -> None:
    """Gives a directory its token, unless it has one; on the chief.

    Raises:
        OSError: as the file system says.
    """
    path = os.path.join(directory, layout.TOKEN)
    if not reading.is_there(path):
        write_durably(files, path, secrets.token_hex(16).encode())


def _identity(directory: str) -> tuple[int, int] | None:
    """Device and inode; None where no directory is."""
    try:
        status = os.stat(directory)
    except (FileNotFoundError, NotADirectoryError):
        return None
    is_directory = stat.S_ISDIR(status.st_mode)  # a file may be given its old number
    return (status.st_dev, status.st_ino) if is_directory else None


def _token(directory: str) -> str:
    """What `sign` wrote; empty where it cannot be read."""
    try:
        with reading.open_file(os.path.join(directory, layout.TOKEN)) as file:
            return file.read(64).decode("ascii", "replace")
    except OSError:
        return ""
