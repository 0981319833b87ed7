"""Reads a checkpoint directory. Functions that change a directory are in `files.py`.

The functions tell a missing file from a failure of the storage: a file that cannot be
read at present must not count as missing.
"""

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
    """Raises CheckpointError if an error is a lack of memory or of file descriptors.

    Such an error does not mean that the file is corrupt. But callers treat an OSError
    as a sign of a corrupt file, and could delete the newest commit. So the error gets
    another class.

    Args:
        error: the error of opening or reading the file.
        path: path of the file.

    Raises:
        CheckpointError: too many files are open, or there is no memory.
    """
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        raise errors.CheckpointError(
            f"{path!r} cannot be opened: {error.strerror}. The file may be intact. "
            "Raise the limit of open files (`ulimit -n`) or free memory, and retry."
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
    """Returns whether the path exists, even as a dangling link.

    Like `is_link`, `is_dir`, `is_real_dir` and `is_file`, returns False only if the
    storage has answered the request. If the storage failed, an error is raised.

    Raises:
        OSError: an operation of the storage failed.
    """
    return _mode(path, os.lstat) is not None


def is_link(path: str) -> bool:
    """Returns whether the path is a symbolic link."""
    return stat.S_ISLNK(_mode(path, os.lstat) or 0)


def is_dir(path: str) -> bool:
    """Returns whether the path is a directory, or a link to a directory."""
    return stat.S_ISDIR(_mode(path, os.stat) or 0)


def is_real_dir(path: str) -> bool:
    """Returns whether the path is a directory, and not a link to a directory."""
    return stat.S_ISDIR(_mode(path, os.lstat) or 0)


def is_file(path: str) -> bool:
    """Returns whether the path is a file, or a link to a file."""
    return stat.S_ISREG(_mode(path, os.stat) or 0)


def _mode(path: str, look: Callable[[str], os.stat_result]) -> int | None:
    """Returns the mode (`st_mode`) of a path; None if the path does not exist.

    Used in place of `os.path.isdir` and similar functions, which return False also
    after a failure of the disk. An existing file would then count as missing, and a
    commit or a search for commits would omit the file.

    Args:
        path: the path.
        look: os.stat; or os.lstat, which does not follow a link.
    """
    try:
        return look(path).st_mode
    except ValueError:  # an invalid name, such as a name with a NUL
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
    # If the path is a directory, `open` raises, and closes the descriptor.
    return open(path, "rb", buffering=buffering, opener=lambda *_: descriptor)


def open_inside(path: str, root: str) -> IO[bytes]:
    """Opens a file for reading, and follows no link inside the root; the caller closes
    the file.

    Args:
        path: path of the file.
        root: directory inside which no link is followed; see `core/contained.py`.

    Raises:
        OSError: an operation of the storage failed; or the file, or a directory between
            the root and the file, is a link; or the file is a pipe or a device.
        CheckpointError: too many files are open; see `check_shortage`.
    """
    try:
        descriptor = contained.open_file(path, os.O_RDONLY, root=root)
    except OSError as error:
        check_shortage(error, path)
        raise
    return open(path, "rb", opener=lambda *_: descriptor)


def read(path: str, most: int) -> bytes:
    """Reads a small file.

    Args:
        path: path of the file.
        most: maximum size in bytes. Without a maximum, a hostile sparse file could fill
            the memory.

    Raises:
        OSError: see `open_file`; with errno EFBIG if the file is larger than `most`.
        CheckpointError: too many files are open; see `check_shortage`.
    """
    with open_file(path) as file:
        return contained.read_all(file, most, path)


def walk(path: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yields (path, directories, files) for a directory and every directory below it.

    Like `os.walk`, but a failure to list a directory is an error, and any depth is
    possible. No link is followed. A link is listed with the directories if its target
    is a directory, otherwise with the files. A missing directory counts as empty.

    Raises:
        OSError: a directory could not be listed.
    """
    left = [path]
    while left:
        path = left.pop()
        try:
            with os.scandir(path) as entries:
                found = sorted(entries, key=operator.attrgetter("name"))
        except (FileNotFoundError, NotADirectoryError):
            continue
        # Take the types from the listing. `os.path.isdir` needs a permission: without
        # it, a directory would count as a file.
        real = [each for each in found if each.is_dir(follow_symlinks=False)]
        linked = [each for each in found if each.is_symlink() and _leads(each)]
        folders = {each.name for each in (*real, *linked)}
        files = [each.name for each in found if each.name not in folders]
        yield path, sorted(folders), files
        left += [each.path for each in reversed(real)]


def _leads(link: os.DirEntry[str]) -> bool:
    """Returns whether a link leads to a directory; False if stat() fails."""
    with contextlib.suppress(OSError):
        return is_dir(link.path)
    return False


def tree(root: str) -> list[str]:
    """Returns the names of the files below a directory, at any depth.

    The names are relative to the directory, such as "a/b".

    Raises:
        OSError: a directory cannot be listed.
    """
    start = len(os.path.join(root, ""))
    return sorted(
        os.path.join(folder, name)[start:]
        for folder, _, names in walk(root)
        for name in names
    )
