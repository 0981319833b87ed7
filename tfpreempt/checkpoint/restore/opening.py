"""Opens the checkpoint directory of a user's checkpoint or checkpoint manager.

The code that depends on a framework (such as TensorFlow) is in a module for this
framework, the adapter.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, Protocol

from tfpreempt import errors
from tfpreempt.checkpoint.directory.retention import RetentionPolicy
from tfpreempt.checkpoint.lease.directory_lease import FencedFiles
from tfpreempt.checkpoint.lease.lease import Lease
from tfpreempt.checkpoint.mirror.mirror import Mirror
from tfpreempt.checkpoint.mirror.shard_transfer import ShardTransfer
from tfpreempt.checkpoint.restore.checkpoint_directory import Directory
from tfpreempt.checkpoint.state.contents import Contents, StagedSave
from tfpreempt.checkpoint.state.random_state import GlobalRngState
from tfpreempt.checkpoint.state.state import REGISTRY, StateRegistry
from tfpreempt.core import frameworks
from tfpreempt.core.clock import Clock, SystemClock
from tfpreempt.core.cluster import LOCAL, Cluster
from tfpreempt.storage import os_errors
from tfpreempt.storage.files import Files, LocalFiles


class Checkpoints(Protocol):
    """Interface to the checkpoints and managers of a framework, such as TensorFlow's
    tf.train.Checkpoint and CheckpointManager; the framework's adapter implements it."""

    def is_checkpoint(self, given: Any) -> bool:
        """Returns whether an object is a checkpoint or manager of this framework."""
        ...

    def check_directory(
        self, given: Any, checkpoint_dir: str | os.PathLike[str] | None
    ) -> None:
        """Checks that the user has named a directory for a checkpoint.

        Raises:
            ConfigurationError: `given` is a checkpoint (not a manager, which has a
                directory), and `checkpoint_dir` is missing.
        """
        ...

    def attach_counter(self, given: Any) -> Any:
        """Returns the variable that counts the calls of `run`; adds the variable to the
        checkpoint if the checkpoint has none."""
        ...

    def file_location(self, given: Any) -> tuple[str | None, str]:
        """Returns the directory of a manager, and the prefix of its file names.

        For a checkpoint, which has no directory, the first value is None.
        """
        ...

    def make_contents(
        self,
        given: Any,
        *,
        save_fn: Callable[..., Any] | None,
        cluster: Cluster,
        io_device: str | None,
        files: Files,
        is_shared: bool,
        is_second: bool,
    ) -> Contents:
        """Returns the object that reads and writes the part of a commit for which this
        framework is needed.

        The arguments are described in `open_directory`; `is_shared` is whether all
        workers have access to the chief's directory.
        """
        ...

    def saving(self) -> contextlib.AbstractContextManager[None]:
        """Returns the context that TensorFlow's own handler would enter around a call
        of the user's save_fn."""
        ...


def adapter_of(given: Any) -> Checkpoints:
    """Returns the adapter for a checkpoint or manager.

    Raises:
        ConfigurationError: the object belongs to no known framework.
    """
    known: list[Checkpoints] = frameworks.adapters("checkpoints")
    for adapter in known:
        if adapter.is_checkpoint(given):
            return adapter
    raise errors.ConfigurationError(
        f"Got checkpoint_or_checkpoint_manager={given!r} of type "
        f"{type(given).__name__}; expected a tf.train.Checkpoint with checkpoint_dir=, "
        "a tf.train.CheckpointManager, or None to save only named States. For arrays "
        "of JAX, create a tfpreempt.states.PyTreeState and pass None."
    )


class _FunctionContents(Contents):
    """Saves by a call of the user's save_fn on every worker.

    Used if the user passes a save_fn, but no checkpoint or manager.
    """

    can_be_async = False  # save_fn may read values that training would change

    def __init__(self, save_fn: Callable[..., Any], cluster: Cluster) -> None:
        self._save_fn = save_fn
        self._cluster = cluster

    def capture(self, save: StagedSave, *args: Any, **kwargs: Any) -> None:
        known: list[Checkpoints] = frameworks.adapters("checkpoints")
        with contextlib.ExitStack() as saving:
            for adapter in known:
                saving.enter_context(adapter.saving())
            path = self._save_fn(*args, **kwargs)
        # Create the directory after save_fn, not before: if creating it failed on this
        # worker, the other workers would wait in save_fn.
        save.create_staging()
        save.take_path(path)

    def needs_peers(self) -> bool:
        return self._cluster.num_workers > 1  # a call of save_fn may need every worker


def open_directory(
    checkpoint_or_manager: Any,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    *,
    cluster: Cluster = LOCAL,
    policy: RetentionPolicy | None = None,
    save_fn: Callable[..., Any] | None = None,
    chief_directory: str | None = None,
    io_device: str | None = None,
    mirror: Mirror | None = None,
    exchange: ShardTransfer | None = None,
    registry: StateRegistry = REGISTRY,
    files: Files | None = None,
    lease: Lease | None = None,
    clock: Clock | None = None,
    is_second: bool = False,
) -> Directory:
    """Returns the checkpoint directory of the user's checkpoint or manager.

    Args:
        checkpoint_or_manager: a tf.train.Checkpoint, a tf.train.CheckpointManager, or
            None to save only named States.
        checkpoint_dir: directory in which a Checkpoint is saved; not needed for a
            manager, which has a directory.
        cluster: the workers, and the index of this worker.
        policy: the rules by which commits by tfpreempt stay; None: the default rules.
            A manager decides how many of its checkpoints to keep.
        save_fn: function that saves the checkpoint, called on every worker; None:
            tfpreempt or the manager saves the checkpoint.
        chief_directory: path of the chief's directory, if the manager of this worker
            has a different directory.
        io_device: device on which TensorFlow writes and reads files; None: the device
            of the variables, perhaps on a remote machine.
        mirror: on the chief, the mirror of the directory; None without a mirror.
        exchange: transfers the files of workers without access to the chief's
            directory. None if every worker has access; in this case each worker writes
            a share of the tensors that are equal on all workers.
        registry: the named States to save.
        files: file system operations that make the changes; None: `LocalFiles`.
        lease: lease of the directory, which the chief must hold for a commit; None
            without a lease.
        clock: time source for measured durations.
        is_second: whether this is the second directory of a Checkpoint that is also
            saved in a first directory. If True, `save_counter` does not count the saves
            in this directory, the checks are not repeated, and asynchronous saves keep
            their copies of the tensors for the next save.

    Raises:
        ConfigurationError: an argument is invalid; the message has advice.
        UnsupportedVersionError: the installed TensorFlow lacks a private name that is
            needed for a manager.
    """
    given = checkpoint_or_manager
    framework = None if given is None else adapter_of(given)
    own, files_begin = None, None
    if framework is not None:
        own, files_begin = framework.file_location(given)
    path = os_errors.check_directory(
        chief_directory or own or checkpoint_dir,
        name=files_begin,
    )
    files = files or LocalFiles(path)
    if lease is not None:
        files = FencedFiles(files, lease)
    contents = Contents()
    if framework is not None:
        contents = framework.make_contents(
            given,
            save_fn=save_fn,
            cluster=cluster,
            io_device=io_device,
            files=files,
            is_shared=exchange is None,
            is_second=is_second,
        )
    elif save_fn is not None:
        contents = _FunctionContents(save_fn, cluster)
    return Directory(
        path=path,
        cluster=cluster,
        files=files,
        contents=contents,
        random_state=GlobalRngState(),
        registry=registry,
        retention=policy or RetentionPolicy(),
        mirror=mirror,
        lease=lease,
        exchange=exchange,
        clock=clock or SystemClock(),
    )
