"""Local copies of remote checkpoints, shared by the processes of a machine.

    <root>/<key>.claim          a lock file; its lock is shared by processes that read
                                or wait for the copy, and exclusive for deletion
    <root>/<key>.making         a lock file, locked by the process that makes the copy
    <root>/<key>.part/          an incomplete copy: in progress, or left by a killed
                                process
    <root>/<key>/               a complete copy; renamed from `.part`

The kernel releases a lock when the process with the lock ends. So a killed reader does
not keep a copy, and if the process that makes the copy is killed, the next process
continues the copy. Before and after using a copy, every process deletes the copies that
no process reads. Another process may delete a lock file while a process waits for the
lock. So a lock counts only if the locked file still has its name.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator

from tfpreempt import errors
from tfpreempt.checkpoint.directory.file_locks import acquire, is_at, lock
from tfpreempt.core import contained
from tfpreempt.core.threads import ManagedThread

_log = logging.getLogger(__name__)

CACHE_VARIABLE = "TFPREEMPT_CACHE_DIR"
_CLAIM, _MAKING, _PART = ".claim", ".making", ".part"
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_OURS = (contained.LinkError, NotADirectoryError, PermissionError)
_COPY_TIMEOUT = 24 * 3600.0  # seconds; long, because a stalled download has a timeout
_KEEP_PART = 24 * 3600.0  # seconds for which an incomplete copy is kept


def key_of(path: str, token: str) -> str:
    """Returns the name of a checkpoint's copy in the cache, equal in every process.

    Args:
        path: path or URL of the checkpoint.
        token: token of the commit, which identifies the content of the commit.
    """
    content = f"{path}\0{token}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(content).hexdigest()[:40]


def default_root() -> str:
    """Returns this user's private cache directory; creates the directory if necessary.

    Raises:
        ConfigurationError: TFPREEMPT_CACHE_DIR cannot be used; or, without the
            variable, no directory can be created.
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
    """Returns a directory that only this user can access. Creates the directory if
    necessary.

    Args:
        path: path of the directory.
        variable: environment variable by which the user can choose another directory;
            named in the error.

    Returns:
        The path.

    Raises:
        ConfigurationError: the directory belongs to another user, is writable for other
            users, is a link, or cannot be created.
    """
    advice = f"Set {variable} to a directory that only this user can write."
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        with (
            contextlib.suppress(*_NOT_OURS),
            contained.directory(path, os.path.dirname(path), reads=True) as opened,
        ):
            status = os.fstat(opened)
            is_ours = status.st_uid == os.getuid()
            if is_ours and not status.st_mode & 0o022 and os.access(path, os.W_OK):
                os.fchmod(opened, 0o700)
                return path
    except OSError as error:
        raise errors.ConfigurationError(
            f"The directory {path!r} cannot be created: {error}. {advice}"
        ) from error
    raise errors.ConfigurationError(
        f"The directory {path!r} cannot be trusted: expected a directory that belongs "
        f"to this user, is not a link, and is writable for this user only. {advice}"
    )


@contextlib.contextmanager
def reading(
    key: str,
    make: Callable[[str], None],
    *,
    timeout: float | None = None,
    root: str | None = None,
) -> Iterator[str]:
    """Returns a context in which a local copy of a checkpoint exists, and stays.

    Makes the copy if necessary. No process deletes the copy before the context ends.

    Args:
        key: name of the copy, from `key_of`.
        make: function that writes the copy into the directory with the given path. The
            directory may have files of a killed process. Only one process at a time
            makes the copy; if `make` fails, the next waiting process makes the copy.
        timeout: seconds to wait while another process makes the copy; None: a day.
        root: cache directory, not accessible for other users; by default
            `default_root()`.

    Yields:
        The path of the copy.

    Raises:
        CheckpointError: the cache cannot be used, or another process does not finish
            the copy in time.
    """
    root = root or default_root()
    path = os.path.join(root, key)
    seconds = _COPY_TIMEOUT if timeout is None else timeout
    with _using(root):
        claim = acquire(path + _CLAIM, fcntl.LOCK_SH, seconds, _OPEN | os.O_CREAT)
    try:
        with _using(root):
            _sweep(root)
        if not os.path.isdir(path):
            _make(path, make, seconds)
        yield path
    finally:
        os.close(claim)
        try:
            _sweep(root)
        except OSError as error:
            _log.warning(
                "could not delete old downloads in %s, which only take up disk space: "
                "%s",
                root,
                error,
            )


def _make(path: str, make: Callable[[str], None], seconds: float) -> None:
    """Makes the copy at a path, unless the copy exists; see `reading`.

    Waits up to `seconds` while another process makes the copy.
    """
    root = os.path.dirname(path)
    with _using(root):
        making = acquire(path + _MAKING, fcntl.LOCK_EX, seconds, _OPEN | os.O_CREAT)
    try:
        if not os.path.isdir(path):
            make(path + _PART)
            with _using(root):
                os.rename(path + _PART, path)
    finally:
        os.close(making)


def _sweep(root: str) -> None:
    """Deletes the copies that no process reads, and leftovers of killed processes."""
    for name in os.listdir(root) if os.path.isdir(root) else ():
        if name.endswith(_CLAIM):
            _delete_unread(os.path.join(root, name.removesuffix(_CLAIM)))


def _delete_unread(path: str) -> None:
    """Deletes a copy, unless a process reads or makes the copy. An incomplete copy is
    kept for a day, so that the next process can continue the copy."""
    try:
        claim = os.open(path + _CLAIM, _OPEN)
    except FileNotFoundError:
        return  # another process has deleted the copy
    try:
        if not (lock(claim, fcntl.LOCK_EX) and is_at(claim, path + _CLAIM)):
            return
        with contextlib.suppress(FileNotFoundError):
            if os.path.isdir(path):
                # Rename first: an interrupted deletion must not leave files that look
                # like a complete copy.
                os.rename(path, path + _PART)
            elif time.time() - os.stat(path + _PART).st_mtime < _KEEP_PART:
                return  # keep the incomplete copy: the next process resumes it
        shutil.rmtree(path + _PART, ignore_errors=True)
        if os.path.lexists(path + _PART):
            return  # cannot be deleted now; another process will try again
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
            f"{CACHE_VARIABLE} to a directory of this machine with free space."
        ) from error


def close_with(reader: object, close: Callable[[], None]) -> None:
    """Registers the release of a copy: the copy may be deleted once its reader is
    garbage collected, or when the process exits.

    Args:
        reader: the object that reads the copy; None: release only at process exit.
        close: function that releases the copy, by leaving the context of `reading`;
            called once.
    """
    once = threading.Lock()

    def end() -> None:
        if once.acquire(blocking=False):
            close()

    def collected() -> None:
        # Use a new thread: a finalizer may run on any thread, and deleting a copy takes
        # time.
        atexit.unregister(end)
        ManagedThread("tfpreempt-copy", end).start()

    atexit.register(end)
    # TypeError: `reader` is None, or does not support weak references.
    with contextlib.suppress(TypeError):
        weakref.finalize(reader, collected).atexit = False
