"""Locks files and directories against other processes of the machine.

The kernel releases a lock when the process with the lock ends. A directory is locked
directly, without a lock file. Another process may delete a locked file or directory. So
a lock counts only if the locked file still has its name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator

from tfpreempt import errors
from tfpreempt.storage import os_errors
from tfpreempt.storage.files import LocalFiles, make_lasting_dirs

_log = logging.getLogger(__name__)
_POLL = 0.02


@contextlib.contextmanager
def locked(
    directory: str, doing: str, *, seconds: float, makes: bool = False
) -> Iterator[None]:
    """Returns a context in which a directory is locked against other processes.

    Some network file systems cannot lock a directory; there the context has no lock,
    and does not wait.

    Args:
        directory: path of the directory.
        doing: purpose of the lock, for errors, as in `os_errors.translated`.
        seconds: timeout of the wait for other processes.
        makes: whether to create the directory if it is missing, or if another process
            removes it during the wait.

    Raises:
        CheckpointError: another process has held the lock until the timeout.
        SaveError: the directory cannot be opened or created.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY
    with os_errors.translated(doing, directory):
        descriptor = acquire(directory, fcntl.LOCK_EX, seconds, flags, makes=makes)
    try:
        yield
    finally:
        os.close(descriptor)


def acquire(
    path: str, how: int, seconds: float, flags: int, *, makes: bool = False
) -> int:
    """Opens and locks a file or a directory; waits for other processes.

    Args:
        path: path of the file or directory.
        how: kind of lock: `fcntl.LOCK_SH` or `fcntl.LOCK_EX`.
        seconds: timeout of the wait.
        flags: flags for `os.open`.
        makes: whether to create a missing directory.

    Returns:
        The file descriptor; closing the descriptor releases the lock.

    Raises:
        CheckpointError: another process has held the lock until the timeout.
        OSError: the path cannot be opened; or the file system has no locks for files.
    """
    limit, is_logged = time.monotonic() + seconds, False
    while True:
        if makes:
            make_lasting_dirs(LocalFiles(), path)
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
        has_locked = lock(descriptor, how)
        if has_locked is not False and is_at(descriptor, path):
            if has_locked is None and not flags & os.O_DIRECTORY:
                os.close(descriptor)
                raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), path)
            return descriptor
        os.close(descriptor)
        if not is_logged:
            is_logged = True
            _log.info("waiting for another process that has locked %s", path)
        if time.monotonic() > limit:
            raise errors.CheckpointError(
                f"Another process still has {path!r} locked after {seconds:g} s. End "
                "that process, or retry later."
            )
        threading.Event().wait(_POLL)


def lock(descriptor: int, how: int) -> bool | None:
    """Tries to lock an open file, without blocking.

    Args:
        descriptor: descriptor of the file.
        how: kind of lock: `fcntl.LOCK_SH` or `fcntl.LOCK_EX`.

    Returns:
        True if locked; False if another process holds the lock; None if the file system
        has no locks.
    """
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


def is_at(descriptor: int, path: str) -> bool:
    """Returns whether a path still leads to the open file of a descriptor: the file was
    not deleted or replaced."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
