"""What another number of workers saved, for the workers that there are now.

What all workers share (weights, the step, the place in global batches) is as it was.
What each saved for itself comes back by the rule of the State that saved it
(`State.fold`). Of random generators a worker that there was goes on with its own; that
of a new one is derived from the chief's and the worker's number, so that no two draw
the same, and each restart draws the same again.
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
from tfpreempt.storage import reading


def read_own(entry: Entry, state: State, cluster: Cluster) -> bool:
    """Loads what a commit has for this worker of a State of each worker.

    Args:
        entry: a commit of ours.
        state: with `per_worker=True`.
        cluster: who the workers are now.

    Returns:
        Whether there was something to load.

    Raises:
        CheckpointMismatchError: it is of another number of workers, and the State has
            no rule for that.
    """
    if not has_part_of(entry, cluster):
        return False
    if is_resized(entry, cluster):
        return _fold(entry, state, cluster)
    shard = os.path.join(entry.shards, layout.worker_name(cluster.worker))
    return read_state(shard, state)


def has_part_of(entry: Entry, cluster: Cluster) -> bool:
    """Returns whether a commit has anything that this worker can load as its own."""
    manifest = entry.manifest
    is_in_part = manifest is not None and cluster.worker in manifest.workers
    return is_in_part or is_resized(entry, cluster)


def is_resized(entry: Entry, cluster: Cluster) -> bool:
    """Returns whether another number of workers wrote a commit."""
    return entry.manifest is not None and entry.manifest.world_size != cluster.world


def check_rules(entry: Entry, states: Iterable[State], cluster: Cluster) -> None:
    """Before anything is assigned of what another number of workers saved.

    Args:
        entry: a commit of ours.
        states: the registered ones.
        cluster: who the workers are now.

    Raises:
        CheckpointMismatchError: a State of each worker is in it, and has no rule.
    """
    for state in states:
        if state.per_worker and type(state).fold is State.fold:
            paths = _paths(entry, state)
            if any(map(os.path.exists, paths)):
                raise no_rule(state, len(paths), cluster.world)


def _fold(entry: Entry, state: State, cluster: Cluster) -> bool:
    with contextlib.ExitStack() as stack:
        files: list[IO[bytes] | None] = []
        for path in _paths(entry, state):
            try:
                files.append(stack.enter_context(reading.open_file(path)))
            except FileNotFoundError:
                files.append(None)
        if not any(files):
            return False
        with naming(state, "fold"):
            state.fold(files, cluster.worker, cluster.world)
    return True


def _paths(entry: Entry, state: State) -> list[str]:
    """Where each worker's part of a State would be."""
    assert entry.manifest is not None
    folders = map(layout.worker_name, range(entry.manifest.world_size))
    name = state.name + layout.STATE_SUFFIX
    return [os.path.join(entry.shards, folder, name) for folder in folders]
