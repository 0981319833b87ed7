"""The functions for users: save_all_states(), save_state() and load_state().

With an open handler, States are saved with the handler's commits, and loaded from the
commit that the handler has restored. Without a handler, the functions use the directory
in TFPREEMPT_CHECKPOINT_DIR, and need no TensorFlow.
"""

from __future__ import annotations

import functools
import logging
import os

from tfpreempt import errors
from tfpreempt.checkpoint.directory import layout
from tfpreempt.checkpoint.directory.retention import RetentionPolicy
from tfpreempt.checkpoint.lease.directory_lease import FencedFiles
from tfpreempt.checkpoint.mirror.store_selection import (
    DIRECTORY_VARIABLE,
    REMOTE_VARIABLE,
    RunStorage,
    choose_storage,
)
from tfpreempt.checkpoint.state import state_file
from tfpreempt.checkpoint.state.state import REGISTRY, State, check_state, sync_states
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.log_output import show_log_lines
from tfpreempt.core.replay import read_replay
from tfpreempt.core.scratch import is_url
from tfpreempt.handler import current_session
from tfpreempt.states.standalone import StandaloneStates
from tfpreempt.storage import os_errors, paths
from tfpreempt.storage.files import Files, LocalFiles

_log = logging.getLogger(__name__)

_alone: dict[tuple[str, Cluster], StandaloneStates] = {}  # keys: directory, cluster


def save_all_states() -> str | None:
    """Commits the registered States now.

    Every worker must call the function at the same point of the program. `sync()` of
    the States is called on every worker, in name order.

    With an open handler, the function calls the handler's `save()`: one commit holds
    the States and the TensorFlow checkpoint. (With several handlers, every handler
    commits.)

    Without a handler, the chief commits only the States, in the directory in
    TFPREEMPT_CHECKPOINT_DIR. The number of workers comes from `jax.distributed` or
    TF_CONFIG; with several workers, States with per_worker=True need a handler. If
    TFPREEMPT_MIRROR_DIR is set, every commit is uploaded to that mirror in the
    background, and the first call of a process imports a newer commit from the mirror.

    Without a handler and without TFPREEMPT_CHECKPOINT_DIR nothing is saved: the
    function only calls `sync()`, and logs a warning once per process.

    Returns:
        On the chief the commit's directory; the checkpoint directory if a
        CheckpointManager chooses the names of the files. On the other workers the
        checkpoint directory, where the chief may still be writing the commit. None if
        nothing was saved.

    Raises:
        SaveError: the commit failed, and earlier commits are intact; or a worker did
            not take part in the save.
        CheckpointError: the object store cannot be read, and there is no local commit.
        ConfigurationError: the directory cannot be used.
        UsageError: no State is registered, and there is no handler; or the function is
            called inside `run()`.
    """
    if (current := current_session.current()) and current.runs:
        return [current.save(run) for run in current.runs][-1]
    directory = os.environ.get(DIRECTORY_VARIABLE, "").strip()
    if not directory:
        _warn_of_no_directory()
        sync_states(REGISTRY.in_order())
        return None
    return _alone_in(directory).save()


