"""Copies of remote checkpoints that all processes of a node share while they read.

    <root>/lock                 held for moments only, whenever anything below changes
    <root>/<key>.claim          flock: exclusive while the copy is made, shared by every
                                reader for as long as it reads
    <root>/<key>.part/          a copy that is being made, or was by a killed process
    <root>/<key>/               a whole copy; appears by a rename

A lock dies with its process, so a killed reader does not count and a killed maker is
followed by the next one, who goes on where it stopped. Whoever comes or leaves deletes
the copies that nobody reads. Claims are made and deleted under `lock` only, so nobody
waits for a file that has another's name.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import stat
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import filelock

from tfpreempt import errors
from tfpreempt.core.threads import OwnedThread

_log = logging.getLogger(__name__)

CACHE_VARIABLE = "TFPREEMPT_CACHE_DIR"
_CLAIM, _PART, _GONE = ".claim", ".part", ".gone"
_LOCK_SECONDS = 60.0  # `lock` is held for renames and for looking around
_PATIENCE = 24 * 3600.0  # who makes a copy gives up by itself when no byte comes
_POLL = 0.1
_TRY_AGAIN = 2.0  # who makes a copy may have died; to ask takes `lock`
_KEEP_PART = 24 * 3600.0  # a copy that a killed process began waits for so long


def key_of(*parts: str) -> str:
    """The name of a copy: equal for all who mean the very same content."""
    return hashlib.sha256(
        "\0".join(parts).encode("utf-8", "surrogatepass")
    ).hexdigest()[:40]


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


class Cache:
    """The copies below one directory.

    Args:
        root: the directory, closed to others; `default_root()` without one.
    """

    def __init__(self, root: str | None = None) -> None:
        self._root = root or default_root()

    @contextlib.contextmanager
    def reading(
        self, key: str, make: Callable[[str], None], *, timeout: float | None = None
    ) -> Iterator[str]:
        """A context in which a copy is there.

        Args:
            key: the name of the copy, see `key_of`.
            make: called by one process of all that ask, with a directory that it
                fills, or goes on filling; it raises what it likes, then another may.
            timeout: seconds to wait while another process makes it; None: a day.

        Raises:
            CheckpointError: the cache cannot be used, or another process makes the copy
                and doesn't come to an end.
        """
        with self._translated():
            claim = self._claim(key, _PATIENCE if timeout is None else timeout)
        try:
            if not os.path.isdir(self._path(key)):
                self._make(key, claim, make)
            yield self._path(key)
        finally:
            self._leave(claim)

    def _claim(self, key: str, patience: float) -> int:
        """Waits until the copy is whole, or is this process's to make."""
        limit = time.monotonic() + patience
        with self._locked():
            self._sweep(besides=key)
            claim = self._try_claim(key)
        self._discard()
        if claim is None:
            _log.info("waiting for another process that downloads this checkpoint")
        while claim is None:
            if time.monotonic() > limit:
                raise errors.CheckpointError(
                    f"Another process has been making {self._path(key)!r} for "
                    f"{patience:g} s. End it, or wait longer."
                )
            self._await_copy(key, limit)
            with self._locked():
                claim = self._try_claim(key)
        return claim

    def _await_copy(self, key: str, limit: float) -> None:
        """Returns when the copy is there, or it is time to ask again. Takes no lock."""
        limit = min(limit, time.monotonic() + _TRY_AGAIN)
        while not os.path.isdir(self._path(key)) and time.monotonic() < limit:
            threading.Event().wait(_POLL)

    def _try_claim(self, key: str) -> int | None:
        """The claim, shared if the copy is whole, else exclusive; None if taken."""
        claim = _open(self._path(key) + _CLAIM)
        how = fcntl.LOCK_SH if os.path.isdir(self._path(key)) else fcntl.LOCK_EX
        if _flock(claim, how):
            return claim
        os.close(claim)
        return None

    def _make(self, key: str, claim: int, make: Callable[[str], None]) -> None:
        part = self._path(key) + _PART
        make(part)
        with self._translated(), self._locked():
            os.rename(part, self._path(key))
            # Not atomic, but whoever else wants it needs `lock` first.
            _flock(claim, fcntl.LOCK_SH)

    def _leave(self, claim: int) -> None:
        """Gives the claim back; the last one takes the copy along."""
        os.close(claim)
        try:
            with self._locked():
                self._sweep()
            self._discard()
        except (OSError, errors.CheckpointError) as error:
            _log.warning("Copies in %s could not be tidied: %s", self._root, error)

    def _sweep(self, besides: str | None = None) -> None:
        """Puts aside what nobody reads; `lock` is held.

        Args:
            besides: the key that is wanted now; a copy that is left of it is welcome.
        """
        for name in os.listdir(self._root):
            if name.endswith(_CLAIM) and name != f"{besides}{_CLAIM}":
                self._sweep_one(name[: -len(_CLAIM)])

    def _sweep_one(self, key: str) -> None:
        path = self._path(key)
        claim = _open(path + _CLAIM)
        try:
            if not _flock(claim, fcntl.LOCK_EX):
                return
            with contextlib.suppress(FileNotFoundError):
                if time.time() - os.stat(path + _PART).st_mtime < _KEEP_PART:
                    return  # somebody was killed here; the next one goes on
                self._drop(path + _PART)
            if os.path.isdir(path):
                self._drop(path)
            os.remove(path + _CLAIM)
        finally:
            os.close(claim)

    def _drop(self, path: str) -> None:
        os.rename(path, f"{path}{_GONE}-{secrets.token_hex(4)}")

    def _discard(self) -> None:
        """Deletes what was put aside, which may take long; `lock` isn't held."""
        for name in os.listdir(self._root):
            if _GONE in name:
                shutil.rmtree(os.path.join(self._root, name), ignore_errors=True)

    def _path(self, key: str) -> str:
        return os.path.join(self._root, key)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        lock = filelock.FileLock(os.path.join(self._root, "lock"), mode=0o600)
        try:
            lock.acquire(timeout=_LOCK_SECONDS)
        except filelock.Timeout as error:
            raise errors.CheckpointError(
                f"{lock.lock_file!r} was held for {_LOCK_SECONDS:g} s by another "
                f"process. End it, or set {CACHE_VARIABLE} to another directory."
            ) from error
        try:
            yield
        finally:
            lock.release()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (OSError, NotImplementedError) as error:
            raise errors.CheckpointError(
                f"The cache directory {self._root!r} cannot be used: {error}. Set "
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
        # This may run anywhere, in the middle of what holds the cache's lock.
        atexit.unregister(end)
        OwnedThread("tfpreempt-copy", end).start()

    atexit.register(end)
    with contextlib.suppress(TypeError):  # None, or what can't be referred to weakly
        weakref.finalize(reader, collected).atexit = False


def _open(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _flock(descriptor: int, how: int) -> bool:
    """Takes a lock at once; False if somebody else's is in the way."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True
