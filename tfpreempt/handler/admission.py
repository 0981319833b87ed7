"""How a handler, or a fit, becomes a member of this process's session."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfpreempt import errors
from tfpreempt.checkpoint.variables import out_of_scope
from tfpreempt.core.arguments import check_seconds
from tfpreempt.core.cluster import read_cluster
from tfpreempt.handler.member import Member
from tfpreempt.handler.remote_cluster import connection
from tfpreempt.handler.session import Session, session_for
from tfpreempt.handler.start import Start, make_store
from tfpreempt.handler.watching import make_watcher
from tfpreempt.platforms.config import TerminationConfig

COUNTER = "checkpointed_runs"
"""The name under which TensorFlow's own handler saves the number of runs."""

START_TIMEOUT = 300.0
"""Seconds that the slowest worker may need to make its handler."""


def find_session(cluster_resolver: Any, save_timeout: float) -> Session:
    """The session of this process, in the cluster that a resolver names.

    Raises:
        ConfigurationError: the resolver or the time-out cannot be one.
        UsageError: this process belongs to another cluster already.
    """
    cluster = read_cluster(cluster_resolver, drives_others=connection() is not None)
    timeout = check_seconds("save_timeout", save_timeout)
    session = session_for(cluster, lambda: make_store(cluster), timeout)
    session.come_back()
    return session


def admit(
    session: Session,
    checkpoint: Any,
    checkpoint_dir: str | os.PathLike[str] | None,
    config: TerminationConfig,
    *,
    restore: bool,
    max_to_keep: int | None,
    remote_checkpoint_dir: Any,
    amid: str = "",
    is_alive: Callable[[], bool] = lambda: True,
) -> Member:
    """Agrees with all workers on a commit; main thread of each, in the same order.

    The new member is to restore that, and takes part from `Session.open` on.

    Args:
        session: of this process.
        checkpoint: a Checkpoint, a CheckpointManager or None.
        checkpoint_dir: where a Checkpoint is saved.
        config: when and how to leave.
        restore: False starts afresh.
        max_to_keep: commits to keep.
        remote_checkpoint_dir: where they are copied to.
        amid: see `Member`.
        is_alive: see `Member`.

    Raises:
        ConfigurationError: something cannot work, or the directory is in use.
        DirectoryNotSharedError: workers see different storage.
        CheckpointDamagedError: there are commits, and none is whole.
        WorkersDisagreeError: workers differ.
    """
    check_checkpoint(checkpoint)
    cluster, connected = session.cluster, connection()
    start = Start(
        checkpoint,
        checkpoint_dir,
        cluster=cluster,
        counter=attach_counters(checkpoint),
        restore=restore,
        max_to_keep=max_to_keep,
        save_fn=config.save_fn,
        io_device=None if connected is None else connected.device,
        remote_checkpoint_dir=remote_checkpoint_dir,
        in_use=session.in_use(),
    )
    commits = start.agree(session.store, session.next_prefix(), START_TIMEOUT)
    hear = functools.partial(session.hear, commits.token)
    return Member(
        config,
        cluster,
        connected,
        commits,
        session.coordinator.deadlines,
        make_watcher(config, cluster, hear, connected),
        amid=amid,
        is_alive=is_alive,
    )


def check_checkpoint(given: Any) -> None:
    """Refuses what is neither a checkpoint, a manager, nor None."""
    kinds = (tf.train.Checkpoint, tf.train.CheckpointManager)
    if given is not None and not isinstance(given, kinds):
        raise errors.ConfigurationError(
            f"checkpoint_or_checkpoint_manager is {given!r}; expected a "
            "tf.train.Checkpoint with checkpoint_dir, a tf.train.CheckpointManager, or "
            "None for named States alone"
        )


def attach_counters(given: Any) -> Any:
    """Attaches the variables that a save counts by to the user's checkpoint.

    Args:
        given: a tf.train.Checkpoint, a CheckpointManager, or None.

    Returns:
        The variable that counts runs, int64; None where there is no checkpoint.
    """
    checkpoint = getattr(given, "checkpoint", given)
    if checkpoint is None:
        return None
    out_of_scope(lambda: checkpoint.save_counter)
    if not hasattr(checkpoint, COUNTER):
        counter = out_of_scope(
            lambda: tf.Variable(0, dtype=tf.int64, trainable=False, name=COUNTER)
        )
        setattr(checkpoint, COUNTER, counter)
    return getattr(checkpoint, COUNTER)
