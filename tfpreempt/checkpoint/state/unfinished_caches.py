"""Deletes the files of an unfinished `Dataset.cache(path)` that this run may delete.

A complete cache has the files PATH.index and PATH.data-*
(tensorflow/core/kernels/data/cache_dataset_ops.cc). In an incomplete cache, each save
ends a shard with files PATH_0.index, PATH_0.data-*, PATH_0.lockfile, then PATH_1, and
so on. TensorFlow refuses to write a cache while a lock file exists, and a killed
process deletes no lock file.

A lock file does not show which process made the file, and another program may write the
same cache. Unfinished files are deleted for one of two reasons:

- The run made the files. The journal of a run records the caches written by the run,
  with the time of the first lock file.
- No process writes the files. On a file system of this machine, this is known of the
  first shard, so a run killed before the record is written needs no record.
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
"""Values of `f_type` of statfs(2). Only this machine's kernel opens the files."""
_RENAMED_SECONDS = 0.2
"""Seconds within which TensorFlow renames the closed data files of a finished shard."""

_written: set[tuple[str, int]] = set()
"""Caches and lock files that `written_caches` found in this process."""
_restored: set[str] = set()
"""Caches whose unfinished files a restored state needs; absolute paths."""
_expected: set[str] = set()
"""Caches of iterators that will be read next."""


def written_caches() -> list[tuple[str, int]]:
    """Returns the caches that this process writes, each cache once. Any thread.

    The process has the data file of the cache open; no other process has.

    Returns:
        For each cache the absolute path, and the modification time of its first lock
        file in nanoseconds.
    """
    found = set()
    for descriptor in _listed("/proc/self/fd"):
        try:
            file = os.readlink(f"/proc/self/fd/{descriptor}")
            if (match := _OPEN_FILE.fullmatch(file)) is not None:
                found.add((match[1], os.stat(_first_lock(match[1])).st_mtime_ns))
        except OSError:
            continue  # closed meanwhile, or data of a tf.train.Checkpoint
    new = found - _written
    _written.update(new)
    return sorted(new)


def expect_caches(paths: Iterable[str]) -> None:
    """Records caches with iterators that are about to be read."""
    _expected.update(paths)


def keep(path: str) -> None:
    """Records that a restored state needs the unfinished files of a cache."""
    _restored.add(os.path.realpath(path))


def clear_interrupted(
    recorded: Iterable[Mapping[str, Any]], *, since: float = 0.0
) -> None:
    """Deletes the unfinished files of earlier processes of this run.

    Called after a restore and before iterators are read, by the run that holds the
    directory's lease: no earlier process of the run saves any more. Files that a
    restored state needs are kept. Files of other programs are kept and named in a
    warning.

    Args:
        recorded: records of `events.CacheWrite` in the run's journal.
        since: time in seconds since 1970; caches begun earlier are kept.
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
    """Deletes unfinished caches that no process writes, and warns of the rest.

    TensorFlow refuses to write a cache while a lock file exists.

    Args:
        paths: caches about to be read.
    """
    for path in paths:
        _delete_abandoned(path)
        locks = [file for rest, file in _files(path) if rest.endswith(".lockfile")]
        if locks and not is_complete(path):
            _log.warning(
                "the cache %s is unfinished: another program writes the cache now, "
                "or a run was killed during the write. TensorFlow refuses to write a "
                "cache while %s exists. If no other program uses the cache, delete "
                "%s_*",
                path,
                ", ".join(locks),
                path,
            )


def _delete_abandoned(path: str) -> None:
    """Deletes the first shard of a cache if unfinished and not open in any process.

    While TensorFlow writes a shard, the lock file is open until the data files are, and
    the data files are open until the shard is finished. No iterator state needs the
    shard.
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
    """Acquires a lease of a file, to show that no other process has the file open.

    The kernel grants a lease (F_SETLEASE in fcntl(2)) to the owner of a file if the
    file is not open elsewhere, including other containers of the machine. A network
    file system may grant a lease although another machine has the file open.

    Returns:
        False if the file is open, or if its state is unknown.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
        held.callback(os.close, descriptor)
        # A process that opens the file waits until the lease ends, and this process
        # gets a signal: by default SIGIO, which would terminate the process.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return False
    status = os.fstat(descriptor)
    is_old = status.st_mtime < time.time() - _RENAMED_SECONDS
    return is_old and status.st_nlink == 1 and _is_local(descriptor)


def _is_local(descriptor: int) -> bool:
    """Returns whether a file is on a file system mounted by this machine only."""
    status = (ctypes.c_long * 64)()  # more than a struct statfs, which begins with type
    ctypes.CDLL(None).fstatfs(descriptor, status)
    return status[0] in _LOCAL_FILE_SYSTEMS


def is_complete(path: str) -> bool:
    """Returns whether the index and every data file of a cache or shard exist."""
    found = [_DATA.fullmatch(rest) for rest, _ in _files(path)]
    data = [each.groups() for each in found if each is not None]
    counts = {int(count) for _, count in data}
    return os.path.exists(f"{path}.index") and len(data) in counts


def delete_shards(path: str, *, since: int) -> None:
    """Deletes files of unfinished shards from a shard number on."""
    matches = [(_SHARD_FILE.fullmatch(rest), file) for rest, file in _files(path)]
    _delete([file for shard, file in matches if shard and int(shard[1]) >= since])


def _delete(files: Sequence[str]) -> None:
    """Deletes files of an unfinished cache; logs a file that cannot be deleted."""
    deleted = []
    for file in files:
        try:
            os.unlink(file)
            deleted.append(file)
        except FileNotFoundError:  # by another worker of this machine
            pass
        except OSError as error:
            _log.warning(
                "an interrupted run left the file %r of an unfinished "
                "cache, and the file cannot be deleted: %s. TensorFlow may refuse the "
                "cache; delete the file, or give the cache another path",
                file,
                error,
            )
    if deleted:
        _log.warning(
            "an interrupted run left files of an unfinished cache: %s were deleted, "
            "and the cache is written again",
            ", ".join(deleted),
        )


def _files(path: str) -> list[tuple[str, str]]:
    """Returns files that begin with a cache's name, as rest of the name and path."""
    directory, name = os.path.split(path)
    return [
        (each.removeprefix(name), os.path.join(directory, each))
        for each in _listed(directory or ".")
        if each.startswith(name)
    ]


def _listed(directory: str) -> list[str]:
    """Returns the names in a directory; empty if the directory cannot be read."""
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []
