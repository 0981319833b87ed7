"""What is read of a checkpoint directory. Changes go through `files.py`."""

from __future__ import annotations

import contextlib
import errno
import operator
import os
import stat
from collections.abc import Callable, Iterator
from typing import IO

from tfpreempt import errors
from tfpreempt.core import contained

_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def check_shortage(error: OSError, path: str) -> None:
    """Raises another error if a process or machine is short of files or memory.

    A shortage says nothing of the file. As an OSError it would pass for an absent or
    corrupt file, and the newest commit for one that can go.

    Args:
        error: raised when the file was opened or read.
        path: of the file.

    Raises:
        CheckpointError: too many files are open, or there is no memory.
    """
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        raise errors.CheckpointError(
            f"{path!r} cannot be opened: {error.strerror}. Raise the limit (`ulimit "
            "-n`), or find what uses them up; nothing is known of the file."
        ) from error


def names(path: str) -> list[str]:
    """The names in a directory, sorted; none where there is no directory.

    Raises:
        OSError: as the storage says.
    """
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return []


def is_there(path: str) -> bool:
    """Whether there is anything under the name, be it a dangling link.

    This and those below say no of what is not there, and of nothing else.

    Raises:
        OSError: as the storage says.
    """
    return _mode(path, os.lstat) is not None


def is_link(path: str) -> bool:
    """Whether it is a symbolic link."""
    return stat.S_ISLNK(_mode(path, os.lstat) or 0)


def is_dir(path: str) -> bool:
    """Whether it is a directory, or a link to one."""
    return stat.S_ISDIR(_mode(path, os.stat) or 0)


def is_real_dir(path: str) -> bool:
    """Whether it is a directory, and no link to one."""
    return stat.S_ISDIR(_mode(path, os.lstat) or 0)


def is_file(path: str) -> bool:
    """Whether it is a file, or a link to one."""
    return stat.S_ISREG(_mode(path, os.stat) or 0)


def _mode(path: str, look: Callable[[str], os.stat_result]) -> int | None:
    """What is under the name; None where nothing is, or can be.

    `os.path.isdir` and its like say no where a disk fails: what it may have in a moment
    would pass for what is not there, and be left out of a commit, or of a look for one.
    """
    try:
        return look(path).st_mode
    except ValueError:  # no name at all
        return None
    except OSError as error:
        if error.errno not in _NOT_THERE:
            raise
        return None


def open_file(path: str, *, buffering: int = -1) -> IO[bytes]:
    """Opens a file to read it; the caller closes it.

    Args:
        path: of the file.
        buffering: as of `open`.

    Raises:
        OSError: as the storage says; or it is a pipe or a device.
        CheckpointError: too many files are open; see `check_shortage`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        check_shortage(error, path)
        raise
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        os.close(descriptor)  # to read a pipe or a device may take for ever
        raise OSError(errno.EINVAL, "Not a regular file", path)
    # `open` itself refuses a directory, and closes it.
    return open(path, "rb", buffering=buffering, opener=lambda *_: descriptor)


def read(path: str, most: int) -> bytes:
    """Reads a small file.

    Args:
        path: of the file.
        most: bytes that it may have: a large sparse file takes no disk, but memory.

    Raises:
        OSError: see `open_file`; EFBIG: the file has more bytes.
        CheckpointError: too many files are open; see `check_shortage`.
    """
    with open_file(path) as file:
        return contained.read_all(file, most, path)


def walk(path: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """A directory, its directories and its files, then the same of each directory.

    Links are named among the directories or files that they point to, and not
    followed. A directory that is not there holds nothing. Directories may lie in one
    another to any depth.

    Raises:
        OSError: as the storage says; what could not be listed must not pass for empty.
    """
    left = [path]
    while left:
        path = left.pop()
        try:
            with os.scandir(path) as entries:
                found = sorted(entries, key=operator.attrgetter("name"))
        except (FileNotFoundError, NotADirectoryError):
            continue
        # `os.path.isdir` says no of what it may not look at, and a directory would pass
        # for a file; what a listing itself tells does not depend on that.
        real = [each for each in found if each.is_dir(follow_symlinks=False)]
        linked = [each for each in found if each.is_symlink() and _leads(each)]
        folders = {each.name for each in (*real, *linked)}
        files = [each.name for each in found if each.name not in folders]
        yield path, sorted(folders), files
        left += [each.path for each in reversed(real)]


def _leads(link: os.DirEntry[str]) -> bool:
    """Whether a link is known to lead to a directory; nobody follows it."""
    with contextlib.suppress(OSError):
        return is_dir(link.path)
    return False


def tree(root: str) -> list[str]:
    """Names of all files below a directory, relative to it, "/" between parts.

    Raises:
        OSError: a directory cannot be listed.
    """
    start = len(os.path.join(root, ""))
    return sorted(
        os.path.join(folder, name)[start:]
        for folder, _, names in walk(root)
        for name in names
    )
