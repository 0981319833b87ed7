"""Opens files inside a directory, and refuses symbolic links, pipes and devices there.

Users other than the owner may be able to write to a checkpoint directory, a log
directory or a journal directory. A symbolic link created there would make this process
read, overwrite or delete files elsewhere; a pipe would block the process; a sparse file
would fill its memory.

The *root* is the directory that the user has chosen; the path to the root may contain
links. Inside the root, every directory of a path is opened through the descriptor of
its parent directory, so no other process can insert a link between the check and the
use. If a path is outside of the root, or the caller passes no root, the program has
chosen the path: only the last part of such a path must not be a link.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import threading
from collections.abc import Iterator
from typing import IO

_ODD = re.compile(r"//|/\.{0,2}(/|$)")
_READ = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_WRITES = os.O_WRONLY | os.O_RDWR
_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NOT_REGULAR = (errno.ENXIO, errno.ENODEV)  # a pipe, a socket or a device
_PIECE = 1 << 16
_MAKING_RETRIES = 10  # used if other processes remove the directories while empty
_MOST_COPIED = 1 << 28  # bytes of the largest file that is replaced by a copy
_COPY = ".tfpreempt-copy"  # end of the name of a copy until the copy is complete


class UnsafeFileError(OSError):
    """A path leads to a link, a pipe or a device, not to a file or directory."""


class LinkError(UnsafeFileError):
    """A part of a path inside the root is a symbolic link."""

    def __init__(self, path: str) -> None:
        text = "Links are not followed here"
        super().__init__(errno.ELOOP, text, path)


@contextlib.contextmanager
def directory(
    path: str, root: str = "", *, makes: bool = False, reads: bool = False
) -> Iterator[int]:
    """Context manager: opens a directory.

    Args:
        path: path of the directory.
        root: directory inside which no link is followed; empty for none.
        makes: whether to create missing directories of the path.
        reads: whether the caller lists or syncs the directory through the descriptor.
            If False, the descriptor can only be used as a `dir_fd`.

    Yields:
        A descriptor of the directory, for `dir_fd` arguments. It is closed at the end
        of the `with` block.

    Raises:
        LinkError: a part of the path inside the root is a link.
        OSError: a directory cannot be opened or created.
    """
    retries = _MAKING_RETRIES if makes else 0
    while True:
        try:
            opened = _open_directory(path, root, makes=makes, reads=reads)
            break
        except FileNotFoundError:  # another process removed an empty parent directory
            if retries == 0:
                raise
            retries -= 1
    try:
        yield opened
    finally:
        os.close(opened)


_kept = threading.local()
# Used in place of `_kept.opened` while no block of `parents_kept_open` runs.
_NONE_KEPT: dict[tuple[str, str], int] = {}
_MOST_KEPT = 16  # maximum number of directories that are kept open


@contextlib.contextmanager
def parents_kept_open() -> Iterator[None]:
    """Context manager: `parent` opens each directory once, not again for every file.

    Use this context for a block that changes many files in few directories. It affects
    only this thread. If another process replaces a directory during the block, the
    block continues to use the old directory.
    """
    before = getattr(_kept, "opened", _NONE_KEPT)
    opened: dict[tuple[str, str], int] = {}
    _kept.opened = opened
    try:
        yield
    finally:
        _kept.opened = before
        for descriptor in opened.values():
            os.close(descriptor)


@contextlib.contextmanager
def parent(path: str | os.PathLike[str], root: str = "") -> Iterator[tuple[int, str]]:
    """Context manager: opens the parent directory of a file or directory.

    Args:
        path: path of the file or directory.
        root: directory inside which no link is followed; empty for none.

    Yields:
        A descriptor of the parent directory, for `dir_fd` arguments, and the name of
        the file in the parent directory. The descriptor is closed at the end of the
        `with` block.

    Raises:
        LinkError: a part of the path inside the root is a link.
        OSError: the directory cannot be opened.
    """
    folder, name = os.path.split(_normal(os.fspath(path)))
    kept: dict[tuple[str, str], int] = getattr(_kept, "opened", _NONE_KEPT)
    opened = kept.get((folder, root))
    if opened is None:
        opened = _open_directory(folder, root)
        if kept is not _NONE_KEPT and len(kept) < _MOST_KEPT:
            kept[folder, root] = opened
    try:
        yield opened, name
    except OSError as error:
        for attribute in ("filename", "filename2"):
            if getattr(error, attribute) == name:
                setattr(error, attribute, os.fspath(path))
        raise
    finally:
        if kept.get((folder, root)) != opened:
            os.close(opened)


def open_file(
    path: str | os.PathLike[str],
    flags: int,
    mode: int = 0o666,
    *,
    root: str = "",
    copies: bool = False,
) -> int:
    """Opens a regular file; raises an error for a link, a pipe or a device.

    A file that is opened for writing must have a single name (no further hard link),
    because the second name may be in another directory.

    Args:
        path: path of the file.
        flags: flags of `os.open`. With O_TRUNC the file is truncated only after the
            check that it is a regular file.
        mode: permissions of a new file.
        root: directory inside which no link is followed; empty for none.
        copies: what happens if a file opened for writing has a second hard link. True:
            a file of this user is first replaced by a copy, which has one name. False:
            an error is raised. (`cp -al` of a checkpoint directory gives every file a
            second hard link.)

    Returns:
        The file descriptor.

    Raises:
        LinkError: the file, or a directory between the root and the file, is a link.
        UnsafeFileError: the file is no regular file, or has a second hard link and is
            opened for writing.
        OSError: the file cannot be opened.
    """
    with parent(path, root) as (folder, name):
        return open_at(folder, name, flags, mode, path=os.fspath(path), copies=copies)


def open_at(
    folder: int,
    name: str,
    flags: int,
    mode: int = 0o666,
    *,
    path: str = "",
    copies: bool = False,
) -> int:
    """Opens a regular file in an open directory, with the checks of `open_file`.

    Args:
        folder: descriptor of the directory.
        name: name of the file in the directory.
        flags: flags of `os.open`, see `open_file`.
        mode: mode of a new file.
        path: path of the file, for error messages.
        copies: whether to replace a file that has a second hard link by a copy, see
            `open_file`.
    """
    path = path or name
    try:
        descriptor = os.open(name, flags & ~os.O_TRUNC | _SAFE, mode, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise LinkError(path) from None
        if error.errno in _NOT_REGULAR:
            raise UnsafeFileError(errno.EINVAL, "Not a regular file", path) from None
        error.filename = path
        raise
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(status.st_mode):
            raise UnsafeFileError(errno.EINVAL, "Not a regular file", path)
        is_shared = bool(flags & _WRITES) and status.st_nlink > 1
        # A copy belongs to this user. Do not copy another user's file: functions that
        # trust only files of this user would then trust the content.
        is_own = status.st_uid == os.geteuid()
        if is_shared and not (copies and is_own and status.st_size <= _MOST_COPIED):
            raise UnsafeFileError(errno.EMLINK, "Has a second name elsewhere", path)
        if flags & os.O_TRUNC and not is_shared:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    if not is_shared:
        return descriptor
    os.close(descriptor)
    _replace_by_copy(folder, name, path, status)
    return open_at(folder, name, flags, mode, path=path)


def _replace_by_copy(
    folder: int, name: str, path: str, checked: os.stat_result
) -> None:
    """Replaces a file by a copy of the file, which has no second hard link.

    The copy has the same permissions.

    Args:
        folder: descriptor of the directory.
        name: name of the file in the directory.
        path: path of the file, for error messages.
        checked: status of the only file that may be copied. Meanwhile another process
            may have replaced the file.
    """
    source = open_at(folder, name, os.O_RDONLY, path=path)
    with open(source, "rb") as old:
        if not os.path.samestat(os.fstat(source), checked):
            raise UnsafeFileError(errno.EBUSY, "Replaced by another process", path)
        mode, temporary = stat.S_IMODE(checked.st_mode), f"{name}{_COPY}"
        with contextlib.suppress(FileNotFoundError):  # exists after an interrupted copy
            os.unlink(temporary, dir_fd=folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(open_at(folder, temporary, flags, 0o600, path=path), "wb") as new:
            os.fchmod(new.fileno(), mode)  # os.open() applies the umask to the mode
            shutil.copyfileobj(old, new)
            new.flush()
            os.fsync(new.fileno())
    os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)


def read(path: str | os.PathLike[str], most: int, *, root: str = "") -> bytes:
    """Reads a small file.

    Args:
        path: path of the file.
        most: maximum size in bytes.
        root: directory inside which no link is followed; empty for none.

    Raises:
        LinkError: a part of the path is a link, see `open_file`.
        OSError: the file cannot be opened, or is larger than `most` (errno EFBIG).
    """
    descriptor = open_file(path, os.O_RDONLY, root=root)
    with open(path, "rb", buffering=0, opener=lambda *_: descriptor) as file:
        return read_all(file, most, path)


def read_all(file: IO[bytes], most: int, path: str | os.PathLike[str]) -> bytes:
    """Reads a small file from the current position to the end.

    The function reads little more than `most` bytes, even if the file is large or
    grows.

    Args:
        file: the open file.
        most: maximum number of bytes to read.
        path: path of the file, for error messages.

    Raises:
        OSError: the file cannot be read, or has more than `most` bytes (errno EFBIG).
    """
    data = bytearray()
    while len(data) <= most and (piece := file.read(_PIECE)):
        data += piece
    if len(data) > most:
        text = f"More than the {most} bytes that such a file has"
        raise OSError(errno.EFBIG, text, os.fspath(path))
    return bytes(data)


def _open_directory(
    path: str, root: str, *, makes: bool = False, reads: bool = False
) -> int:
    """Opens the directory `path`, and returns its descriptor.

    Each directory inside the root is opened through the descriptor of its parent
    directory. The arguments are those of `directory`.
    """
    top, below = _split(_normal(path), _normal(root) if root else "")
    if makes:
        os.makedirs(top, exist_ok=True)
    last = _READ if reads else _FOLDER
    here = os.open(top, _FOLDER if below else last)
    for number, name in enumerate(below, 1):
        above, top = here, f"{top.rstrip('/')}/{name}"
        try:
            flags = last if number == len(below) else _FOLDER
            here = _folder(above, name, flags, top, makes)
        finally:
            os.close(above)
    return here


def _split(folder: str, root: str) -> tuple[str, list[str]]:
    """Splits the path of a directory at the root.

    Returns:
        The root, and the names of the directories from the root to the directory. If
        the directory is the root or outside of the root: the directory, and no names.
    """
    start = root if root.endswith("/") else f"{root}/"
    if root and folder.startswith(start) and folder != start:
        return root, folder[len(start) :].split("/")
    return folder, []


def _normal(path: str) -> str:
    """Returns the absolute path without "." and ".."."""
    is_normal = path.startswith("/") and not _ODD.search(path)
    return path if is_normal else os.path.abspath(path)


def _folder(above: int, name: str, flags: int, path: str, makes: bool) -> int:
    """Opens a directory inside an open directory.

    Args:
        above: descriptor of the parent directory.
        name: name of the directory in the parent directory.
        flags: flags of `os.open`.
        path: path of the directory, for error messages.
        makes: whether to create the directory if it does not exist.
    """
    for _ in range(2):
        try:
            return os.open(name, flags | os.O_NOFOLLOW, dir_fd=above)
        except FileNotFoundError as error:
            error.filename = path
            if not makes:
                raise
        except NotADirectoryError as error:
            if stat.S_ISLNK(os.lstat(name, dir_fd=above).st_mode):
                raise LinkError(path) from None
            error.filename = path
            raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=above)
    raise FileNotFoundError(errno.ENOENT, "Removed by another process", path)
