"""Reads a checkpoint directory. Changes go through `files.py`."""

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
    """Raises CheckpointError if the process or machine is short of files or memory.

    A shortage says nothing about the file. An OSError would be taken for a missing or
    corrupt file, and the newest commit could be deleted.

    Args:
        error: the error of opening or reading the file.
        path: path of the file.

    Raises:
        CheckpointError: too many files are open, or there is no memory.
    """
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        raise errors.CheckpointError(
            f"{path!r} cannot be opened: {error.strerror}. Raise the limit (`ulimit "
            "-n`), or find what uses them up; nothing is known of the file."
        ) from error


def names(path: str) -> list[str]:
    """Returns the sorted names in a directory; empty if the directory is missing.

    Raises:
        OSError: an operation of the storage failed.
    """
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return []


def is_there(path: str) -> bool:
    """Whether the path exists, even as a dangling link.

    This function and the functions below return False only if the path does not exist
    or is of another kind, never after another error.

    Raises:
        OSError: an operation of the storage failed.
    """
    return _mode(path, os.lstat) is not None


def is_link(path: str) -> bool:
    """Whether the path is a symbolic link."""
    return stat.S_ISLNK(_mode(path, os.lstat) or 0)


def is_dir(path: str) -> bool:
    """Whether the path is a directory, or a link to a directory."""
    return stat.S_ISDIR(_mode(path, os.stat) or 0)


def is_real_dir(path: str) -> bool:
    """Whether the path is a directory, and not a link to a directory."""
    return stat.S_ISDIR(_mode(path, os.lstat) or 0)


def is_file(path: str) -> bool:
    """Whether the path is a file, or a link to a file."""
    return stat.S_ISREG(_mode(path, os.stat) or 0)


def _mode(path: str, look: Callable[[str], os.stat_result]) -> int | None:
    """Returns the mode of the path; None if the path does not or cannot exist.

    `os.path.isdir` and similar functions return False if a disk fails. A file on a disk
    with a transient failure would then count as missing, and be omitted from a commit
    or a search for commits.
    """
    try:
        return look(path).st_mode
    except ValueError:  # not a valid name
        return None
    except OSError as error:
        if error.errno not in _NOT_THERE:
            raise
        return None


def open_file(path: str, *, buffering: int = -1) -> IO[bytes]:
    """Opens a file for reading; the caller closes the file.

    Args:
        path: path of the file.
        buffering: buffering policy, as in `open`.

    Raises:
        OSError: an operation of the storage failed; or the path is a pipe or a device.
        CheckpointError: too many files are open; see `check_shortage`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        check_shortage(error, path)
        raise
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        os.close(descriptor)  # reading a pipe or a device may never end
        raise OSError(errno.EINVAL, "Not a regular file", path)
    # `open` itself refuses a directory, and closes it.
    return open(path, "rb", buffering=buffering, opener=lambda *_: descriptor)


def read(path: str, most: int) -> bytes:
    """Reads a small file.

    Args:
        path: path of the file.
        most: maximum size in bytes: a large sparse file takes no disk space, but
            memory.

    Raises:
        OSError: see `open_file`; EFBIG: the file has more bytes.
        CheckpointError: too many files are open; see `check_shortage`.
    """
    with open_file(path) as file:
        return contained.read_all(file, most, path)


def walk(path: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yields path, directories and files of a directory and of every directory below.

    A link is listed among the directories or files by its target, and not followed. A
    missing directory is empty. Directories may be nested to any depth.

    Raises:
        OSError: an operation of the storage failed; an unlisted directory must not
            count as empty.
    """
    left = [path]
    while left:
        path = left.pop()
        try:
            with os.scandir(path) as entries:
                found = sorted(entries, key=operator.attrgetter("name"))
        except (FileNotFoundError, NotADirectoryError):
            continue
        # `os.path.isdir` returns False without the permission to stat, so a directory
        # would count as a file. The types in the listing itself need no permission.
        real = [each for each in found if each.is_dir(follow_symlinks=False)]
        linked = [each for each in found if each.is_symlink() and _leads(each)]
        folders = {each.name for each in (*real, *linked)}
        files = [each.name for each in found if each.name not in folders]
        yield path, sorted(folders), files
        left += [each.path for each in reversed(real)]


def _leads(link: os.DirEntry[str]) -> bool:
    """Whether a link is known to point to a directory."""
    with contextlib.suppress(OSError):
        return is_dir(link.path)
    return False


def tree(root: str) -> list[str]:
    """Returns the names of every file below a directory, relative to the directory.

    Parts of a name are separated by "/".

    Raises:
        OSError: a directory cannot be listed.
    """
    start = len(os.path.join(root, ""))
    return sorted(
        os.path.join(folder, name)[start:]
        for folder, _, names in walk(root)
        for name in names
    )
