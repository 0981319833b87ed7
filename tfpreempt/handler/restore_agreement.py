"""The start of a handler or a fit: all workers agree on the commit to restore.

The workers also agree on the checkpoint directory. A worker without access to the
chief's directory downloads the commit from the mirror.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog, layout
from tfpreempt.checkpoint.directory.catalog import Entry
from tfpreempt.checkpoint.directory.retention import RetentionPolicy
from tfpreempt.checkpoint.lease.directory_lease import PACE, is_leased_by
from tfpreempt.checkpoint.lease.lease import Lease
from tfpreempt.checkpoint.lease.lease_timeouts import LONGEST_GRACE, MARGIN
from tfpreempt.checkpoint.mirror import import_commit
from tfpreempt.checkpoint.mirror.mirror import Mirror
from tfpreempt.checkpoint.mirror.shard_transfer import ShardTransfer
from tfpreempt.checkpoint.mirror.upload import Upload
from tfpreempt.checkpoint.restore.checkpoint_directory import (
    Directory,
    check_nothing_came,
)
from tfpreempt.checkpoint.restore.opening import open_directory
from tfpreempt.checkpoint.state.state import REGISTRY, StateRegistry
from tfpreempt.coordination import rendezvous
from tfpreempt.coordination.key_value_store import KeyValueStore
from tfpreempt.coordination.rendezvous import StartPlan
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.snapshot_memory import SnapshotMemory
from tfpreempt.handler.snapshots import (
    Snapshots,
    attempt_of,
    is_newer,
    open_snapshots,
)
from tfpreempt.storage import paths
from tfpreempt.storage.files import LocalFiles
from tfpreempt.storage.object_store import ObjectStore

log = logging.getLogger(__name__)

LEASE_TIMEOUT = LONGEST_GRACE + PACE.expiry + MARGIN
"""Additional seconds that workers wait for the chief, which may wait for a lease."""

FETCH_TIMEOUT = 3600.0  # additional seconds while a worker downloads a commit

APART = "apart"  # answer of a worker without access to the chief's directory
NO_MEMORY = "no memory"  # answer of a worker without memory for snapshots
RESTORE_FALSE = "pass restore=False"  # advice to start from scratch


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoreAgreement:
    """Input of this worker to the agreement at the start of a handler or a fit.

    Args:
        checkpoint: a Checkpoint, a CheckpointManager, or None for named States alone.
        directory: checkpoint directory of this worker, as given by the user.
        cluster: the workers, and the index of this worker.
        restore: whether to restore a commit; False to start from scratch.
        policy: the rules by which commits stay in the directory.
        save_fn: function of the program that saves in place of tfpreempt; None:
            tfpreempt saves.
        io_device: TensorFlow device that writes and reads files; None: the device of
            the variables.
        store: object store of the mirror; None without a mirror.
        mirror: the mirror, on the chief; None on the other workers.
        lease: lease of the directory, on the chief; None on the other workers.
        memory: memory that the supervisor lends to this worker for snapshots; None if
            this worker takes no snapshots.
        in_use: directories of the other open handlers of this process, which this
            handler must not use.
        registry: registry of the named States to save.
    """

    checkpoint: Any = None
    directory: str | os.PathLike[str] | None
    cluster: Cluster
    restore: bool = True
    policy: RetentionPolicy = dataclasses.field(default_factory=RetentionPolicy)
    save_fn: Callable[..., Any] | None = None
    io_device: str | None = None
    store: ObjectStore | None = None
    mirror: Mirror | None = None
    lease: Lease | None = None
    memory: SnapshotMemory | None = None
    in_use: Sequence[str] = ()
    registry: StateRegistry = REGISTRY


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreed:
    """The result of the agreement: the directory, and the commit to restore.

    Attributes:
        directory: the checkpoint directory, as seen by this worker.
        candidate: the commit or snapshot to restore; None to start from scratch.
        token: unique name of the start, equal on every worker; part of the names of
            saves.
        skipped: descriptions of commits that could not be restored (chief only).
        corrupt: error message if there are commits, but no commit can be restored
            (chief only); otherwise "".
        tier: location of the candidate: "memory", "disk" or "mirror".
        on_disk: newest intact commit of the directory; differs from the candidate only
            if the candidate is a snapshot.
        snapshots: snapshots of this worker in memory; None if at least one worker has
            no memory for snapshots.
        seconds: duration of the start, including the download of a commit.
    """

    directory: Directory
    candidate: Entry | None = None
    token: str = ""
    skipped: Sequence[str] = ()
    corrupt: str = ""
    tier: str = "disk"
    on_disk: Entry | None = None
    snapshots: Snapshots | None = None
    seconds: float = 0.0


def agree(
    start: RestoreAgreement,
    keys: KeyValueStore,
    prefix: str,
    timeout: float,
) -> Agreed:
    """Agrees with the peers on a directory, and on the commit to restore.

    Every worker calls the function on its main thread. With several handlers, all
    workers call in the same order. If an error is raised, the leases are released.

    Args:
        start: input of this worker.
        keys: the key-value store of the workers.
        prefix: namespace of the keys of this start.
        timeout: seconds to wait for the slowest worker.

    Raises:
        DirectoryLockedError: another program uses the directory.
        StorageNotSharedError: a worker sees other storage.
        CheckpointCorruptedError: there are commits, and no commit is intact.
        WorkerMismatchError: workers differ in the number of workers or in the commits
            found.
        ConfigurationError: the directory cannot work.
        PeerTimeoutError: a worker is missing.
    """
    began, cluster = time.monotonic(), start.cluster
    with contextlib.ExitStack() as undo:
        for held in (start.mirror, start.lease):
            if held is not None:
                undo.callback(held.release)

        # Workers without access to the chief's directory download the commit.
        apart: frozenset[int] = frozenset()
        if start.store is not None:
            if cluster.num_workers > 1:
                apart = _find_apart(start, keys, f"{prefix}/place", timeout)
            # Allow time for a download. All workers are present, because `_find_apart`
            # has waited for them, so the long timeout does not delay the error for a
            # missing worker.
            timeout += FETCH_TIMEOUT

        # The chief opens the directory and proposes a commit, which the peers look up.
        plan, agreed, problems = rendezvous.agree(
            keys,
            prefix,
            cluster,
            functools.partial(_propose, start, apart),
            functools.partial(_follow, start, apart),
            timeout,
            LEASE_TIMEOUT,
        )
        if problems:
            raise _as_error(problems)
        assert agreed is not None  # no worker has a problem

        # A snapshot in memory takes precedence if every worker has the snapshot.
        if (attempts := plan["snapshots"]) is not None:
            # Free the commit's tensors in memory, before a snapshot's tensors are read.
            agreed.directory.contents.free_read_ahead()
            memory = f"{prefix}/memory"
            agreed = agree_on_snapshot(agreed, attempts, keys, memory, cluster, timeout)
            if agreed.tier != "memory" and agreed.snapshots is not None:
                agreed.snapshots.directory.contents.free_read_ahead()
        if plan["corrupt"] and agreed.candidate is None:
            raise errors.CheckpointCorruptedError(plan["corrupt"])
        undo.pop_all()
    return dataclasses.replace(agreed, seconds=time.monotonic() - began)


def _find_apart(
    start: RestoreAgreement, keys: KeyValueStore, prefix: str, timeout: float
) -> frozenset[int]:
    """Returns the workers without access to the chief's directory.

    The arguments are as in `agree`, with a separate namespace of the keys.

    Raises:
        TfpreemptError: the directory of a worker cannot work.
    """

    def propose() -> tuple[StartPlan, None]:
        path = _open(start).path
        return {"directory": path, "lease": start.lease and start.lease.token}, None

    def look(plan: StartPlan) -> tuple[str | None, None]:
        if _shared_directory(start, plan) is not None:
            return None, None
        _open(start)  # raises an error if this worker's directory cannot work
        return APART, None

    _, _, answers = rendezvous.agree(
        keys, prefix, start.cluster, propose, look, timeout, LEASE_TIMEOUT
    )
    if problems := {i: text for i, text in answers.items() if text != APART}:
        raise _as_error(problems)
    return frozenset(answers)


def _open(
    start: RestoreAgreement,
    chief_directory: str | None = None,
    apart: frozenset[int] = frozenset(),
) -> Directory:
    """Opens the checkpoint directory on this worker; the chief acquires the lease.

    Args:
        start: input of this worker, see `agree`.
        chief_directory: local path of the chief's directory, to be opened in place of
            this worker's directory.
        apart: workers without access to the directory of the chief, which exchange
            files through the object store.
    """
    given = chief_directory or start.directory
    mine = paths.absolute(given) if given else ""
    for other in start.in_use:
        if layout.is_same(other, mine):
            raise errors.ConfigurationError(
                f"checkpoint_dir {mine!r}: another handler of this process is open "
                f"in {other!r}, and the commits of the two handlers would be mixed "
                "up. Close that handler first (by close(), or the end of its `with` "
                "block), or give each handler a separate directory"
            )
    exchange = None
    if start.store is not None and apart:
        worker, files = start.cluster.worker, LocalFiles(mine)
        exchange = ShardTransfer(start.store, worker, apart, files)
    opened = open_directory(
        start.checkpoint,
        start.directory,
        cluster=start.cluster,
        policy=start.policy,
        save_fn=start.save_fn,
        chief_directory=chief_directory,
        io_device=start.io_device,
        mirror=start.mirror,
        exchange=exchange,
        registry=start.registry,
        lease=start.lease,
    )
    if start.lease is not None:
        start.lease.acquire(opened.path)
    return opened


def _propose(
    start: RestoreAgreement, apart: frozenset[int]
) -> tuple[StartPlan, Agreed]:
    """Opens the directory on the chief, and proposes its newest intact commit.

    Returns the plan for the other workers, and the result of the chief.

    Args:
        start: input of this worker, see `agree`.
        apart: workers without access to the directory of the chief.
    """
    opened, mirror = _open(start, apart=apart), start.mirror
    check_nothing_came(opened.path)
    opened.start()
    copies = None
    if mirror is not None:
        copies = import_commit.settle(
            mirror, opened.files, adopts=start.restore, instead=RESTORE_FALSE
        )
        if mirror.scratch is not None:
            mirror.scratch.check_room(opened.contents.held_bytes())
    agreed, snapshots, attempts = Agreed(directory=opened), None, None
    if start.restore:
        agreed = _find_newest(start, opened, copies)
        if apart and mirror is not None and agreed.candidate is not None:
            upload_for_others(mirror, agreed.candidate)
    elif mirror is not None and copies is None:
        mirror.look()
    if start.memory is not None:
        snapshots = open_snapshots(
            start.checkpoint, start.memory, opened.path, start.cluster
        )
    if snapshots is not None:
        if not start.restore:
            snapshots.clear()
        highest = catalog.highest_sequence(catalog.scan(opened.path))
        attempts = [
            attempt_of(each)
            for each in snapshots.find()
            if is_newer(each, agreed.candidate, highest)
        ]
    if agreed.corrupt and not attempts:
        raise errors.CheckpointCorruptedError(agreed.corrupt)
    lease = start.lease.token if start.lease is not None else None
    token = (lease or uuid.uuid4().hex)[:12]
    agreed = dataclasses.replace(agreed, token=token, snapshots=snapshots)
    plan = {
        "directory": opened.path,
        "lease": lease,
        "checkpoint": agreed.candidate.token if agreed.candidate else None,
        "num_workers": start.cluster.num_workers,
        "token": token,
        "snapshots": attempts,
        "corrupt": agreed.corrupt,
    }
    return plan, agreed


def _find_newest(
    start: RestoreAgreement, opened: Directory, copies: Sequence[Entry] | None
) -> Agreed:
    """Finds the newest intact commit, in the directory or in the mirror.

    Args:
        start: input of this worker, see `agree`.
        opened: the directory.
        copies: the commits in the mirror; None if the mirror was not listed yet.
    """
    skipped: list[str] = []
    lost: list[str] = []  # descriptions of skipped commits that were intact before
    mirror, tier = start.mirror, "disk"
    commit = opened.newest(skipped.append, lost.append)
    if mirror is not None and import_commit.look_for_newer(
        mirror,
        commit,
        functools.partial(opened.fetch_newer, commit, skipped.append, lost.append),
        instead=RESTORE_FALSE,
        copies=copies,
    ):
        check_nothing_came(opened.path)  # check the fetched commits, too
        commit, tier = opened.newest(skipped.append, lost.append), "mirror"
    corrupt = ""
    if lost and commit is None:
        found = "; ".join(text.rstrip(".") for text in lost)
        locations = opened.path
        if mirror is not None:
            locations += f" or {mirror.store.uri}"
        corrupt = (
            f"no commit in {locations} is intact ({found}), and training from scratch "
            "would overwrite the commits. Put the files back from a copy. To start "
            f"from scratch, move the files away or {RESTORE_FALSE}"
        )
    instead = f"{commit.path!r} is used" if commit else "this checkpoint is skipped"
    for problem in (*skipped, *lost):
        log.warning("%s; %s", problem.rstrip("."), instead)
    return Agreed(
        directory=opened,
        candidate=commit,
        on_disk=commit,
        tier=tier,
        skipped=(*skipped, *lost),
        corrupt=corrupt,
    )


def upload_for_others(mirror: Mirror, commit: Entry) -> None:
    """Uploads the commit to restore, for workers that cannot read the directory.

    Needed if the last preemption has interrupted the upload of the newest commit.

    Args:
        mirror: the mirror, on the chief.
        commit: the commit to restore.

    Raises:
        WorkerMismatchError: the commit is a checkpoint written by TensorFlow alone.
        CheckpointError: the object store failed.
    """
    if commit.manifest is None:
        raise errors.WorkerMismatchError(
            f"{commit.path!r}, the newest checkpoint, was not written by tfpreempt, "
            "and not all workers can read this directory. For one start, put the "
            "checkpoint on storage that all workers mount; or move the checkpoint "
            "away"
        )
    Upload(mirror.store, commit, before_marker=mirror.record_pending_marker).run()


def _follow(
    start: RestoreAgreement, apart: frozenset[int], plan: StartPlan
) -> tuple[None, Agreed]:
    """Opens the directory on a worker other than the chief, and finds the commit.

    Args:
        start: input of this worker, see `agree`.
        apart: workers without access to the directory of the chief.
        plan: the plan of the chief, from `_propose`.

    Raises:
        TfpreemptError: this worker cannot follow the plan.
    """
    cluster, store = start.cluster, start.store
    if plan["num_workers"] != cluster.num_workers:
        raise errors.WorkerMismatchError(
            f"worker 0 counts {plan['num_workers']} workers, this one "
            f"{cluster.num_workers}; give all workers the same TF_CONFIG cluster"
        )
    is_apart = cluster.worker in apart
    directory = None if is_apart else _shared_directory(start, plan)
    if directory is None and not is_apart:
        raise errors.StorageNotSharedError(
            f"{start.directory!r} here is not the same storage as worker 0's "
            f"{plan['directory']!r} (the identity file written by worker 0 is "
            "missing). Use a directory that all machines mount. Without shared "
            "storage, give all workers a mirror_dir in object storage, from which "
            "each worker downloads the files it needs."
        )
    opened = _open(start, directory, apart)
    if is_apart:
        opened.start(is_sole=False)  # workers of this machine may share the directory
    token, commit, tier = plan["checkpoint"], None, "disk"
    if token is not None:
        if is_apart and store is not None:
            commit, tier = opened.fetch(store, token), "mirror"
        else:
            commit = opened.find(token)
        if commit is None:
            raise errors.WorkerMismatchError(
                f"worker 0 restores the commit {token} of {plan['directory']!r}, "
                "which this worker cannot find there"
                + (f" nor in {store.uri}" if is_apart and store else "")
            )
    snapshots = None
    if plan["snapshots"] is not None and start.memory is not None:
        snapshots = open_snapshots(start.checkpoint, start.memory, opened.path, cluster)
    return None, Agreed(
        directory=opened,
        candidate=commit,
        token=str(plan["token"]),
        tier=tier,
        on_disk=commit,
        snapshots=snapshots,
    )


def _shared_directory(start: RestoreAgreement, plan: StartPlan) -> str | None:
    """Returns the local path of the chief's directory; None without access.

    The lease of the chief identifies the directory, whose path may differ per machine.
    """
    own = paths.absolute(start.directory) if start.directory else ""
    for directory in (str(plan["directory"]), own):
        if directory and is_leased_by(directory, plan["lease"] or ""):
            return directory
    return None


def agree_on_snapshot(
    agreed: Agreed,
    attempts: Sequence[str],
    keys: KeyValueStore,
    prefix: str,
    cluster: Cluster,
    timeout: float,
) -> Agreed:
    """Agrees on the newest snapshot that is intact on every worker.

    Every worker publishes the names of its missing or corrupt snapshots, so the result
    is equal on every worker. If a worker has no memory for snapshots, no
    worker takes snapshots, because a snapshot needs every worker, like a save.

    Args:
        agreed: result of the start so far.
        attempts: names of the snapshots to choose from, newest first.
        keys: the key-value store of the workers.
        prefix: namespace of this agreement.
        cluster: the workers, and the index of this worker.
        timeout: seconds to wait for the slowest worker.

    Returns:
        `agreed`, with the snapshot as the candidate if there is one.
    """
    snapshots, mine = agreed.snapshots, NO_MEMORY
    if snapshots is not None:
        try:
            mine = "\n".join(snapshots.missing(attempts))
        except Exception as error:  # noqa: BLE001 - e.g. of a State; the peers wait
            mine = "\n".join(attempts)
            log.warning(
                "cannot verify the snapshots in memory, so the newest commit is "
                "restored: %s: %s",
                type(error).__name__,
                error,
            )
    plan, _, answers = rendezvous.agree(
        keys,
        prefix,
        cluster,
        lambda: ({"lacks": mine}, None),
        lambda plan: (mine or None, None),
        timeout,
    )
    texts = [str(plan["lacks"]), *answers.values()]
    if snapshots is None or NO_MEMORY in texts:
        return dataclasses.replace(agreed, snapshots=None)
    lacking = {attempt for text in texts for attempt in text.split("\n")}
    chosen = next((each for each in attempts if each not in lacking), None)
    if chosen is None:
        return agreed
    found = {attempt_of(each): each for each in snapshots.find()}
    snapshots.agreed = chosen
    return dataclasses.replace(agreed, candidate=found[chosen], tier="memory")


def _as_error(problems: dict[int, str]) -> Exception:
    """Returns a single error for the problems of all workers.

    Args:
        problems: by worker, a text such as "SaveError: ...". The first worker's text
            determines the class of the error.
    """
    name = problems[min(problems)].split(":")[0]
    kind: type[Exception] = getattr(errors, name, errors.WorkerMismatchError)
    text = "; ".join(
        f"worker {i}: {problem.removeprefix(f'{name}: ')}"
        for i, problem in problems.items()
    )
    return kind(text)
