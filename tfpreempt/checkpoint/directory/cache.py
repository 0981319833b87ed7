"""Copies of remote checkpoints, shared by the processes of a node.

    <root>/<key>.claim          locked, shared, by the processes that read the copy or
                                wait for the copy; exclusively by a deleting process
    <root>/<key>.making         locked by the process that makes the copy
    <root>/<key>.part/          an incomplete copy: in progress, or left by a killed
                                process
    <root>/<key>/               an intact copy; appears by a rename

The kernel releases a lock when its process ends. A killed reader therefore does not
count, and after a killed maker the next process resumes the copy. Each process deletes
unread copies at its first and last access. A locked file may be deleted: a lock counts
only if the file still has its name.
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
from tfpreempt.core.threads import ManagedThread

_log = logging.getLogger(__name__)

CACHE_VARIABLE = "TFPREEMPT_CACHE_DIR"
_CLAIM, _MAKING, _PART = ".claim", ".making", ".part"
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_PATIENCE = 24 * 3600.0  # long: a stalled download already fails by itself
_KEEP_PART = 24 * 3600.0  # seconds for which an incomplete copy may be resumed


def key_of(path: str, token: str) -> str:
    """Returns the name of a copy: the same in every process for the same content."""
    content = f"{path}\0{token}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(content).hexdigest()[:40]


def default_root() -> str:
    """Returns the private cache directory of this user; creates it if necessary.

    Raises:
        ConfigurationError: TFPREEMPT_CACHE_DIR cannot be used, or no directory can.
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
    """Creates a directory with access for this user only, or checks an existing one.

    Args:
        path: the directory.
        variable: environment variable for a different directory; for the message.

    Returns:
        The path.

    Raises:
        ConfigurationError: the directory belongs to another user, can be written by
            other users, is a link, or cannot be created.
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
        f"The directory {path!r} is a link, or other users may write there, or this "
        f"user may not; its files cannot be trusted. {advice}"
    )


@contextlib.contextmanager
def reading(
    key: str,
    make: Callable[[str], None],
    *,
    timeout: float | None = None,
    root: str | None = None,
) -> Iterator[str]:
    """Returns a context in which a copy exists; the context's value is the path.

    Args:
        key: the name of the copy, see `key_of`.
        make: function that fills a directory, or resumes filling; called by one process
            at a time. After an error the next process calls its own.
        timeout: seconds to wait while another process makes the copy; None: a day.
        root: the cache directory, closed to other users; `default_root()` by default.

    Raises:
        CheckpointError: the cache cannot be used, or another process does not finish
            the copy in time.
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
                "could not delete old copies in %s, which only take up disk space: %s",
                root,
                error,
            )


def _make(path: str, make: Callable[[str], None], patience: float) -> None:
    """Makes the copy unless it exists; a single process works at a time."""
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
    """Deletes the copies without a reader, and what killed processes left."""
    for name in os.listdir(root) if os.path.isdir(root) else ():
        if name.endswith(_CLAIM):
            _delete_unread(os.path.join(root, name.removesuffix(_CLAIM)))


def _delete_unread(path: str) -> None:
    """Deletes a copy without reader and maker; an incomplete copy only after a day."""
    try:
        claim = os.open(path + _CLAIM, _OPEN)
    except FileNotFoundError:
        return  # another process was quicker
    try:
        if not (lock(claim, fcntl.LOCK_EX) and is_at(claim, path + _CLAIM)):
            return
        with contextlib.suppress(FileNotFoundError):
            if os.path.isdir(path):
                # If this deletion is interrupted, the rest must not look intact.
                os.rename(path, path + _PART)
            elif time.time() - os.stat(path + _PART).st_mtime < _KEEP_PART:
                return  # left by a killed process; the next process resumes the copy
        shutil.rmtree(path + _PART, ignore_errors=True)
        if os.path.lexists(path + _PART):
            return  # another process may succeed
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
    """Closes a copy after its reader is garbage collected, or at process exit.

    Args:
        reader: the object that reads the copy; None: close at process exit.
        close: function that releases the copy; called once.
    """
    once = threading.Lock()

    def end() -> None:
        if once.acquire(blocking=False):
            close()

    def collected() -> None:
        # A finalizer may run on any thread, and deleting a copy takes time.
        atexit.unregister(end)
        ManagedThread("tfpreempt-copy", end).start()

    atexit.register(end)
    with contextlib.suppress(TypeError):  # None, or an object without weak references
        weakref.finalize(reader, collected).atexit = False
