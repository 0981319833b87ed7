"""How a handler starts: one storage, one commit to restore, agreed on by all."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import uuid
from collections.abc import Callable, Sequence

from tfpreempt import errors
from tfpreempt.checkpoint.directory import catalog, layout
from tfpreempt.checkpoint.directory.catalog import Entry
from tfpreempt.checkpoint.lease.directory_lease import PACE, is_leased_by
from tfpreempt.checkpoint.lease.lease import Lease
from tfpreempt.checkpoint.lease.lease_timeouts import LONGEST_GRACE, MARGIN
from tfpreempt.checkpoint.mirror import import_commit
from tfpreempt.checkpoint.mirror.mirror import Mirror
from tfpreempt.checkpoint.mirror.shard_transfer import ShardExchange
from tfpreempt.checkpoint.mirror.upload import Upload
from tfpreempt.checkpoint.restore.checkpoint_directory import Directory
from tfpreempt.coordination import rendezvous
from tfpreempt.coordination.store import KeyValueStore
from tfpreempt.core.cluster import Cluster
from tfpreempt.handler.snapshots import Snapshots, attempt_of, is_newer
from tfpreempt.storage import paths
from tfpreempt.storage.files import LocalFiles
from tfpreempt.storage.interface import ObjectStore

log = logging.getLogger(__name__)

LEASE_TIMEOUT = LONGEST_GRACE + PACE.expiry + MARGIN
"""More seconds for the others while the chief waits for the directory's lease."""

FETCH_TIMEOUT = 3600.0  # more seconds for the others while one fetches a checkpoint

APART = "apart"  # what a worker says that does not see the chief's directory
NO_MEMORY = "no memory"  # what a worker says that can have no snapshots
NOT_SHARED = "DirectoryNotSharedError: "
DISAGREES = "WorkersDisagreeError: "


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agreed:
    """The result of a start.

    Attributes:
        directory: the checkpoint directory, as this worker sees it.
        candidate: the commit that all workers restore; None to start from scratch.
        token: unique to this start, equal on all workers; begins the names of saves.
        skipped: what was found corrupt (chief only).
        tier: where the candidate is: "memory", "disk" or "bucket".
        on_disk: the newest commit of the directory, if the candidate is a snapshot.
        snapshots: of this worker in memory, if all workers have memory for any.
    """

    directory: Directory
    candidate: Entry | None
    token: str
    skipped: Sequence[str] = ()
    tier: str = "disk"
    on_disk: Entry | None = None
    snapshots: Snapshots | None = None


