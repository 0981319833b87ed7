"""save_all_states(), save_state() and load_state(), the functions for programs.

With an open handler, the functions use the handler's saves and its restored commit.
Without a handler, the functions use the directory named by TFPREEMPT_CHECKPOINT_DIR,
and need no TensorFlow.
"""

from __future__ import annotations

import functools
import logging
import os

from tfpreempt.checkpoint.directory import layout
from tfpreempt.checkpoint.lease.directory_lease import FencedFiles
from tfpreempt.checkpoint.mirror.store_selection import (
    REMOTE_VARIABLE,
    RunStorage,
    choose_storage,
)
from tfpreempt.checkpoint.state import state_file
from tfpreempt.checkpoint.state.state import REGISTRY, State, check_state, sync_states
from tfpreempt.core.cluster import Cluster, cluster_from_environment
from tfpreempt.core.scratch import is_url
from tfpreempt.handler import current_session
from tfpreempt.states.standalone import StandaloneStates
from tfpreempt.states.standalone_mirror import MAX_TO_KEEP
from tfpreempt.storage import os_errors, paths
from tfpreempt.storage.files import Files, LocalFiles

_log = logging.getLogger(__name__)

_VARIABLE = "TFPREEMPT_CHECKPOINT_DIR"

_alone: dict[tuple[str, Cluster], StandaloneStates] = {}  # by directory and cluster


def save_all_states() -> str | None:
    """Commits the registered States now; every worker calls it at the same point.

    `sync()` is called on every worker, in name order. With an open handler the function
    is the handler's `save()`: the same commit holds the States and the TensorFlow
    checkpoint. (With several handlers, each handler commits.)

    Without a handler, the chief commits the States alone, in the directory named by
    TFPREEMPT_CHECKPOINT_DIR. The workers are the workers of TF_CONFIG; with several
    workers, States with per_worker=True need a handler. If
    TFPREEMPT_MIRROR_DIR is set, each commit is uploaded to that mirror in
    the background, and the first call of a process looks in the mirror for a newer
    commit.

    Without a handler and without a directory nothing is saved: the function only calls
    `sync()`, and logs one warning per process.

    Returns:
        The commit's directory on the chief. The checkpoint directory on the other
        workers, where the commit may be incomplete yet, and for the flat files of a
        CheckpointManager. None if there is no directory.

    Raises:
        SaveError: the commit failed, and earlier commits are intact; or a worker did
            not take part.
        CheckpointError: the object store cannot be read, and there is no local commit.
        ConfigurationError: the directory is unusable.
        UsageError: there is no State and no handler; or the call is inside `run()`.
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
    """Saves a State in its own file, outside of any commit; call it on every worker.

    The file is replaced atomically and durably. The chief alone writes
    `states/<name>.state` in the directory; for a State per worker, each worker writes
    `worker-<i>/<name>.state`. Afterwards the chief holds the lease of the directory, as
    after `save_all_states`. Otherwise `load_state` might take the file of another run
    for a newer file of this run.

    Args:
        state: State to save; need not be registered.
        checkpoint_dir: directory of the file, created if missing; None saves nothing
            and only calls `sync()`.
        sync: whether to call the State's `sync()`, on every worker.

    Raises:
        SaveError: a disk error; the old file is intact.
        DirectoryLockedError: another program uses the directory.
        ConfigurationError: the directory is unusable, or `state` is not a State.
    """
    check_state(state, "save_state(state, checkpoint_dir)")
    cluster = _cluster()
    if (current := current_session.current()) is not None:
        # An asynchronous commit under way is older than this save.
        current.wait_for_save()
    if sync:
        sync_states([state])
    if checkpoint_dir is None or not (state.per_worker or cluster.is_chief):
        return
    directory = os_errors.check_directory(checkpoint_dir)
    files = _files_of(directory)
    with os_errors.translated(f"save {state!r}", directory):
        state_file.write(files, directory, cluster.worker, state)


def load_state(state: State) -> bool:
    """Loads the newest saved value of a State; call it on every worker.

    With an open handler, the value comes from the commit restored by the workers, or
    the newest commit since. Without a handler, the value comes from the newest intact
    commit in the directory named by TFPREEMPT_CHECKPOINT_DIR. A file of `save_state` in
    the same directory is loaded instead if the file is newer, or if the commit lacks
    the State. Without a handler, the first call of a process fetches the newest commit
    from the mirror named by TFPREEMPT_MIRROR_DIR, if that commit is newer
    than the directory's commits.

    Args:
        state: State to load; need not be registered.

    Returns:
        Whether a saved value was found; if not, the State does not change.

    Raises:
        CheckpointCorruptedError: no saved value is intact.
        CheckpointError: the directory cannot be read; or the object store cannot be
            read, and there is no local commit.
        ConfigurationError: `state` is not a State.
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
        # A fetched commit needs an existing directory.
        directory = os_errors.check_directory(directory)
    return _alone_in(directory).load(state)


@functools.cache
def _warn_of_no_directory() -> None:
    _log.warning(
        "save_all_states() saves nothing: no handler is open, and the "
        "environment variable %s is not set. `tfpreempt run --checkpoint-dir DIR` sets "
        "the variable; or set it to a directory that all workers share; or make a "
        "PreemptionCheckpointHandler first",
        _VARIABLE,
    )


def _alone_in(directory: str) -> StandaloneStates:
    """Returns the `StandaloneStates` of a directory; a process has one per directory.

    Args:
        directory: directory as named by the user.
    """
    named = os.environ.get(_VARIABLE, "").strip()
    is_copied = bool(named) and paths.absolute(named) == paths.absolute(directory)
    key = (paths.absolute(directory), _cluster())
    if key not in _alone:
        storage = RunStorage(directory=directory, max_to_keep=MAX_TO_KEEP)
        if is_copied:
            storage = choose_storage(None, directory, MAX_TO_KEEP)
        _alone[key] = StandaloneStates(storage, key[1])
    return _alone[key]


def _files_of(directory: str) -> Files:
    """Takes the lease of a directory, and returns the file operations in the directory.

    Args:
        directory: the checkpoint directory.

    Raises:
        DirectoryLockedError: another program uses the directory.
        SaveError: a disk error.
    """
    current = current_session.current()
    for run in current.runs if current else ():
        lease = run.directory.lease
        if lease is not None and layout.is_same(run.directory.path, directory):
            return FencedFiles(LocalFiles(directory), lease)
    return _alone_in(directory).hold()


def _cluster() -> Cluster:
    """Returns the cluster of the handlers, if any existed; else TF_CONFIG's cluster."""
    current = current_session.current()
    return current.cluster if current else cluster_from_environment(os.environ)
