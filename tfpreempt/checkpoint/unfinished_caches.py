"""Which files of an unfinished `Dataset.cache(path)` this run may delete.

Files of a cache (tensorflow/core/kernels/data/cache_dataset_ops.cc): PATH.index and
PATH.data-* once the cache is complete; before, each save ends a shard with files
PATH_0.index, PATH_0.data-*, PATH_0.lockfile, then PATH_1, and so on. TensorFlow refuses
to write a cache while a lock file is there, and a killed process deletes none.

A lock file does not show which process made the file. So the journal of a run records
the caches that the run writes, each with the time of the first lock file. A later start
of the run deletes the unfinished files only if the lock file is the recorded one:
another program may write the same cache.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_log = logging.getLogger(__name__)

_DATA = re.compile(r"\.data-(\d{5})-of-(\d{5})")
_SHARD_FILE = re.compile(
    r"_(\d+)\.(?:lockfile|index|data-\d{5}-of-\d{5}(?:\.tempstate\d+)?)"
)
_OPEN_FILE = re.compile(r"(.+)_\d+\.data-\d{5}-of-\d{5}\.tempstate\d+")

_written: set[tuple[str, int]] = set()
"""Caches and lock files that `written_caches` found in this process."""
_restored: set[str] = set()
"""Caches whose unfinished files a restored state needs; absolute paths."""
_expected: set[str] = set()
"""Caches of iterators that are about to be read."""


def written_caches() -> list[tuple[str, int]]:
    """Caches that this process writes and that no earlier call returned. Any thread.

    The process has the data of the cache open, which no other process has.

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
            continue  # closed by now, or the data of a tf.train.Checkpoint
    new = found - _written
    _written.update(new)
    return sorted(new)


def expect_caches(paths: Iterable[str]) -> None:
    """Notes caches whose iterators the program is about to read."""
    _expected.update(paths)


def keep(path: str) -> None:
    """Notes that a restored state needs the unfinished files of a cache."""
    _restored.add(os.path.realpath(path))


def clear_interrupted(
    recorded: Iterable[Mapping[str, Any]], *, since: float = 0.0
) -> None:
    """Deletes the unfinished files that earlier processes of this run left.

    Called after a restore and before iterators are read, by the run that holds the
    directory's lease: the earlier processes have ended. Files that a restored state
    needs are kept. Files of other programs are kept and named.

    Args:
        recorded: records of `events.CacheWrite` in the run's journal.
        since: caches that were begun before are kept; in seconds since 1970.
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
    warn_of_unfinished(sorted(unfinished))
    _restored.clear()
    _expected.clear()


def _first_lock(path: str) -> str:
    return f"{path}_0.lockfile"


def warn_of_unfinished(paths: Sequence[str]) -> None:
    """Warns of lock files that no record shows to be this run's.

    Their writer may still run, so they are not deleted.
    """
    for path in paths:
        locks = [file for rest, file in _files(path) if rest.endswith(".lockfile")]
        if locks and not is_complete(path):
            _log.warning(
                "tfpreempt: the cache %s is unfinished: another program writes it now, "
                "or a run was killed while it did. TensorFlow refuses to write a cache "
                "while %s is there. If no other program uses the cache, delete %s_*",
                path,
                ", ".join(locks),
                path,
            )


def is_complete(path: str) -> bool:
    """Whether the index and all data files of a cache, or of a shard, are there."""
    found = [_DATA.fullmatch(rest) for rest, _ in _files(path)]
    data = [each.groups() for each in found if each is not None]
    counts = {int(count) for _, count in data}
    return os.path.exists(f"{path}.index") and len(data) in counts


def delete_shards(path: str, *, since: int) -> None:
    """Deletes files of unfinished shards from a number on."""
    cleared = []
    for rest, file in _files(path):
        shard = _SHARD_FILE.fullmatch(rest)
        if shard is not None and int(shard[1]) >= since:
            os.unlink(file)
            cleared.append(file)
    if cleared:
        _log.warning(
            "tfpreempt: the interrupted run left files of an unfinished cache, which "
            "is written again: %s were deleted",
            ", ".join(cleared),
        )


def _files(path: str) -> list[tuple[str, str]]:
    """Files whose names begin with a cache's; the rest of the name, and the path."""
    directory, name = os.path.split(path)
    return [
        (each.removeprefix(name), os.path.join(directory, each))
        for each in _listed(directory or ".")
        if each.startswith(name)
    ]


def _listed(directory: str) -> list[str]:
    """Names in a directory; empty if it cannot be read."""
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []
