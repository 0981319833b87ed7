"""Locks on files and directories, between the processes of a machine.

A lock dies with whoever holds it. On a directory nothing lies beside it. What is locked
may be deleted meanwhile: a lock counts only on what still has its name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

from tfpreempt import errors
from tfpreempt.storage import failure
from tfpreempt.storage.files import LocalFiles, make_lasting_dirs

_log = logging.getLogger(__name__)
_POLL = 0.02


@contextlib.contextmanager
def locked(
    directory: str, doing: str, *, seconds: float, makes: bool = False
) -> Iterator[None]:
    """A context that nobody else is in for the same directory.

    Some network file systems cannot lock a directory; then nobody waits.

    Args:
        directory: its path.
        doing: what for, as of `failure.translated`.
        seconds: how long to wait for others.
        makes: makes the directory if there is none, also if it goes meanwhile.

    Raises:
        CheckpointError: somebody else takes longer.
        SaveError: the directory cannot be opened, or made.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY
    with failure.translated(doing, directory):
        descriptor = acquire(directory, fcntl.LOCK_EX, seconds, flags, makes=makes)
    try:
        yield
    finally:
        os.close(descriptor)


def acquire(
    path: str, how: int, seconds: float, flags: int, *, makes: bool = False
) -> int:
    """Opens and locks a file or a directory; returns its descriptor.

    Raises:
        CheckpointError: others hold it for longer.
        OSError: it cannot be opened; or a file cannot be locked there.
    """
    limit, is_said = time.monotonic() + seconds, False
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
        if not is_said:
            is_said = True
            _log.info("waiting for another process that works on %s", path)
        if time.monotonic() > limit:
            raise errors.CheckpointError(
                f"Another process has been working on {path!r} for {seconds:g} s. End "
                "it, or try again later."
            )
        threading.Event().wait(_POLL)


def lock(
    descriptor: int, how: int, take: Callable[[int, int], None] = fcntl.flock
) -> bool | None:
    """Whether there is no lock in its way; None where there are no locks at all."""
    try:
        take(descriptor, how | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


def is_at(descriptor: int, path: str) -> bool:
    """Whether an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
