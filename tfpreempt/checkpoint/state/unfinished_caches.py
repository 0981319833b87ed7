"""Deletes the files that a killed process left of an unfinished `Dataset.cache(path)`.

TensorFlow writes a cache in shards (tensorflow/core/kernels/data/cache_dataset_ops.cc):
first PATH_0.index, PATH_0.data-* and PATH_0.lockfile; a save of the iterator's position
begins the next shard, PATH_1.*. At the end the shards become PATH.index and
PATH.data-*. TensorFlow refuses to write a cache while a lock file exists, and a killed
process leaves its lock files behind.

A lock file does not show which process made it, and another program may be writing the
same cache. So unfinished files are deleted only in one of two cases:

- This run made the files: the run's journal has a record of the cache, with the time of
  the first lock file.
- No process writes the files. This can be tested only on a local file system, and only
  for the first shard. The test is needed if a run was killed before it had written the
  record of the cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_log = logging.getLogger(__name__)

_DATA = re.compile(r"\.data-(\d{5})-of-(\d{5})")
_SHARD_FILE = re.compile(
    r"_(\d+)\.(?:lockfile|index|data-\d{5}-of-\d{5}(?:\.tempstate\d+)?)"
)
_FIRST_SHARD_BEGUN = re.compile(r"_0\.(?:lockfile|data-\d{5}-of-\d{5}\.tempstate\d+)")
_OPEN_FILE = re.compile(r"(.+)_\d+\.data-\d{5}-of-\d{5}\.tempstate\d+")
_LOCAL_FILE_SYSTEMS = {
    0xEF53: "ext2, ext3, ext4",
    0x58465342: "XFS",
    0x9123683E: "Btrfs",
    0x2FC12FC1: "ZFS",
    0xF2F52010: "F2FS",
    0xCA451A4E: "bcachefs",
    0x01021994: "tmpfs",
    0x794C7630: "overlayfs",
}
"""Values of `f_type` of statfs(2) for local file systems: only processes of this
machine can open the files."""
_RENAMED_SECONDS = 0.2
"""Seconds within which TensorFlow renames the closed data files of a finished shard."""

_written: set[tuple[str, int]] = set()
"""Caches that `written_caches` has returned: path, and time of the first lock file."""
_restored: set[str] = set()
"""Absolute paths of caches whose unfinished files a restored iterator needs."""
_expected: set[str] = set()
"""Paths of caches from which iterators are about to read."""


def written_caches() -> list[tuple[str, int]]:
    """Returns the caches that this process has begun to write since the last call.

    The function searches the open files of this process for the data files of caches.
    Called on any thread.

    Returns:
        For every new cache the absolute path, and the modification time of its first
        lock file in nanoseconds.
    """
    found = set()
    for descriptor in _listed("/proc/self/fd"):
        try:
            file = os.readlink(f"/proc/self/fd/{descriptor}")
            if (match := _OPEN_FILE.fullmatch(file)) is not None:
                found.add((match[1], os.stat(_first_lock(match[1])).st_mtime_ns))
        except OSError:
            # The file was closed in the meantime, or belongs to a tf.train.Checkpoint.
            continue
    new = found - _written
    _written.update(new)
    return sorted(new)


def expect_caches(paths: Iterable[str]) -> None:
    """Records the paths of caches from which iterators are about to read."""
    _expected.update(paths)


def keep(path: str) -> None:
    """Records that a restored iterator needs the unfinished files of a cache."""
    _restored.add(os.path.realpath(path))


def clear_interrupted(
    recorded: Iterable[Mapping[str, Any]], *, since: float = 0.0
) -> None:
    """Deletes unfinished cache files that earlier processes of this run left.

    Called between the restore and the first read of an iterator. The run holds the
    lease of the checkpoint directory, so earlier processes of the run have ended. Files
    that a restored iterator needs are kept. Files that another program may be writing
    are kept, and named in a warning.

    Args:
        recorded: the records of caches (`events.CacheWrite`) in the run's journal.
        since: time in seconds since 1970; a recorded cache that was begun earlier is
            kept.
    """
    for record in recorded:
        path, lock = record.get("path"), record.get("lock")
        if not isinstance(path, str) or not isinstance(lock, int):
            continue
        if (
            lock < since * 1e9
            or path in _restored
            or (path, lock) in _written
            or is_complete(path)
        ):
            continue
        try:
            is_ours = os.stat(_first_lock(path)).st_mtime_ns == lock
        except OSError:
            continue
        if is_ours:
            delete_shards(path, since=0)
    unfinished = [p for p in _expected if os.path.realpath(p) not in _restored]
    clear_abandoned(sorted(unfinished))
    _restored.clear()
    _expected.clear()


def _first_lock(path: str) -> str:
    return f"{path}_0.lockfile"


def clear_abandoned(paths: Iterable[str]) -> None:
    """Deletes unfinished caches that no process writes.

    Logs a warning for a cache that still has a lock file, because TensorFlow refuses to
    write that cache.

    Args:
        paths: paths of caches about to be read.
    """
    for path in paths:
        _delete_abandoned(path)
        locks = [file for rest, file in _files(path) if rest.endswith(".lockfile")]
        if locks and not is_complete(path):
            _log.warning(
                "the cache %s is incomplete: another program is writing the cache now, "
                "or a run was killed during the write. TensorFlow refuses to write a "
                "cache while %s exists. If no other program uses the cache, delete "
                "%s_*",
                path,
                ", ".join(locks),
                path,
            )


def _delete_abandoned(path: str) -> None:
    """Deletes the first shard of a cache if the shard is unfinished and no process has
    its files open.

    A process that writes a shard always has a file of the shard open: first the lock
    file, then also the data files, until the shard is finished. No saved iterator
    position needs an unfinished first shard, because the save of a position finishes
    the shard.
    """
    with contextlib.ExitStack() as held:
        if not _has_no_writer(_first_lock(path), held):
            return
        shards = [each for each in _files(path) if _SHARD_FILE.fullmatch(each[0])]
        files = [file for _, file in shards if file != _first_lock(path)]
        if all(_FIRST_SHARD_BEGUN.fullmatch(rest) for rest, _ in shards) and all(
            _has_no_writer(file, held) for file in files
        ):
            _delete([*files, _first_lock(path)])


def _has_no_writer(path: str, held: contextlib.ExitStack) -> bool:
    """Returns whether no process has a file open. If so, a process that opens the file
    now has to wait until `held` closes the file, or for the kernel's time limit.

    The test is a kernel lease (F_SETLEASE in fcntl(2)): the kernel grants the lease to
    the owner of a file only if no process of the machine, in any container, has the
    file open. A network file system may grant the lease although another machine has
    the file open, so on a network file system the result is False.

    Args:
        path: path of the file.
        held: receives the file with the lease; closes the file, which ends the lease.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
        held.callback(os.close, descriptor)
        # If a process opens the leased file, the kernel makes it wait, and signals this
        # process: by default with SIGIO, which would terminate this process.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return False
    status = os.fstat(descriptor)
    is_old = status.st_mtime < time.time() - _RENAMED_SECONDS
    return is_old and status.st_nlink == 1 and _is_local(descriptor)


