"""Who is saving here? What is staged is left over only when its writers are dead.

Each worker that writes a part of a save holds a lock on the save's claim until the save
is over: `.tfpreempt-staging/<attempt>.claim`. The lock is shared, so while one of its
workers lives a save is not left over. It dies with its process, in whatever namespace
that is, and it is fcntl's because no forked child inherits that. A process is not kept
out by its own locks: what it has staged when it starts again is over.

Some network file systems keep locks to one machine, and a URL has none. So a claim
names the machines of its writers; where that is not only this one, and another one can
reach the file system, a save is left over once nothing in it has changed for QUIET
seconds. What has no claim has no writers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import weakref
from collections.abc import Iterator

from tfpreempt.checkpoint import layout
from tfpreempt.checkpoint.locks import is_at, lock
from tfpreempt.core import contained
from tfpreempt.core.clock import Clock, SystemClock
from tfpreempt.storage import paths, reading
from tfpreempt.storage.files import NOTHING_THERE, Files, remove_if_empty

QUIET = 3600.0  # seconds
_TRIES, _PAUSE = 200, 0.01  # whoever looks at a claim holds it for a moment
_MAX_BYTES = 1 << 20  # of a claim
_MACHINE = "/proc/sys/kernel/random/boot_id"  # equal in all containers of a machine


class Claim:
    """Held until `release()`, which may be called again, or until it is dropped."""

    def __init__(self, descriptor: int) -> None:
        self.release = weakref.finalize(self, os.close, descriptor)


def take(files: Files, staged: str) -> Claim | None:
    """Claims a save for this process, before it writes anything there.

    Args:
        files: the file operations.
        staged: the save's staging directory; it need not exist.

    Returns:
        The claim; None for a URL.

    Raises:
        OSError: as the file system says.
    """
    if paths.is_url(staged):
        return None
    path, machine = staged + layout.CLAIM_SUFFIX, _machine() + b"\n"
    for _ in range(_TRIES):
        files.make_dirs(os.path.dirname(path))
        try:
            descriptor = _opened(path, os.O_CREAT)
        except FileNotFoundError:  # another save is over, and its folder was empty
            continue
        claim = Claim(descriptor)
        os.write(descriptor, machine)  # at once: what names nobody stays QUIET seconds
        if lock(descriptor, fcntl.LOCK_SH, fcntl.lockf) is not False and is_at(
            descriptor, path
        ):
            return claim
        claim.release()
        threading.Event().wait(_PAUSE)
    raise BlockingIOError(f"{path!r} is being cleared away by another process")


@contextlib.contextmanager
def left_over(staged: str, *also: str, clock: Clock | None = None) -> Iterator[bool]:
    """Whether a save's writers are dead; none can come while the body runs.

    Args:
        staged: the save's staging directory; it need not exist.
        *also: where else the save may be writing.
        clock: for the age of what lies there.

    Raises:
        OSError: as the file system says.
    """
    now = (clock or SystemClock()).wall()
    path = staged + layout.CLAIM_SUFFIX
    if paths.is_url(staged):
        yield is_quiet(now, staged, *also)
        return
    try:
        descriptor = _opened(path)
    except NOTHING_THERE:
        yield True
        return
    except contained.UnsafeFileError:  # not to be locked, as after `cp -al`
        yield is_quiet(now, staged, *also)
        return
    try:
        has_locked = lock(descriptor, fcntl.LOCK_EX, fcntl.lockf)
        yield has_locked is not False and (
            (has_locked is True and _is_of_this_machine(descriptor))
            or is_quiet(now, path, staged, *also)
        )
    finally:
        os.close(descriptor)


def forget(files: Files, staged: str) -> None:
    """Removes the claim of a save that is over.

    Raises:
        OSError: as the file system says.
    """
    if not paths.is_url(staged):
        files.remove(staged + layout.CLAIM_SUFFIX)
        remove_if_empty(files, os.path.dirname(staged))


def is_quiet(now: float, *paths: str) -> bool:
    """Whether nothing at or below the paths has changed for QUIET seconds.

    Raises:
        OSError: as the file system says.
    """
    changed = 0
    for path in paths:
        below = reading.tree(path) if reading.is_real_dir(path) else []
        for each in (path, *(os.path.join(path, name) for name in below)):
            with contextlib.suppress(FileNotFoundError):
                changed = max(changed, reading.stat(each).modified_ns)
    return now - changed / 1e9 > QUIET


def _opened(path: str, flags: int = 0) -> int:
    """Opens a claim. Other users may be able to replace the directory of the claims."""
    root = os.path.dirname(os.path.dirname(path))
    return contained.open_file(path, os.O_RDWR | os.O_APPEND | flags, root=root)


def _is_of_this_machine(descriptor: int) -> bool:
    """Whether all who wrote here are on this machine, or must be."""
    status = os.fstat(descriptor)
    if os.major(status.st_dev) != 0:
        return True  # a disk of this machine: nobody else mounts it
    return set(os.pread(descriptor, _MAX_BYTES, 0).split()) == {_machine()}


def _machine() -> bytes:
    try:
        with open(_MACHINE, "rb") as file:
            return file.read().strip()
    except OSError:
        return b"unknown"
