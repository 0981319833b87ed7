"""Checks the files of `Dataset.cache(path)` before a state that needs them is restored.

TensorFlow does not check them: with files missing, restoring an iterator that was
reading its cache ends the process by SIGSEGV, and an iterator that was writing its
cache fails at each start with AlreadyExistsError because of the lock file that an
interrupted epoch left.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfpreempt import errors
from tfpreempt.checkpoint.shuffle_seeds import Element, parts
from tfpreempt.checkpoint.unfinished_caches import delete_shards, is_complete, keep

_MODE, _SHARD, _WRITES = b"Mode", b"shard_id", 1


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
        if shard:  # else the run had written nothing: the files may be another's
            delete_shards(path, since=0 if missing else shard)
            keep(path)
    elif len(modes) - modes.count(_WRITES) > len(paths) - len(incomplete):
        missing = [f"{path}.index or .data" for path in incomplete]
    return missing
