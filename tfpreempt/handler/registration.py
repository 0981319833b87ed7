"""Registration of a handler, or a fit, with the session of this process.

The workers agree on the directory and on the commit to restore. The new run watches the
notice sources of its config, and the notice key of TensorFlow's or JAX's service.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

from tfpreempt import errors
from tfpreempt.checkpoint.directory.retention import RetentionPolicy
from tfpreempt.checkpoint.lease.lease import Lease
from tfpreempt.checkpoint.lease.lease_timeouts import GRACE
from tfpreempt.checkpoint.mirror.mirror import Mirror
from tfpreempt.checkpoint.mirror.store_selection import choose_storage
from tfpreempt.checkpoint.restore.opening import adapter_of
from tfpreempt.core import frameworks, private_api
from tfpreempt.core.clock import SystemClock
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.deadline import remaining_after_delay
from tfpreempt.core.events import Notice
from tfpreempt.core.replay import read_replay
from tfpreempt.core.scratch import is_url
from tfpreempt.core.snapshot_memory import from_environment
from tfpreempt.handler.current_session import handling_notices_during_setup
from tfpreempt.handler.exit import describe
from tfpreempt.handler.restore_agreement import RestoreAgreement, agree
from tfpreempt.handler.run import Run
from tfpreempt.handler.session import Session
from tfpreempt.handler.single_client import NATIVE_DELAY, connection
from tfpreempt.handler.training_end import close_failed
from tfpreempt.notice.tensorflow_notice import NativeKeySource
from tfpreempt.notice.watcher import NoticeSourceConfig, Watcher
from tfpreempt.platforms.config import TerminationConfig
from tfpreempt.storage import paths

START_TIMEOUT = 300.0
"""Seconds allowed for the slowest worker to create its handler.