def _is_local(descriptor: int) -> bool:
    """Returns whether an open file is on a file system that only this machine uses."""
    status = (ctypes.c_long * 64)()  # larger than struct statfs; f_type is first
    ctypes.CDLL(None).fstatfs(descriptor, status)
    return status[0] in _LOCAL_FILE_SYSTEMS


def is_complete(path: str) -> bool:
    """Returns whether a cache, or a shard such as PATH_0, has its index and every data
    file."""
    found = [_DATA.fullmatch(rest) for rest, _ in _files(path)]
    data = [each.groups() for each in found if each is not None]
    counts = {int(count) for _, count in data}
    return os.path.exists(f"{path}.index") and len(data) in counts


def delete_shards(path: str, *, since: int) -> None:
    """Deletes the files of a cache's unfinished shards.

    Args:
        path: path of the cache.
        since: number of the first shard to delete.
    """
    matches = [(_SHARD_FILE.fullmatch(rest), file) for rest, file in _files(path)]
    _delete([file for shard, file in matches if shard and int(shard[1]) >= since])


def _delete(files: Sequence[str]) -> None:
    """Deletes files of an unfinished cache; logs a warning for the deleted files, and
    for a file that cannot be deleted."""
    deleted = []
    for file in files:
        try:
            os.unlink(file)
            deleted.append(file)
        except FileNotFoundError:  # another worker of this machine has deleted the file
            pass
        except OSError as error:
            _log.warning(
                "an interrupted run left the file %r of an incomplete cache, and the "
                "file cannot be deleted: %s. TensorFlow may refuse the cache; delete "
                "the file, or give the cache another path",
                file,
                error,
            )
    if deleted:
        _log.warning(
            "an interrupted run left files of an incomplete cache: %s were deleted, "
            "and the cache is written again",
            ", ".join(deleted),
        )


def _files(path: str) -> list[tuple[str, str]]:
    """Finds the files whose names begin with a cache's name.

    Returns:
        For every file, the end of its name, after the cache's name; and its path.
    """
    directory, name = os.path.split(path)
    return [
        (each.removeprefix(name), os.path.join(directory, each))
        for each in _listed(directory or ".")
        if each.startswith(name)
    ]


def _listed(directory: str) -> list[str]:
    """Returns the sorted names in a directory; empty if the directory cannot be
    read."""
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []
