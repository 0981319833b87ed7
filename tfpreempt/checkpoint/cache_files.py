"""Checks the files of `Dataset.cache(path)` before a state that needs them is restored.

TensorFlow does not check them: with files missing, restoring an iterator that was
reading its cache ends the process by SIGSEGV, and an iterator that was writing its
cache fails at each start with AlreadyExistsError because of the lock file that an
interrupted epoch left.

Files of a cache (tensorflow/core/kernels/data/cache_dataset_ops.cc): PATH.index and
PATH.data-* once the cache is complete; before, each save ends a shard with files
PATH_0.index, PATH_0.data-*, PATH_0.lockfile, then PATH_1, and so on.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfpreempt import errors
from tfpreempt.checkpoint.shuffle_seeds import Element, parts

_log = logging.getLogger(__name__)

_MODE, _SHARD, _WRITES = b"Mode", b"shard_id", 1
_DATA = re.compile(r"\.data-(\d{5})-of-(\d{5})")
_SHARD_FILE = re.compile(
    r"_(\d+)\.(?:lockfile|index|data-\d{5}-of-\d{5}(?:\.tempstate\d+)?)"
)


def cache_paths(*datasets: Any) -> list[str]:
    """The paths of the file caches that datasets are built of."""
    found = [
        os.fsdecode(node._filename.numpy())
        for node in parts(*datasets)
        if type(node).__name__ == "CacheDataset"
    ]
    return [path for path in dict.fromkeys(found) if path and "://" not in path]


def check_cache_files(state: Any, paths: Sequence[str]) -> None:
    """Refuses a state whose cache files are missing; see `prepare_cache_files`.

    Args:
        state: the state of an iterator: a variant tensor of shape (elements,).
        paths: file caches of the iterator's dataset.

    Raises:
        CheckpointMismatchError: names the missing files.
    """
    if missing := prepare_cache_files(state, paths):
        raise errors.CheckpointMismatchError(
            "The position in the data was saved with an iterator that reads a cache, "
            f"and files of the cache are missing: {', '.join(missing)}. Put the files "
            "back; or keep the iterator out of the tf.train.Checkpoint and derive the "
            "batch from the step: iter(dataset.skip(handler.total_run_calls)). A cache "
            "must lie on storage that outlives the machine."
        )


def prepare_cache_files(state: Any, paths: Sequence[str]) -> list[str]:
    """Brings the files of an unfinished cache to the moment of a state.

    A state that was saved while the iterator wrote a cache shows that the files of the
    unfinished cache are this run's own: files that are newer than the state are
    deleted, because TensorFlow writes them again and refuses to while they are there.

    Returns:
        Missing files; empty if the state can be restored. If files are missing, all
        files of the unfinished cache are deleted.
    """
    if not paths:
        return []
    modes, shards = [], []
    for element in map(Element, tf.unstack(state)):
        modes += element.numbers(_MODE, b"FileCache")
        shards += element.numbers(_SHARD, b"FileCacheImpl")
    missing: list[str] = []
    incomplete = [path for path in paths if not is_complete(path)]
    is_writing = len(modes) == 1 and modes[0] == _WRITES and len(paths) == 1
    if is_writing and incomplete:
        [path], shard = paths, shards[0] if shards else 0
        missing = [
            f"{path}_{number}.index"
            for number in range(shard)
            if not is_complete(f"{path}_{number}")
        ]
        _clear(path, since=0 if missing else shard)
    elif len(incomplete) > modes.count(_WRITES):
        missing = [f"{path}.index or .data" for path in incomplete]
    return missing


def warn_of_unfinished(paths: Sequence[str]) -> None:
    """Warns of lock files that an interrupted run left, before an iterator is read.

    TensorFlow's lock files do not show whether their writer still runs, so they are not
    deleted.
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


def _clear(path: str, *, since: int) -> None:
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
    try:
        names = sorted(os.listdir(directory or "."))
    except OSError:
        return []
    return [
        (each.removeprefix(name), os.path.join(directory, each))
        for each in names
        if each.startswith(name)
    ]