The wait for a lease, and the download of a commit, have additional time."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """The arguments of a handler, or of a fit, that concern checkpoints.

    Attributes:
        checkpoint_dir: path or URL of the directory for the commits; None if a
            CheckpointManager names the directory.
        restore: whether to restore the newest commit; False to start from scratch.
        policy: the rules by which commits stay.
        mirror_dir: location of the mirror; None: the value of TFPREEMPT_MIRROR_DIR.
        async_save: whether periodic saves are asynchronous, if possible.
    """

    checkpoint_dir: str | os.PathLike[str] | None
    restore: bool
    policy: RetentionPolicy
    mirror_dir: Any
    async_save: bool


@contextlib.contextmanager
def register(
    session: Session,
    checkpoint: Any,
    config: TerminationConfig,
    options: CheckpointOptions,
    *,
    amid: str = "",
    is_alive: Callable[[], bool] = lambda: True,
) -> Iterator[Run]:
    """Context manager: agrees with the other workers on a commit, and yields a new run.

    Every worker enters the context on its main thread. With several runs, all workers
    register the runs in the same order. Inside the context, signals are watched and
    hang detection is paused. The body must restore the commit, and call `Session.open`,
    after which the run participates in saves. If the body raises an error, the run is
    closed.

    Args:
        session: the session of this process.
        checkpoint: a Checkpoint, a CheckpointManager, or None for named States alone.
        config: configuration of the notices to watch, and of the exit.
        options: configuration of the checkpoints.
        amid: name of an activity, such as "model.fit", during which the state is
            incomplete even between steps; "" for a handler.
        is_alive: function that returns whether the run will reach more boundaries.

    Yields:
        The run.

    Raises:
        ConfigurationError: an argument cannot work, or another handler of this process
            is open in the directory.
        DirectoryLockedError: another program uses the directory.
        StorageNotSharedError: workers see different storage.
        CheckpointCorruptedError: there are commits, and no commit is intact.
        WorkerMismatchError: workers count different numbers of workers, or find
            different commits.
    """
    with (
        handling_notices_during_setup(config),
        session.activity.hang_detection_paused(),
    ):
        # Read the arguments: the counter of steps, the directory, the mirror.
        if frameworks.is_imported("tensorflow"):
            private_api.name_if_unseen("tensorflow")
        counter = None
        if checkpoint is not None:
            counter = adapter_of(checkpoint).attach_counter(checkpoint)
        directory = getattr(checkpoint, "directory", options.checkpoint_dir)
        saver = "save_fn" if config.save_fn else ""
        if hasattr(checkpoint, "directory"):
            saver = "CheckpointManager"
        if saver and is_url(directory or ""):
            raise _url_refused(saver, directory)
        if saver and options.policy.has_rules:
            raise errors.ConfigurationError(
                "keep_every= and best_by= cannot be used with a CheckpointManager or a "
                "save_fn, which deletes its checkpoints itself. Use the arguments of "
                "the manager (max_to_keep=, keep_checkpoint_every_n_hours=); or pass "
                "the tf.train.Checkpoint itself with checkpoint_dir="
            )
        _check_replay(None if saver else directory, session.cluster)
        storage = choose_storage(options.mirror_dir, directory, options.policy)
        cluster, connected = session.cluster, connection()
        lease = Lease(config.grace_seconds or GRACE) if cluster.is_chief else None
        mirror = None
        if storage.store is not None and cluster.is_chief:
            mirror = Mirror(
                storage.store,
                options.policy,
                lease=Lease(config.grace_seconds or GRACE),
                scratch=storage.scratch,
            )
        takes_snapshots = options.async_save and not (config.save_fn or connected)

        # Agree with the peers on the directory and the commit.
        session.saves.wait()  # a save in progress may still write to the directory
        start = RestoreAgreement(
            checkpoint=checkpoint,
            directory=storage.directory,
            cluster=cluster,
            restore=options.restore,
            policy=storage.policy,
            save_fn=config.save_fn,
            io_device=None if connected is None else connected.device,
            store=storage.store,
            mirror=mirror,
            lease=lease,
            memory=from_environment() if takes_snapshots else None,
            in_use=[
                each.directory.path
                for each in session.runs
                if not session.is_over(each)
            ],
        )
        # Count this start only now, after the checks of the arguments: the count must
        # be equal on every worker, and a check may fail on one worker only.
        session.start_count += 1
        keys = f"tfpreempt/{session.incarnation}/start/{session.start_count}"
        agreed = agree(start, session.executor.store, keys, START_TIMEOUT)

        # Watch for notices: the config's sources, the framework's key, a lost lease.
        on_notice = functools.partial(session.on_notice, agreed.token)
        for each in (lease, None if mirror is None else mirror.lease):
            if each is not None:
                each.on_loss(lambda reason: on_notice(_loss(cluster.worker, reason)))
        sources = list(config._notice_sources())
        if cluster.jobs or connected is not None:
            service = frameworks.adapter(cluster.framework, "coordination")
            native = NativeKeySource(
                service.read_native_notice,
                framework=cluster.framework,
                identity=None if connected is None else connected.notice_identity,
                is_alone=connected is not None,
            )
            grace = config.grace_seconds
            left = None if grace is None else remaining_after_delay(grace, NATIVE_DELAY)
            sources.append(NoticeSourceConfig(native, left))
        run = Run(
            config,
            agreed,
            session.coordinator.deadlines,
            Watcher(
                sources, cluster.worker, on_notice, find_more=config._source_finder()
            ),
            counter,
            amid=amid,
            async_save=options.async_save,
            is_alive=is_alive,
        )
        try:
            yield run
        except BaseException as error:
            # Close the run: the program may catch the error and start a new run.
            is_meant = isinstance(error, SystemExit)
            close_failed(session, run, "" if is_meant else describe(error), error)
            raise


def open_compile_cache(checkpoint_dir: Any, mirror_dir: Any, on_jax: bool) -> None:
    """Makes JAX keep compiled functions with the run, from now on.

    Does nothing in a replay, which leaves the cache of the run to the run.

    Args:
        checkpoint_dir: path or URL of the checkpoint directory.
        mirror_dir: location of the mirror; None: the value of TFPREEMPT_MIRROR_DIR.
        on_jax: whether the program trains on JAX.

    Raises:
        ConfigurationError: the program does not train on JAX, or an argument cannot
            work.
    """
    if read_replay() is not None:
        return
    if not on_jax:
        raise errors.ConfigurationError(
            "Got compile_cache=True in a program that does not train on JAX; expected "
            "that the program has imported jax, or keras with KERAS_BACKEND=jax, "
            "before this call. On TensorFlow, remove compile_cache"
        )
    storage = choose_storage(mirror_dir, checkpoint_dir, RetentionPolicy())
    adapter = frameworks.adapter("jax", "compile_cache")
    adapter.open_cache(paths.absolute(storage.directory), storage.store)


def _check_replay(directory: Any, cluster: Cluster) -> None:
    """Checks that a program in a replay trains in the copy, and alone.

    Args:
        directory: the user's argument; None if the program itself writes checkpoints.
        cluster: the workers of the run.

    Raises:
        ConfigurationError: the program would not train in the copy, or not alone.
    """
    if (replay := read_replay()) is None:
        return
    if cluster.num_workers > 1 or replay.path_in_copy(directory) != replay.copy:
        raise errors.ConfigurationError(
            f"Got checkpoint_dir={directory!r} and {cluster.num_workers} workers in a "
            "replay (`tfpreempt verify --replay`); expected one process with "
            f"checkpoint_dir={replay.directory!r}, without a CheckpointManager and a "
            "save_fn. Pass the command of the run in this directory"
        )


def _url_refused(given: str, checkpoint_dir: Any) -> errors.ConfigurationError:
    """Returns the error for a URL given with a CheckpointManager or a save_fn.

    Args:
        given: "CheckpointManager" or "save_fn".
        checkpoint_dir: the URL.
    """
    url = paths.without_secrets(os.fspath(checkpoint_dir))
    return errors.ConfigurationError(
        f"A {given} cannot be used with the URL {url!r}, because it writes files "
        f"itself. Pass a local directory, and mirror_dir={url!r}; or pass "
        f"the tf.train.Checkpoint itself with checkpoint_dir={url!r}, which restores "
        "checkpoints that a CheckpointManager has saved there."
    )


def _loss(worker: int, reason: str) -> Notice:
    """Returns the notice of a lost lease: all workers then exit without a commit."""
    return Notice(
        source="lease",
        worker=worker,
        grace_seconds=GRACE,
        received_at=SystemClock().monotonic(),
        detail=reason,
    )
