"""How a handler starts: one storage, one commit to restore, agreed on by all."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from tfpreempt import errors
from tfpreempt.checkpoint import layout, probe
from tfpreempt.checkpoint.catalog import Entry
from tfpreempt.checkpoint.remote import fetch
from tfpreempt.checkpoint.remote.chosen_store import chosen_store
from tfpreempt.checkpoint.remote.exchange import ShardExchange
from tfpreempt.checkpoint.remote.mirror import Mirror
from tfpreempt.checkpoint.remote.upload import Upload
from tfpreempt.checkpoint.saver import CheckpointSaver
from tfpreempt.checkpoint.writer import make_saver
from tfpreempt.coordination import rendezvous
from tfpreempt.coordination.memory import MemoryStore
from tfpreempt.coordination.store import KeyValueStore
from tfpreempt.core.cluster import Cluster
from tfpreempt.handler.commits import Commits
from tfpreempt.storage import paths
from tfpreempt.storage.files import LocalFiles

log = logging.getLogger(__name__)

FETCH_TIMEOUT = 3600.0  # more seconds for the others while one fetches a checkpoint

APART = "apart"  # what a worker says that does not see the chief's directory
NOT_SHARED = "DirectoryNotSharedError: "
DISAGREES = "WorkersDisagreeError: "


class Start:
    """Builds this worker's saver and finds the commit that all will restore.

    Args:
        given: the user's checkpoint, manager or None.
        own_directory: the user's checkpoint_dir.
        cluster: who the workers are.
        counter: the variable that holds the number of runs; None without a checkpoint.
        restore: False starts afresh.
        max_to_keep: commits to keep.
        save_fn: the user's, or None.
        io_device: where TensorFlow's files are written; None: where the variables are.
        remote_checkpoint_dir: the user's.
        in_use: directories of this process's other open handlers.
    """

    def __init__(
        self,
        given: Any,
        own_directory: str | os.PathLike[str] | None,
        *,
        cluster: Cluster,
        counter: Any,
        restore: bool,
        max_to_keep: int | None,
        save_fn: Callable[..., Any] | None,
        io_device: str | None = None,
        remote_checkpoint_dir: Any = None,
        in_use: Sequence[str] = (),
    ) -> None:
        self._saver: CheckpointSaver | None = None
        self._candidate: Entry | None = None
        self._skipped: list[str] = []
        self._counter = counter
        self._given = given
        self._own_directory = own_directory
        self._cluster = cluster
        self._restore = restore
        self._max_to_keep = max_to_keep
        self._save_fn = save_fn
        self._io_device = io_device
        self._own = getattr(given, "directory", own_directory)
        self._store = chosen_store(remote_checkpoint_dir, self._own)
        self._mirror: Mirror | None = None  # on the chief
        if self._store is not None and cluster.is_chief:
            self._mirror = Mirror(self._store, max_to_keep=max_to_keep)
        self._apart: set[int] = set()  # workers that don't see the chief's directory
        self._in_use = in_use

    def agree(self, store: KeyValueStore, prefix: str, timeout: float) -> Commits:
        """Runs the rendezvous; main thread of every worker, in the same order.

        With a `remote_checkpoint_dir` there are two: who sees the chief's directory is
        known before it is said what to restore, since the others fetch that.

        Args:
            store: the store.
            prefix: namespace of this start.
            timeout: seconds to wait for the slowest worker.

        Returns:
            What is there, for a member to restore.

        Raises:
            DirectoryNotSharedError: a worker sees other storage.
            CheckpointDamagedError: there are commits, and none is whole.
            WorkersDisagreeError: workers differ in world size or in what they find.
            ConfigurationError: the directory cannot work.
            WaitTimeoutError: a worker is missing.
        """
        if self._store is not None:
            if self._cluster.world > 1:
                place = f"{prefix}/place"
                found = self._ask(store, place, timeout, self._place, self._sees)
                self._apart = found[1]
            timeout += FETCH_TIMEOUT  # who is missing was missed in the first one
        plan, _ = self._ask(store, prefix, timeout, self._propose, self._check)
        assert self._saver is not None  # both ways to the plan have built it
        return Commits(
            self._saver,
            self._cluster,
            self._counter,
            candidate=self._candidate,
            token=str(plan["token"]),
            mirror=self._mirror,
            exchange=self._exchange(),
            skipped=self._skipped,
        )

    def _ask(
        self,
        store: KeyValueStore,
        prefix: str,
        timeout: float,
        propose: Callable[[], rendezvous.Plan],
        check: Callable[[rendezvous.Plan], str | None],
    ) -> tuple[rendezvous.Plan, set[int]]:
        """One rendezvous; returns the plan, and who is apart."""
        plans: list[rendezvous.Plan] = []

        def keep() -> rendezvous.Plan:
            plans.append(propose())
            return plans[0]

        try:
            plan, problems = rendezvous.agree(
                store,
                prefix,
                self._cluster.worker,
                self._cluster.world,
                propose=keep,
                check=check,
                timeout=timeout,
            )
        finally:
            for made in plans:
                probe.remove_probe(made["directory"], made["probe"])
        apart = {worker for worker, text in problems.items() if text == APART}
        raise_problems({w: text for w, text in problems.items() if w not in apart})
        return plan, apart

    def _place(self) -> rendezvous.Plan:
        directory = self._build(None).directory
        return {"directory": directory, "probe": probe.write_probe(directory)}

    def _sees(self, plan: rendezvous.Plan) -> str | None:
        if self._cluster.is_chief or self._shared_directory(plan) is not None:
            return None
        self._build(None)  # its own is to be a directory that can work
        return APART

    def _build(self, directory: str | None) -> CheckpointSaver:
        self._check_unused(directory or self._own)
        self._saver = make_saver(
            self._given,
            self._own_directory,
            cluster=self._cluster,
            max_to_keep=self._max_to_keep,
            save_fn=self._save_fn,
            chief_directory=directory,
            io_device=self._io_device,
            copies=self._mirror,
        )
        return self._saver

    def _check_unused(self, directory: str | os.PathLike[str] | None) -> None:
        mine = paths.absolute(directory) if directory else ""
        for other in self._in_use:
            if layout.is_same(other, mine):
                raise errors.ConfigurationError(
                    f"checkpoint_dir {mine!r}: another handler of this process is open "
                    f"in {other!r}, and the commits of the two would be taken for one "
                    "another's. Close that one first (its close(), or the end of its "
                    "`with` block), or give each a directory of its own"
                )

    def _propose(self) -> rendezvous.Plan:
        saver = self._build(None)
        saver.start()
        if self._restore:
            self._find_newest(saver)
            self._bring_before_all(saver)
        elif self._mirror is not None:
            self._mirror.look()
        return {
            "directory": saver.directory,
            "probe": probe.write_probe(saver.directory),
            "checkpoint": self._candidate.token if self._candidate else None,
            "world": self._cluster.world,
            "token": uuid.uuid4().hex[:12],
        }

    def _check(self, plan: rendezvous.Plan) -> str | None:
        if self._cluster.is_chief:
            return None
        if plan["world"] != self._cluster.world:
            return (
                f"{DISAGREES}worker 0 counts {plan['world']} workers, this one "
                f"{self._cluster.world}; give all workers the same TF_CONFIG cluster"
            )
        directory = self._shared_directory(plan)
        is_apart = self._cluster.worker in self._apart
        if directory is None and not is_apart:
            return (
                f"{NOT_SHARED}{self._own!r} here is not the same storage as worker 0's "
                f"{plan['directory']!r} (a file that worker 0 wrote there is not to be "
                "seen). Use a directory that all machines mount; or, where there is "
                "none, give all workers a remote_checkpoint_dir in object storage, by "
                "way of which each has what it needs on its own disk."
            )
        saver = self._build(None if is_apart else directory)
        if is_apart:
            saver.start()
        token = plan["checkpoint"]
        if token is not None:
            if is_apart and self._store is not None:
                self._candidate = saver.loader.fetch(self._store, token)
            else:
                self._candidate = saver.loader.find(token)
            if self._candidate is None:
                return (
                    f"{DISAGREES}worker 0 restores the commit {token} of "
                    f"{plan['directory']!r}, which this worker does not find there"
                    + (f" nor in {self._store.uri}" if is_apart and self._store else "")
                )
        return None

    def _shared_directory(self, plan: rendezvous.Plan) -> str | None:
        """Where this worker sees what worker 0 wrote; None if nowhere."""
        own = paths.absolute(self._own) if self._own else None
        for directory in (plan["directory"], own):
            if directory and probe.check_probe(directory, plan["probe"]):
                return str(directory)
        return None

    def _find_newest(self, saver: CheckpointSaver) -> None:
        lost: list[str] = []  # damaged commits of ours
        self._candidate = saver.loader.newest(self._skipped.append, lost.append)
        if self._mirror is not None and self._fetch_newer(saver, self._mirror):
            self._candidate = saver.loader.newest(self._skipped.append, lost.append)
        self._skipped += lost
        if lost and self._candidate is None:
            found = "; ".join(text.rstrip(".") for text in lost)
            raise errors.CheckpointDamagedError(
                f"no commit in {saver.directory} is whole ({found}), and a training "
                "that begins anew would write over them. Put the files back from a "
                "copy; or, to begin anew, move them away or pass restore=False"
            )
        instead = "an older commit is used" if self._candidate else "it is passed over"
        for problem in self._skipped:
            log.warning("tfpreempt: %s; %s", problem.rstrip("."), instead)

    def _exchange(self) -> ShardExchange | None:
        if self._store is None or not self._apart:
            return None
        worker = self._cluster.worker
        return ShardExchange(self._store, worker, self._apart, LocalFiles())

    def _fetch_newer(self, saver: CheckpointSaver, mirror: Mirror) -> bool:
        """Brings a newer commit from the store; whether there was one."""
        return fetch.look_for_newer(
            mirror,
            self._candidate,
            lambda: saver.loader.fetch_newer(
                mirror.store, self._candidate, self._skipped.append
            ),
            instead="pass restore=False",
        )

    def _bring_before_all(self, saver: CheckpointSaver) -> None:
        """Workers with other disks fetch what this one restores, so it must be there.

        The copy of the newest commit may have been cut short by the last preemption.
        """
        if self._store is None or self._candidate is None or not self._apart:
            return
        if self._candidate.manifest is None:
            raise errors.WorkersDisagreeError(
                f"{self._candidate.path!r}, the newest checkpoint, was not written by "
                "tfpreempt, and not all workers see this directory, so they cannot "
                "restore it. Put it on storage that all mount, for one start; or move "
                "it away"
            )
        Upload(self._store, self._candidate).run()


def raise_problems(problems: dict[int, str]) -> None:
    """Raises, on every worker, what any worker found wrong with the start.

    Args:
        problems: for each worker that has one, "ClassOfError: text".
    """
    if not problems:
        return
    name = problems[min(problems)].split(":")[0]
    kind = getattr(errors, name, errors.WorkersDisagreeError)
    text = "; ".join(
        f"worker {i}: {problem.removeprefix(f'{name}: ')}"
        for i, problem in problems.items()
    )
    raise kind(text)


def make_store(cluster: Cluster) -> KeyValueStore:
    """The store that this cluster's workers share."""
    if cluster.world == 1:
        return MemoryStore()
    from tfpreempt.coordination.tf_service import TensorFlowStore

    return TensorFlowStore(cluster.jobs)