def save_state(
    state: State, checkpoint_dir: str | os.PathLike[str] | None, sync: bool = True
) -> None:
    """Saves one State in its own file, outside of any commit.

    Every worker must call the function. The chief writes `states/<name>.state` in the
    directory; with `per_worker=True`, every worker writes `worker-<i>/<name>.state`.
    The file is replaced atomically and durably. The chief acquires and keeps the lease
    of the directory, unless an open handler has the lease. Without the lease, another
    run could write the file, and `load_state` would load the value as the newest value
    of this run.

    Args:
        state: State to save; need not be registered.
        checkpoint_dir: directory of the file, created if missing. With None the
            function only calls `sync()`.
        sync: whether to call the State's `sync()`, on every worker.

    Raises:
        SaveError: the disk failed; the old file is intact.
        DirectoryLockedError: another program uses the directory.
        ConfigurationError: the directory cannot be used, or `state` is not a State.
        UsageError: the State has arrays that are divided among the workers.
    """
    check_state(state, "save_state(state, checkpoint_dir)")
    if state._needs_every_worker():
        raise errors.UsageError(
            f"save_state() got {state!r}, which has arrays that are divided among the "
            "workers, so no single file has them. Save by a "
            "PreemptionCheckpointHandler, or by save_all_states()."
        )
    cluster = current_session.current_cluster()
    if (current := current_session.current()) is not None:
        # Otherwise an asynchronous commit with an older value could end after the save.
        current.wait_for_save()
    if sync:
        sync_states([state])
    if checkpoint_dir is None or not (state.per_worker or cluster.is_chief):
        return
    if (replay := read_replay()) is not None:
        checkpoint_dir = replay.path_in_copy(checkpoint_dir) or checkpoint_dir
    directory = os_errors.check_directory(checkpoint_dir)
    files = _files_of(directory)
    with os_errors.translated(f"save {state!r}", directory):
        state_file.write(files, directory, cluster.worker, state)


def load_state(state: State) -> bool:
    """Loads the newest saved value of a State.

    Every worker must call the function. With an open handler, the value comes from the
    commit that the workers have restored, or from a later commit of the run. Without a
    handler, the value comes from the newest intact commit in the directory in
    TFPREEMPT_CHECKPOINT_DIR. A file that `save_state` has written in the directory
    takes precedence over the commit if the file is newer, or if the commit lacks the
    State.

    Without a handler, and with TFPREEMPT_MIRROR_DIR, the first call of a process
    imports the newest commit from that mirror, if newer than the directory's commits.

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
        return any(each.states.load(state) for each in runs)
    directory = os.environ.get(DIRECTORY_VARIABLE, "").strip()
    if not directory:
        return False
    if os.environ.get(REMOTE_VARIABLE) and not is_url(directory):
        # A commit can be imported only into an existing directory.
        directory = os_errors.check_directory(directory)
    return _alone_in(directory).load(state)


@functools.cache
def _warn_of_no_directory() -> None:
    show_log_lines()
    _log.warning(
        "save_all_states() saves nothing, because no handler is open and the "
        "environment variable %s is not set. Start the program with `tfpreempt run "
        "--checkpoint-dir DIR`; or set the variable to a directory that all workers "
        "share; or create a PreemptionCheckpointHandler first",
        DIRECTORY_VARIABLE,
    )


def _alone_in(directory: str) -> StandaloneStates:
    """Returns the `StandaloneStates` of a directory; a process has one per directory.

    Only the directory in TFPREEMPT_CHECKPOINT_DIR has a mirror.

    Args:
        directory: path of the checkpoint directory, as given by the user.
    """
    named = os.environ.get(DIRECTORY_VARIABLE, "").strip()
    is_copied = bool(named) and paths.absolute(named) == paths.absolute(directory)
    key = (paths.absolute(directory), current_session.current_cluster())
    if key not in _alone:
        storage = RunStorage(directory=directory, policy=RetentionPolicy())
        if is_copied:
            storage = choose_storage(None, directory, RetentionPolicy())
        _alone[key] = StandaloneStates(storage, key[1])
    return _alone[key]


def _files_of(directory: str) -> Files:
    """Returns file operations on a directory, guarded by the lease of the directory.

    An open handler in the directory has the lease already. Otherwise the chief acquires
    the lease, and the other workers need none.

    Args:
        directory: the checkpoint directory.

    Raises:
        DirectoryLockedError: another program uses the directory.
        SaveError: the disk failed.
    """
    current = current_session.current()
    for run in current.runs if current else ():
        lease = run.directory.lease
        if lease is not None and layout.is_same(run.directory.path, directory):
            return FencedFiles(LocalFiles(directory), lease)
    return _alone_in(directory).hold()
