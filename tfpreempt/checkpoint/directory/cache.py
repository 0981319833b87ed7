"""Copies of remote checkpoints that all processes of a node share while they read.

    <root>/<key>.claim          locked by all who read the copy or wait for it, shared;
                                exclusive by who deletes it
    <root>/<key>.making         locked by the one who makes the copy
    <root>/<key>.part/          a copy that is being made, or was by a killed process
    <root>/<key>/               a whole copy; appears by a rename

A lock dies with its process, so a killed reader does not count and a killed maker is
followed by the next one, who goes on where it stopped. Whoever comes or leaves deletes
the copies that nobody reads. A locked file may be deleted: a lock counts only if the
file still has its name.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import stat
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator

from tfpreempt import errors
from tfpreempt.checkpoint.directory.file_locks import acquire, is_at, lock
from tfpreempt.core.threads import OwnedThread

_log = logging.getLogger(__name__)

CACHE_VARIABLE = "TFPREEMPT_CACHE_DIR"
_CLAIM, _MAKING, _PART = ".claim", ".making", ".part"
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_PATIENCE = 24 * 3600.0  # who makes a copy gives up by itself when no byte comes
_KEEP_PART = 24 * 3600.0  # a copy that a killed process began waits for so long


def key_of(path: str, token: str) -> str:
    """The name of a copy: equal for all who mean the very same content."""
    content = f"{path}\0{token}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(content).hexdigest()[:40]


def default_root() -> str:
    """The cache directory of this user, made if need be, closed to others.

    Raises:
        ConfigurationError: TFPREEMPT_CACHE_DIR cannot be used, or no place can.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    own = f"tfpreempt-{os.getuid()}"
    if chosen:
        return private_directory(os.path.join(os.path.abspath(chosen), own))
    home = os.path.join(os.path.expanduser("~"), ".cache", "tfpreempt")
    try:
        return private_directory(home)
    except errors.ConfigurationError as error:
        _log.debug("no cache in the home directory: %s", error)
    return private_directory(os.path.join(tempfile.gettempdir(), own))


def private_directory(path: str, variable: str = CACHE_VARIABLE) -> str:
    """Makes a directory that only this user can enter, or checks that it is one.

    Args:
        path: the directory.
        variable: of the environment, that names another place.

    Raises:
        ConfigurationError: somebody else's, a link, or it cannot be made.
    """
    advice = f"Set {variable} to a directory of yours."
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        status = os.lstat(path)
        is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if is_ours and not status.st_mode & 0o022 and os.access(path, os.W_OK):
            os.chmod(path, 0o700)
            return path
    except OSError as error:
        raise errors.ConfigurationError(
            f"The directory {path!r} cannot be made: {error}. {advice}"
        ) from error
    raise errors.ConfigurationError(
        f"The directory {path!r} is a link, or can be written by others, "
        f"or not by this user; what lies there can't be trusted. {advice}"
    )


@contextlib.contextmanager
def reading(
    key: str,
    make: Callable[[str], None],
    *,
    timeout: float | None = None,
    root: str | None = None,
) -> Iterator[str]:
    """A context in which a copy is there.

    Args:
        key: the name of the copy, see `key_of`.
        make: called by one process of all that ask, with a directory that it fills, or
            goes on filling; it raises what it likes, then another may.
        timeout: seconds to wait while another process makes it; None: a day.
        root: the cache directory, closed to others; `default_root()` without one.

    Raises:
        CheckpointError: the cache cannot be used, or another process makes the copy and
            doesn't come to an end.
    """
    root = root or default_root()
    path, patience = os.path.join(root, key), _PATIENCE if timeout is None else timeout
    with _using(root):
        claim = acquire(path + _CLAIM, fcntl.LOCK_SH, patience, _OPEN | os.O_CREAT)
    try:
        with _using(root):
            _sweep(root)
        if not os.path.isdir(path):
            _make(path, make, patience)
        yield path
    finally:
        os.close(claim)
        try:
            _sweep(root)
        except OSError as error:
            _log.warning(
                "Old copies in %s take up room, and could not be deleted: %s",
                root,
                error,
            )


def _make(path: str, make: Callable[[str], None], patience: float) -> None:
    """By one process after the other, until it is there."""
    root = os.path.dirname(path)
    with _using(root):
        making = acquire(path + _MAKING, fcntl.LOCK_EX, patience, _OPEN | os.O_CREAT)
    try:
        if not os.path.isdir(path):
            make(path + _PART)
            with _using(root):
                os.rename(path + _PART, path)
    finally:
        os.close(making)


def _sweep(root: str) -> None:
    """Deletes the copies that nobody reads, and what killed processes left."""
    for name in os.listdir(root) if os.path.isdir(root) else ():
        if name.endswith(_CLAIM):
            _delete_unread(os.path.join(root, name.removesuffix(_CLAIM)))


def _delete_unread(path: str) -> None:
    """Deletes a copy unless somebody reads or makes it; half of one after a day."""
    try:
        claim = os.open(path + _CLAIM, _OPEN)
    except FileNotFoundError:
        return  # another process was quicker
    try:
        if not (lock(claim, fcntl.LOCK_EX) and is_at(claim, path + _CLAIM)):
            return
        with contextlib.suppress(FileNotFoundError):
            if os.path.isdir(path):
                os.rename(path, path + _PART)  # what is half deleted is not whole
            elif time.time() - os.stat(path + _PART).st_mtime < _KEEP_PART:
                return  # somebody was killed here; the next one goes on
        shutil.rmtree(path + _PART, ignore_errors=True)
        if os.path.lexists(path + _PART):
            return  # somebody else may have more luck
        for end in (_MAKING, _CLAIM):
            with contextlib.suppress(FileNotFoundError):
                os.remove(path + end)
    finally:
        os.close(claim)


@contextlib.contextmanager
def _using(root: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise errors.CheckpointError(
            f"The cache directory {root!r} cannot be used: {error}. Set "
            f"{CACHE_VARIABLE} to a directory of this machine with room."
        ) from error


def close_with(reader: object, close: Callable[[], None]) -> None:
    """Closes a copy when what reads it is gone, at the latest when the process ends.

    Args:
        reader: what reads it; None: to the end.
        close: gives the copy back; called once.
    """
    once = threading.Lock()

    def end() -> None:
        if once.acquire(blocking=False):
            close()

    def collected() -> None:
        # This may run anywhere, and to delete a copy takes time.
        atexit.unregister(end)
        OwnedThread("tfpreempt-copy", end).start()

    atexit.register(end)
    with contextlib.suppress(TypeError):  # None, or what can't be referred to weakly
        weakref.finalize(reader, collected).atexit = False