@dataclasses.dataclass(eq=False)
class Start:
    """Opens this worker's directory and finds the commit that all will restore.

    Args:
        make: opens this worker's directory; `chief_directory` names it, where
            it is not this worker's own, and `is_shared` says whether all see it.
        own: this worker's directory, as the user gave it.
        cluster: who the workers are.
        restore: False starts afresh.
        store: where commits are copied to; None without one.
        mirror: on the chief, what copies them.
        lease: on the chief, of the directory; taken before anything is touched there.
        in_use: directories of this process's other open handlers.
        make_snapshots: of this worker's snapshots, given its directory; None where it
            can have none.
    """

    make: Callable[..., Directory]
    own: str | os.PathLike[str] | None
    cluster: Cluster
    restore: bool = True
    store: ObjectStore | None = None
    mirror: Mirror | None = None
    lease: Lease | None = None
    in_use: Sequence[str] = ()
    make_snapshots: Callable[[str], Snapshots | None] = lambda directory: None
    _built: Directory | None = None
    _candidate: Entry | None = None
    _tier: str = "disk"
    _damaged: str = ""  # on the chief: why nothing on the disk can be restored
    _snapshots: Snapshots | None = None
    _skipped: list[str] = dataclasses.field(default_factory=list)
    _apart: set[int] = dataclasses.field(default_factory=set)  # see another directory

    def agree(
        self,
        store: KeyValueStore,
        prefix: str,
        timeout: float,
        lease_timeout: float = LEASE_TIMEOUT,
    ) -> Agreed:
        """Runs the rendezvous; main thread of every worker, in the same order.

        With a `remote_checkpoint_dir` there are two: who sees the chief's directory is
        known before it is said what to restore, since the others fetch that.

        Args:
            store: the store.
            prefix: namespace of this start.
            timeout: seconds to wait for the slowest worker.
            lease_timeout: more seconds for a chief that waits for the lease.

        Returns:
            What all workers have agreed on.

        Raises:
            DirectoryInUseError: another program is at work in the directory.
            DirectoryNotSharedError: a worker sees other storage.
            CheckpointDamagedError: there are commits, and none is whole.
            WorkersDisagreeError: workers differ in world size or in what they find.
            ConfigurationError: the directory cannot work.
            WaitTimeoutError: a worker is missing.
        """
        ask = functools.partial(self._ask, store, proposing=lease_timeout)
        try:
            if self.store is not None:
                if self.cluster.world > 1:
                    ask(f"{prefix}/place", timeout, self._place, self._sees)
                timeout += FETCH_TIMEOUT  # who is missing was missed in the first one
            plan = ask(prefix, timeout, self._propose, self._check)
            on_disk = self._candidate
            if plan["snapshots"] is not None:
                attempts = plan["snapshots"]
                self._agree_on_memory(store, f"{prefix}/memory", attempts, timeout)
            if plan["damaged"] and self._candidate is None:
                raise errors.CheckpointDamagedError(plan["damaged"])
        except BaseException:
            if self.lease is not None:
                self.lease.release()
            if self.mirror is not None:
                self.mirror.release()
            raise
        assert self._built is not None  # both ways to the plan have built it
        if self.store is not None and self._apart:
            worker, files = self.cluster.worker, LocalFiles(self._built.path)
            self._built.exchange = ShardExchange(self.store, worker, self._apart, files)
        return Agreed(
            directory=self._built,
            candidate=self._candidate,
            token=str(plan["token"]),
            skipped=self._skipped,
            tier=self._tier,
            on_disk=on_disk,
            snapshots=self._snapshots,
        )

    def _ask(
        self,
        store: KeyValueStore,
        prefix: str,
        timeout: float,
        propose: Callable[[], rendezvous.Plan],
        check: Callable[[rendezvous.Plan], str | None],
        *,
        proposing: float,
    ) -> rendezvous.Plan:
        """One rendezvous; all workers raise what any of them found wrong."""
        plan, problems = rendezvous.agree(
            store, prefix, self.cluster, propose, check, timeout, proposing
        )
        self._apart |= {worker for worker, text in problems.items() if text == APART}
        if wrong := {w: text for w, text in problems.items() if text != APART}:
            raise _as_error(wrong)
        return plan

    def _place(self) -> rendezvous.Plan:
        return self._leased(self._build(None).path)

    def _leased(self, directory: str) -> rendezvous.Plan:
        """The directory, and the lease by which other workers know it again."""
        lease = self.lease.token if self.lease is not None else None
        return {"directory": directory, "lease": lease or ""}

    def _sees(self, plan: rendezvous.Plan) -> str | None:
        if self.cluster.is_chief or self._shared_directory(plan) is not None:
            return None
        self._build(None)  # its own is to be a directory that can work
        return APART

    def _build(self, directory: str | None) -> Directory:
        mine = directory or self.own
        mine = paths.absolute(mine) if mine else ""
        for other in self.in_use:
            if layout.is_same(other, mine):
                raise errors.ConfigurationError(
                    f"checkpoint_dir {mine!r}: another handler of this process is open "
                    f"in {other!r}, and the commits of the two would be taken for one "
                    "another's. Close that one first (its close(), or the end of its "
                    "`with` block), or give each a directory of its own"
                )
        self._built = self.make(chief_directory=directory, is_shared=not self._apart)
        if self.lease is not None:
            self.lease.acquire(self._built.path)
        return self._built

    def _propose(self) -> rendezvous.Plan:
        opened = self._build(None)
        opened.check_nothing_came()
        opened.start()
        if self.mirror is not None:
            instead = "pass restore=False"
            import_commit.settle(
                self.mirror, opened.files, adopts=self.restore, instead=instead
            )
            if self.mirror.scratch is not None:
                self.mirror.scratch.check_room(opened.contents.held_bytes())
        if self.restore:
            self._find_newest(opened)
            if self._apart and self.store is not None:
                self._bring_before_all(self.store)
        elif self.mirror is not None:
            self.mirror.look()
        offered = self._offered(opened.path)
        if self._damaged and not offered:
            raise errors.CheckpointDamagedError(self._damaged)
        plan = self._leased(opened.path)
        return plan | {
            "checkpoint": self._candidate.token if self._candidate else None,
            "world": self.cluster.world,
            "token": (plan["lease"] or uuid.uuid4().hex)[:12],
            "snapshots": offered,
            "damaged": self._damaged,
        }

    def _offered(self, directory: str) -> list[str] | None:
        """The snapshots that may be restored in place of what is on the disk.

        Returns:
            Their names, newest first; None where the chief has no memory for any.
        """
        self._snapshots = self.make_snapshots(directory)
        if self._snapshots is None:
            return None
        if not self.restore:
            self._snapshots.clear()
        highest = catalog.highest_sequence(catalog.scan(directory))
        return [
            attempt_of(each)
            for each in self._snapshots.find()
            if is_newer(each, self._candidate, highest)
        ]

    def _agree_on_memory(
        self, store: KeyValueStore, prefix: str, attempts: list[str], timeout: float
    ) -> None:
        """Restores the newest snapshot that all workers have, if there is one.

        Each says which it has not, and all hear it, so that all draw the same
        conclusion. Nobody takes snapshots where one worker has no memory for them: what
        a save needs of all workers, a snapshot needs too.
        """

        def missing(plan: rendezvous.Plan) -> str | None:
            if not self.cluster.is_chief and self._built is not None:
                self._snapshots = self.make_snapshots(self._built.path)
            if self._snapshots is None:
                return NO_MEMORY
            return "\n".join(self._snapshots.lacks(plan["attempts"])) or None

        _, said = rendezvous.agree(
            store,
            prefix,
            self.cluster,
            lambda: {"attempts": attempts},
            missing,
            timeout,
        )
        if NO_MEMORY in said.values():
            self._snapshots = None
        if self._snapshots is None:
            return
        lacking = {attempt for text in said.values() for attempt in text.split("\n")}
        chosen = next((each for each in attempts if each not in lacking), None)
        if chosen is not None:
            found = {attempt_of(each): each for each in self._snapshots.find()}
            self._candidate, self._tier = found[chosen], "memory"
            self._snapshots.agreed = chosen

    def _check(self, plan: rendezvous.Plan) -> str | None:
        if self.cluster.is_chief:
            return None
        if plan["world"] != self.cluster.world:
            return (
                f"{DISAGREES}worker 0 counts {plan['world']} workers, this one "
                f"{self.cluster.world}; give all workers the same TF_CONFIG cluster"
            )
        directory = self._shared_directory(plan)
        is_apart = self.cluster.worker in self._apart
        if directory is None and not is_apart:
            return (
                f"{NOT_SHARED}{self.own!r} here is not the same storage as worker 0's "
                f"{plan['directory']!r} (a file by which worker 0 marks it is not "
                "there). Use a directory that all machines mount; or, where there is "
                "none, give all workers a remote_checkpoint_dir in object storage, by "
                "way of which each has what it needs on its own disk."
            )
        opened = self._build(None if is_apart else directory)
        if is_apart:
            opened.start(is_sole=False)  # other workers of this machine may be there
        token = plan["checkpoint"]
        if token is not None:
            if is_apart and self.store is not None:
                self._candidate = opened.fetch(self.store, token)
                self._tier = "bucket"
            else:
                self._candidate = opened.find(token)
            if self._candidate is None:
                return (
                    f"{DISAGREES}worker 0 restores the commit {token} of "
                    f"{plan['directory']!r}, which this worker does not find there"
                    + (f" nor in {self.store.uri}" if is_apart and self.store else "")
                )
        return None

    def _shared_directory(self, plan: rendezvous.Plan) -> str | None:
        """The chief's directory as this worker names it; None if it sees another."""
        chiefs = str(plan["directory"])
        own = paths.absolute(self.own) if self.own else ""
        for directory in (chiefs, own):
            if directory and is_leased_by(directory, plan["lease"]):
                return directory
        return None

    def _find_newest(self, opened: Directory) -> None:
        lost: list[str] = []  # of what had been saved
        self._candidate = opened.newest(self._skipped.append, lost.append)
        if self.mirror is not None and import_commit.look_for_newer(
            self.mirror,
            self._candidate,
            functools.partial(
                opened.fetch_newer,
                self.mirror.store,
                self._candidate,
                self._skipped.append,
                lost.append,
            ),
            instead="pass restore=False",
        ):
            opened.check_nothing_came()  # nor to the place, by way of another directory
            self._candidate = opened.newest(self._skipped.append, lost.append)
            self._tier = "bucket"
        self._skipped += lost
        if lost and self._candidate is None:
            found = "; ".join(text.rstrip(".") for text in lost)
            places = opened.path
            if self.mirror is not None:
                places += f" or {self.mirror.store.uri}"
            self._damaged = (
                f"no commit in {places} is whole ({found}), and a training "
                "that begins anew would write over them. Put the files back from a "
                "copy; or, to begin anew, move them away or pass restore=False"
            )
        used = self._candidate
        instead = f"{used.path!r} is used" if used else "it is passed over"
        for problem in self._skipped:
            log.warning("tfpreempt: %s; %s", problem.rstrip("."), instead)

    def _bring_before_all(self, store: ObjectStore) -> None:
        """Workers with other disks fetch what this one restores, so it must be there.

        The copy of the newest commit may have been cut short by the last preemption.
        """
        if self._candidate is None:
            return
        if self._candidate.manifest is None:
            raise errors.WorkersDisagreeError(
                f"{self._candidate.path!r}, the newest checkpoint, was not written by "
                "tfpreempt, and not all workers see this directory, so they cannot "
                "restore it. Put it on storage that all mount, for one start; or move "
                "it away"
            )
        assert self.mirror is not None  # it is the chief that brings
        Upload(store, self._candidate, before_marker=self.mirror.announce).run()


def _as_error(problems: dict[int, str]) -> Exception:
    """What workers found wrong with the start, each as "ClassOfError: text"."""
    name = problems[min(problems)].split(":")[0]
    kind: type[Exception] = getattr(errors, name, errors.WorkersDisagreeError)
    text = "; ".join(
        f"worker {i}: {problem.removeprefix(f'{name}: ')}"
        for i, problem in problems.items()
    )
    return kind(text)
