"""Restores a commit after the number of workers has changed.

Values that are equal on all workers (weights, the step, the position in global batches)
are restored as they were saved. A State with a value for each worker has a rule for
resharding: its method `reshard`, which computes the new value of a worker from the
saved values of all workers. For example, a worker that existed before continues its
random generators. The random generators of a new worker are computed from the chief's
generators and the worker's index: no two workers get the same random numbers, and each
restart gives the same numbers again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import IO

from tfpreempt.checkpoint.directory import layout
from tfpreempt.checkpoint.directory.catalog import Entry
from tfpreempt.checkpoint.state.state import State, naming, no_rule, read_state
from tfpreempt.core.cluster import Cluster
from tfpreempt.storage import file_reading


def load_state(entry: Entry, state: State, cluster: Cluster) -> bool:
    """Loads the value of a named State from a commit: this worker's value of a
    per-worker State, or the value that is equal on all workers.

    The arguments, result and error are those of `load_worker_state`.
    """
    if state.per_worker:
        return load_worker_state(entry, state, cluster)
    return _read(entry, layout.STATES, state)


def load_worker_state(entry: Entry, state: State, cluster: Cluster) -> bool:
    """Loads this worker's value of a per-worker State from a commit.

    Args:
        entry: a commit of tfpreempt.
        state: a State with `per_worker=True`.
        cluster: the current workers, and the index of this worker.

    Returns:
        Whether the commit has a value of the State, which was loaded.

    Raises:
        CheckpointMismatchError: another number of workers wrote the commit, and the
            State has no rule for resharding.
    """
    if not has_part_of(entry, cluster):
        return False
    if is_resized(entry, cluster):
        return _fold(entry, state, cluster)
    return _read(entry, layout.worker_name(cluster.worker), state)


def has_part_of(entry: Entry, cluster: Cluster) -> bool:
    """Returns whether a commit has this worker's values of the per-worker States.

    True also if the number of workers has changed: `reshard` computes the values of
    this worker from the files of all workers.
    """
    manifest = entry.manifest
    is_in_part = manifest is not None and cluster.worker in manifest.workers
    return is_in_part or is_resized(entry, cluster)


def is_resized(entry: Entry, cluster: Cluster) -> bool:
    """Returns whether a commit was written by a different number of workers."""
    return (
        entry.manifest is not None and entry.manifest.world_size != cluster.num_workers
    )


def check_rules(entry: Entry, states: Iterable[State], cluster: Cluster) -> None:
    """Raises an error for a State that cannot be resharded. Called before any variable
    or State is changed.

    Args:
        entry: a commit of tfpreempt.
        states: the registered States.
        cluster: the current workers.

    Raises:
        CheckpointMismatchError: the commit has values of a per-worker State whose class
            does not override `reshard`.
    """
    named = _named(entry)
    for state in states:
        if state.per_worker and type(state).reshard is State.reshard:
            paths = _paths(entry, state)
            if not named.isdisjoint(paths):
                raise no_rule(state, len(paths), cluster.num_workers)


def _read(entry: Entry, folder: str, state: State) -> bool:
    """Loads the value of a State from a folder of a commit. Returns whether the
    manifest names a file of the State there."""
    path = _path(entry, folder, state)
    return path in _named(entry) and read_state(os.path.dirname(path), state)


def _fold(entry: Entry, state: State, cluster: Cluster) -> bool:
    with contextlib.ExitStack() as stack:
        named = _named(entry)
        files: list[IO[bytes] | None] = [
            stack.enter_context(file_reading.open_file(path)) if path in named else None
            for path in _paths(entry, state)
        ]
        if not any(files):
            return False
        with naming(state, "fold"):
            state.reshard(files, cluster.worker, cluster.num_workers)
    return True


def _paths(entry: Entry, state: State) -> list[str]:
    """Returns the path of a State's file of each worker that wrote the commit.

    A file may be missing.
    """
    assert entry.manifest is not None
    folders = map(layout.worker_name, range(entry.manifest.world_size))
    return [_path(entry, folder, state) for folder in folders]


def _path(entry: Entry, folder: str, state: State) -> str:
    return os.path.join(entry.shards, folder, state.name + layout.STATE_SUFFIX)


def _named(entry: Entry) -> set[str]:
    """Returns the paths of the files that the manifest of a commit names; other files
    were not verified."""
    return {entry.file(file.name) for file in entry.files}
