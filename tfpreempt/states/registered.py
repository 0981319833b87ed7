"""save_all_states(), save_state() and load_state(): what a program calls.

With an open handler they are its saves and its restored commit; without one they work
on the directory that TFPREEMPT_CHECKPOINT_DIR names, and need no TensorFlow.
"""

from __future__ import annotations

import functools
import logging
import os

from tfpreempt.checkpoint.directory import layout
from tfpreempt.checkpoint.lease.directory_lease import FencedFiles
from tfpreempt.checkpoint.mirror.store_selection import (
    REMOTE_VARIABLE,
    Places,
    choose_places,
)
from tfpreempt.checkpoint.state import state_file
from tfpreempt.checkpoint.state.state import REGISTRY, State, check_state, sync_states
from tfpreempt.core.cluster import Cluster, cluster_from_environment
from tfpreempt.core.scratch import is_url
from tfpreempt.handler import current_session
from tfpreempt.states.alone import StatesAlone
from tfpreempt.states.copies import MAX_TO_KEEP
from tfpreempt.storage import failure, paths
from tfpreempt.storage.files import Files, LocalFiles

_log = logging.getLogger(__name__)

_VARIABLE = "TFPREEMPT_CHECKPOINT_DIR"

_alone: dict[tuple[str, Cluster], StatesAlone] = {}  # by directory and cluster


def save_all_states() -> str | None:
    """Commits all registered States, now; every worker calls it at the same place.

    `sync()` is called on all workers, in name order. With an open handler this is its
    `save()`: one commit holds the States and the TensorFlow checkpoint. (With several,
    each commits.) Without one the States alone are committed, in the directory that
    TFPREEMPT_CHECKPOINT_DIR names, by the chief; the workers are those of TF_CONFIG,
    and States with per_worker=True need a handler where there are several. Where
    TFPREEMPT_REMOTE_CHECKPOINT_DIR is set, each commit is copied there in the
    background; the first call of a process looks there for a newer one. Without a
    handler and without a directory nothing is saved: `sync()` alone is called, and one
    warning of the process says so.

    Returns:
        The commit's directory, on the chief. On the other workers, where it may not be
        complete yet, and where a CheckpointManager keeps its files flat: the checkpoint
        directory. None if there is no directory.

    Raises:
        SaveError: nothing was committed, and nothing older was touched; or a worker
            didn't come.
        CheckpointError: the object store cannot be read, and no commit is here.
        ConfigurationError: the directory cannot work.
        UsageError: there is no State and no handler; or inside `run()`.
    """
    if (current := current_session.current()) and current.runs:
        return [current.save(run) for run in current.runs][-1]
    directory = os.environ.get(_VARIABLE, "").strip()
    if not directory:
        _warn_of_no_directory()
        sync_states(REGISTRY.in_order())
        return None
    return _alone_in(directory).save()


def save_state(
    state: State, checkpoint_dir: str | os.PathLike[str] | None, sync: bool = True
) -> None:
    """Saves one State in a file of its own, outside of any commit; every worker.

    The file is replaced as a whole, and durably: `states/<name>.state` in the
    directory, written by the chief alone, or `worker-<i>/<name>.state`. The chief holds
    the directory from then on, as after `save_all_states`: `load_state` might take the
    file of another run for a newer one of this.

    Args:
        state: need not be registered.
        checkpoint_dir: made if need be; None saves nothing, only `sync()` is called.
        sync: whether to call the State's `sync()`, on every worker.

    Raises:
        SaveError: the disk; the old file stands.
        DirectoryInUseError: another program is at work in the directory.
        ConfigurationError: the directory cannot work, or the State is none.
    """
    check_state(state, "save_state(state, checkpoint_dir)")
    cluster = _cluster()
    if (current := current_session.current()) is not None:
        current.wait_for_save()  # what it commits is older than this
    if sync:
        sync_states([state])
    if checkpoint_dir is None or not (state.per_worker or cluster.is_chief):
        return
    directory = failure.check_directory(checkpoint_dir)
    files = _files_of(directory)
    with failure.translated(f"save {state!r}", directory):
        state_file.write(files, directory, cluster.worker, state)


def load_state(state: State) -> bool:
    """Loads one State from wherever it was saved last; every worker.

    With an open handler: from the commit that all workers restored, or the newest one
    since. Without one: from the newest whole commit in the directory that
    TFPREEMPT_CHECKPOINT_DIR names. A file of `save_state` in the same directory is
    taken instead if it is newer, or if the commit lacks the State. The first call of a
    process without a handler fetches the newest commit of the object store that
    TFPREEMPT_REMOTE_CHECKPOINT_DIR names, if it is newer than the directory's.

    Args:
        state: need not be registered.

    Returns:
        Whether there was something; if not, the State stays as it is.

    Raises:
        CheckpointDamagedError: something was saved, and none of it is whole.
        CheckpointError: the directory cannot be read; or the object store, and no
            commit is here.
        ConfigurationError: the State is none.
    """
    check_state(state, "load_state(state)")
    if (current := current_session.current()) and current.runs:
        current.wait_for_save()
        runs = reversed(list(current.runs))
        return any(each.load_state(state) for each in runs)
    directory = os.environ.get(_VARIABLE, "").strip()
    if not directory:
        return False
    if os.environ.get(REMOTE_VARIABLE) and not is_url(directory):
        directory = failure.check_directory(directory)  # what is fetched needs it
    return _alone_in(directory).load(state)


@functools.cache
def _warn_of_no_directory() -> None:
    _log.warning(
        "tfpreempt: save_all_states() saves nothing: no handler is open, and the "
        "environment variable %s is not set. `tfpreempt run --checkpoint-dir DIR` sets "
        "the variable; or set it to a directory that all workers share; or make a "
        "PreemptionCheckpointHandler first",
        _VARIABLE,
    )


def _alone_in(directory: str) -> StatesAlone:
    """Returns what a process has once for a directory.

    Args:
        directory: as the user named it.
    """
    named = os.environ.get(_VARIABLE, "").strip()
    is_copied = bool(named) and paths.absolute(named) == paths.absolute(directory)
    key = (paths.absolute(directory), _cluster())
    if key not in _alone:
        places = Places(directory=directory, max_to_keep=MAX_TO_KEEP)
        if is_copied:
            places = choose_places(None, directory, MAX_TO_KEEP)
        _alone[key] = StatesAlone(places, key[1])
    return _alone[key]


def _files_of(directory: str) -> Files:
    """The file operations in a directory that this process holds from now on.

    Raises:
        DirectoryInUseError: another program is at work in it.
        SaveError: the disk.
    """
    current = current_session.current()
    for run in current.runs if current else ():
        lease = run.directory.lease
        if lease is not None and layout.is_same(run.directory.path, directory):
            return FencedFiles(LocalFiles(directory), lease)
    return _alone_in(directory).hold()


def _cluster() -> Cluster:
    """The handlers' cluster, if there ever was one; else TF_CONFIG's."""
    current = current_session.current()
    return current.cluster if current else cluster_from_environment(os.environ)
