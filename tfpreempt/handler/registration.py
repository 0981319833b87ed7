"""How a handler, or a fit, becomes a member of this process's session.

It agrees on a start, and listens to the config's sources, and TensorFlow's own key.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from tfpreempt import errors
from tfpreempt.checkpoint.lease.lease import Lease
from tfpreempt.checkpoint.lease.lease_timeouts import GRACE
from tfpreempt.checkpoint.mirror.mirror import Mirror
from tfpreempt.checkpoint.mirror.store_selection import choose_places
from tfpreempt.checkpoint.restore.opening import adapter_of, open_directory
from tfpreempt.core import frameworks
from tfpreempt.core.clock import SystemClock
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.deadline import after_travel
from tfpreempt.core.events import Notice
from tfpreempt.core.memory import lent_memory
from tfpreempt.core.scratch import is_url
from tfpreempt.handler.restore_agreement import Start
from tfpreempt.handler.run import Run
from tfpreempt.handler.session import Session
from tfpreempt.handler.single_client import NATIVE_DELAY, Connection, connection
from tfpreempt.handler.snapshots import KEPT, Snapshots, directory_for
from tfpreempt.notice.native import NativeKeySource
from tfpreempt.notice.watcher import WatchedSource, Watcher
from tfpreempt.platforms.config import TerminationConfig
from tfpreempt.storage import paths

log = logging.getLogger(__name__)

START_TIMEOUT = 300.0
"""Seconds that the slowest worker may need to make its handler, its waits apart."""


def admit(
    session: Session,
    checkpoint: Any,
    checkpoint_dir: str | os.PathLike[str] | None,
    config: TerminationConfig,
    *,
    restore: bool,
    max_to_keep: int | None,
    remote_checkpoint_dir: Any,
    async_save: bool = False,
    amid: str = "",
    is_alive: Callable[[], bool] = lambda: True,
) -> Run:
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
        async_save: see `Run`.
        amid: see `Run`.
        is_alive: see `Run`.

    Raises:
        ConfigurationError: something cannot work, or another handler of this process
            is open in the directory.
        DirectoryInUseError: another program is at work in it.
        DirectoryNotSharedError: workers see different storage.
        CheckpointDamagedError: there are commits, and none is whole.
        WorkersDisagreeError: workers differ.
    """
    began = time.monotonic()
    for framework in frameworks.adapters("checkpoints"):
        framework.name_if_untested()
    counter = None
    if checkpoint is not None:
        counter = adapter_of(checkpoint).attach_counter(checkpoint)
    cluster, connected = session.cluster, connection()
    named = getattr(checkpoint, "directory", checkpoint_dir)
    _check_layout(checkpoint, named, config)
    places = choose_places(remote_checkpoint_dir, named)
    own, store, scratch = places.directory, places.store, places.scratch
    mirror = None
    if store is not None and cluster.is_chief:
        mirror = Mirror(
            store,
            max_to_keep=max_to_keep,
            lease=Lease(config.grace_seconds),
            scratch=scratch,
        )
    lease = Lease(config.grace_seconds) if cluster.is_chief else None
    held = (lease, None if mirror is None else mirror.lease)
    leases = [each for each in held if each is not None]
    make = functools.partial(
        open_directory,
        checkpoint,
        checkpoint_dir if scratch is None else own,
        cluster=cluster,
        max_to_keep=places.max_to_keep(max_to_keep),
        save_fn=config.save_fn,
        io_device=None if connected is None else connected.device,
        mirror=mirror,
        lease=lease,
    )
    session.wait_for_save()  # its lease, and what it has staged, are another's soon
    start = Start(
        make,
        own,
        cluster,
        restore=restore,
        store=store,
        mirror=mirror,
        lease=lease,
        in_use=[
            each.directory.path for each in session.members if not session.is_over(each)
        ],
        make_snapshots=functools.partial(
            _make_snapshots,
            checkpoint,
            session.cluster,
            is_wanted=async_save and config.save_fn is None and connected is None,
        ),
    )
    agreed = start.agree(session.runtime.store, session.next_prefix(), START_TIMEOUT)
    hear = functools.partial(session.hear, agreed.token)
    for each in leases:
        each.on_loss(lambda reason: hear(_loss(cluster.worker, reason)))
    sources = list(config.watched_sources())
    if cluster.jobs or connected is not None:
        sources.append(_native_source(config, connected))
    return Run(
        config,
        agreed,
        session.coordinator.deadlines,
        Watcher(sources, cluster.worker, hear, find_more=config.finder()),
        counter,
        amid=amid,
        async_save=async_save,
        is_alive=is_alive,
        start_seconds=time.monotonic() - began,
    )


def _make_snapshots(
    given: Any, cluster: Cluster, checkpoint_dir: str, *, is_wanted: bool
) -> Snapshots | None:
    """This worker's snapshots, in the memory that was lent to it.

    Args:
        given: a Checkpoint, a CheckpointManager or None.
        cluster: who the workers are.
        checkpoint_dir: where their commits are.
        is_wanted: whether there may be any.
    """
    memory = lent_memory() if is_wanted else None
    if memory is None:
        return None
    try:
        directory = open_directory(
            getattr(given, "checkpoint", given),
            directory_for(memory, checkpoint_dir, cluster.worker),
            cluster=dataclasses.replace(cluster, saves_all=True),
            max_to_keep=KEPT,
            is_second=True,
        )
        directory.start()
    except errors.TfpreemptError as error:
        log.warning(
            "tfpreempt: there can be no snapshots, so a death without a notice costs "
            "what came after the last commit: %s",
            error,
        )
        return None
    return Snapshots(directory, memory.bytes, workers=memory.workers)


def _check_layout(
    checkpoint: Any, checkpoint_dir: Any, config: TerminationConfig
) -> None:
    """Refuses a URL with a CheckpointManager or a save_fn.

    Raises:
        ConfigurationError: a CheckpointManager, or a save_fn, with a URL.
    """
    is_managed = hasattr(checkpoint, "directory")
    if not (is_managed or config.save_fn) or not is_url(checkpoint_dir or ""):
        return
    given = "CheckpointManager" if is_managed else "save_fn"
    url = paths.without_secrets(os.fspath(checkpoint_dir))
    raise errors.ConfigurationError(
        f"A {given} cannot be used with the URL {url!r}, because it writes files "
        f"itself. Pass a local directory, and remote_checkpoint_dir={url!r}; or pass "
        f"the tf.train.Checkpoint itself with checkpoint_dir={url!r}, which restores "
        "checkpoints that a CheckpointManager has saved there."
    )


def _loss(worker: int, reason: str) -> Notice:
    """All workers leave together, as at a preemption, and nothing is committed."""
    return Notice(
        source="lease",
        worker=worker,
        grace_seconds=GRACE,
        received_at=SystemClock().monotonic(),
        detail=reason,
    )


def _native_source(
    config: TerminationConfig, connected: Connection | None
) -> WatchedSource:
    """TensorFlow's own key, by which SIGTERM to a remote worker is heard of."""
    service = frameworks.adapter("tensorflow", "coordination")
    grace = config.grace_seconds
    native = NativeKeySource(
        service.read_native_notice,
        identity=None if connected is None else connected.notice_identity,
        is_alone=connected is not None,
    )
    left = None if grace is None else after_travel(grace, NATIVE_DELAY)
    return WatchedSource(native, left)


def check_given(given: Any, checkpoint_dir: str | os.PathLike[str] | None) -> None:
    """Checks the first arguments of a handler.

    Args:
        given: a checkpoint of a framework, a manager of checkpoints, or None.
        checkpoint_dir: where a checkpoint is saved.

    Raises:
        ConfigurationError: `given` is none of these, or a checkpoint has no directory.
    """
    if given is not None:
        adapter_of(given).check_directory(given, checkpoint_dir)
