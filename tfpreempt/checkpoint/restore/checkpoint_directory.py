"""`Directory` finds, verifies, restores and deletes the commits of a directory.

Every worker has a `Directory` for the run's checkpoint directory. The chief holds the
lease of the directory, chooses the commit to restore, and writes new commits. The other
workers find the commit chosen by the chief. Every worker restores that commit.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tfpreempt import errors
from tfpreempt.checkpoint.directory import (
    catalog,
    flat_commit,
    layout,
    retention,
    storage_identity,
)
from tfpreempt.checkpoint.directory.catalog import CommitStatus, Entry, Kind
from tfpreempt.checkpoint.directory.head import Head, this_process
from tfpreempt.checkpoint.directory.retention import RetentionPolicy
from tfpreempt.checkpoint.directory.storage_identity import DirectoryIdentity
from tfpreempt.checkpoint.lease.lease import Lease
from tfpreempt.checkpoint.mirror import import_commit
from tfpreempt.checkpoint.mirror.mirror import Mirror
from tfpreempt.checkpoint.mirror.mirror_status import MirrorStatus
from tfpreempt.checkpoint.mirror.shard_transfer import ShardTransfer
from tfpreempt.checkpoint.restore import restore as restoring
from tfpreempt.checkpoint.restore.handle import Checkpoint
from tfpreempt.checkpoint.restore.reshard import (
    check_rules,
    has_part_of,
    is_resized,
    load_state,
    load_worker_state,
)
from tfpreempt.checkpoint.restore.verification import faults
from tfpreempt.checkpoint.state.contents import Contents
from tfpreempt.checkpoint.state.state import (
    REGISTRY,
    State,
    StateRegistry,
    check_state_file,
    try_states,
)
from tfpreempt.core import events
from tfpreempt.core.clock import Clock, SystemClock
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.restarts import num_restarts
from tfpreempt.storage import os_errors
from tfpreempt.storage.files import Files
from tfpreempt.storage.object_store import ObjectStore

_log = logging.getLogger(__name__)

_ENDED_SAVES = 8  # saves whose late shares are deleted

# The newest commit by another process (`Head`) that this process has seen in each
# directory in which this process has committed. Key: name of this process, directory.
_heads: dict[tuple[str, str], Head] = {}


@dataclasses.dataclass(eq=False, kw_only=True)
class Directory:
    """A checkpoint directory, as used by one worker.

    Args:
        path: path of the chief's checkpoint directory (equal on every worker).
        cluster: the workers, and the index of this worker.
        files: file system operations that make the changes, guarded by the lease if
            there is a lease.
        contents: reads and writes the part of a checkpoint that TensorFlow or a save_fn
            writes.
        random_state: State of this worker's random generators; None: not saved.
        registry: the named States to save.
        retention: the rules by which commits by tfpreempt stay.
        mirror: on the chief, the mirror of the directory; None without a mirror.
        lease: the lease of the directory; None without a lease.
        clock: time source for measured durations.
        exchange: transfers the files of workers without access to the chief's
            directory; None if every worker has access.

    Attributes:
        corrupt: tokens of the commits that `newest` skipped as corrupt. Retention does
            not count them among the commits to keep.
        highest_sequence: highest sequence number of the commits checked by `newest` or
            made by a save. A new commit gets a higher number, even if a faulty disk
            does not list the older commits during the save.
        ended_saves: staging directories of the newest saves that ended before every
            worker had written its share. A slow worker may write its share later.
        identity: compares the storage at the path with the storage at the start.
        metadata: JSON values for the manifests of the next saves. "restart": number of
            restarts of the run before this process, read at the start, because an error
            of the read must not make a save fail. "metrics": see `set_metrics`.
    """

    path: str
    cluster: Cluster
    files: Files
    contents: Contents = dataclasses.field(default_factory=Contents)
    random_state: State | None = None
    registry: StateRegistry = REGISTRY
    retention: RetentionPolicy = dataclasses.field(default_factory=RetentionPolicy)
    mirror: Mirror | None = None
    lease: Lease | None = None
    clock: Clock = dataclasses.field(default_factory=SystemClock)
    exchange: ShardTransfer | None = None
    corrupt: set[str] = dataclasses.field(default_factory=set, init=False)
    highest_sequence: int = dataclasses.field(default=0, init=False)
    ended_saves: collections.deque[str] = dataclasses.field(init=False)
    identity: DirectoryIdentity = dataclasses.field(init=False)
    metadata: Mapping[str, Any] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        with os_errors.translated("read the checkpoints", self.path):
            self.identity = DirectoryIdentity(self.path)
        self.ended_saves = collections.deque(maxlen=_ENDED_SAVES)
        self.metadata = {"restart": num_restarts()}

    # --- the start -------------------------------------------------------------------

    def start(self, *, is_sole: bool = True) -> None:
        """Deletes the files of uncommitted saves; called before the first save.

        A failure is logged: the remaining files only take up disk space.

        Args:
            is_sole: whether no other process can commit in the directory, see
                `retention.clean`.
        """
        try:
            for path in retention.clean(
                self.files, self.path, self.clock, is_sole=is_sole
            ):
                _log.info("deleted %s, the files of a save without a commit", path)
        except OSError as error:
            _log.warning(
                "could not delete the files of incomplete saves in %s, which only take "
                "up disk space: %s",
                self.path,
                error,
            )
        try:
            flat_commit.resolve_intents(self.files, self.path)
            storage_identity.write_token(self.files, self.path)
            self.identity = DirectoryIdentity(self.path)
        except OSError as error:
            _log.warning(
                "could not prepare the checkpoint directory %s; the next save retries "
                "this: %s",
                self.path,
                error,
            )

    def check_others(self, commits: Iterable[Entry]) -> None:
        """Checks that no other run has committed while the lease was released.

        Args:
            commits: the commits in the directory now.

        Raises:
            LeaseLostError: another run has committed, so a commit of this run would mix
                the steps of two runs.
        """
        if self.lease is not None:
            self.lease.head.follow(commits, self.lease)

    def remember_head(self) -> None:
        """Keeps the lease's `head` after a commit, for later handlers of the process.

        The head is the newest commit by another process that this process has seen.
        When the next handler opens the directory, `check_nothing_came` compares the
        commits in the directory with the head.
        """
        if self.lease is not None:
            _heads[this_process(), os.path.realpath(self.path)] = self.lease.head

    # --- saving ----------------------------------------------------------------------

    def set_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sets the metrics that the commits of a step record.

        Args:
            step: the step; commits of other steps record no metrics.
            metrics: values by name; a value that is not finite is omitted.
        """
        self.metadata = {**self.metadata, "metrics": (step, dict(metrics))}

    def needs_peers(self) -> bool:
        """Returns whether a save needs every worker.

        True if the capture of a value is a collective operation, or if a commit needs
        the part of every worker.
        """
        return self.contents.needs_peers() or self.needs_parts()

    def needs_parts(self) -> bool:
        """Returns whether a commit is useless without the part of every worker."""
        states = self.registry.in_order()
        needed = any(each._needs_every_worker() for each in states)
        return needed or self.contents.needs_every_worker

    def try_states(self) -> None:
        """Tries to save the named States to temporary files, and logs a warning for
        each State that raises an error. Called on the main thread."""
        states, is_chief = self.registry.in_order(), self.cluster.is_chief
        try_states(each for each in states if each.per_worker or is_chief)

    # --- finding and restoring -------------------------------------------------------

    def newest(self, *on_skip: Callable[[str], None]) -> Entry | None:
        """Finds the newest intact commit, on the chief; see `newest_verified`."""
        return restoring.newest_verified(
            self.path,
            *on_skip,
            needs_prefix=self.contents.needs_prefix,
            check=self.check,
        )

    def fetch_newer(
        self,
        local: Entry | None,
        on_skip: Callable[[str], None],
        on_lost: Callable[[str], None],
        copies: Iterable[Entry],
    ) -> bool:
        """Imports the newest intact commit of the mirror, if it is newer than `local`.

        The arguments are described in `import_commit.newest_first`. Returns whether a
        commit was imported.
        """
        return import_commit.newest_first(
            self.files,
            copies,
            local,
            self.path,
            on_skip,
            on_lost,
            policy=self.retention,
            needs_prefix=self.contents.needs_prefix,
        )

    def fetch(self, store: ObjectStore, token: str) -> Entry | None:
        """Returns the commit that the chief chose, on a worker without access to the
        chief's disk.

        If the commit is missing or corrupt on this worker's disk, it is downloaded.

        Args:
            store: object store of the mirror.
            token: token of the commit.

        Returns:
            The commit; None if neither the disk nor the store has the commit.
        """
        found = self.find(token)
        try:
            if found is not None:
                restoring.verify(found)
                return found
        except errors.CheckpointCorruptedError as error:
            _log.warning("%s; the files are downloaded again", error)
        commit = import_commit.find(store, token)
        if commit is None:
            return None
        # The chief deletes no commits on this disk, so this worker must. With rules for
        # commits that stay, the disk is only a cache: the chief and the mirror keep the
        # commits.
        policy = self.retention
        policy = dataclasses.replace(policy, is_cache=policy.has_rules)
        import_commit.bring(self.files, commit, self.path, policy=policy)
        return self.find(token)

    def find(self, token: str) -> Entry | None:
        """Returns the entry in this worker's directory for the checkpoint that the
        chief has chosen.

        Args:
            token: token of the checkpoint.

        Returns:
            The entry. Its files are not verified, because the chief has verified them.
            None if there is no checkpoint with the token.
        """
        found = restoring.find_candidates(self.path, lambda problem: None)
        return next((each for each in found if each.token == token), None)

    def restore(
        self,
        candidate: Entry,
        *,
        named_states: bool = True,
        is_partial: bool = False,
        assign: Callable[[str], None] | None = None,
    ) -> events.Restored:
        """Restores a checkpoint, except for the random generators.

        Called on every worker, on the main thread.

        Args:
            candidate: the checkpoint chosen by the chief, which has verified its files.
            named_states: whether to load the named States too; False if
                `load_named_states` was called before.
            is_partial: whether variables that do not fit keep their values.
            assign: for a commit that another framework has written: function that gets
                the path prefix of the commit's files, and restores the variables; None
                to restore by `contents`.

        Returns:
            The description of the restored checkpoint. The step is 0 for a checkpoint
            of another program, which does not tell its step.

        Raises:
            CheckpointCorruptedError: TensorFlow cannot read the checkpoint. Without a
                manifest, `check` cannot detect every corruption.
            CheckpointMismatchError: the checkpoint belongs to another model; nothing
                was assigned. Or another number of workers wrote the checkpoint, and a
                State has no rule for resharding.
            ConfigurationError: the data cannot be divided equally among the current
                workers.
        """
        cluster, manifest = self.cluster, candidate.manifest
        resized = is_resized(candidate, cluster)
        if resized:
            check_rules(candidate, self.registry.in_order(), cluster)
            self.contents.check_shares()
        if assign is not None:
            assert candidate.prefix is not None
            self.contents.free_read_ahead()
            assign(candidate.prefix)
        elif candidate.prefix is not None:
            # In a commit, TensorFlow's files have the positions of the chief's data
            # iterators, so only the chief restores the positions from these files.
            is_mine = manifest is None or (cluster.is_chief and not resized)
            try:
                self.contents.restore(
                    candidate.prefix, with_data=is_mine, is_partial=is_partial
                )
            except errors.CheckpointCorruptedError as error:
                raise errors.CheckpointCorruptedError(
                    f"{str(error).rstrip('.')}. Put the files back from a copy; or "
                    f"move {candidate.path!r} away, to resume from an older checkpoint"
                ) from error
        if manifest is not None:
            for state in self.contents.states if assign is None else ():
                load_worker_state(candidate, state, cluster)
            restoring.warn_about_workers(candidate, cluster)
            if named_states:
                self.load_named_states(candidate)
        self.contents.restored(candidate)
        return events.Restored(
            path=candidate.path,
            step=candidate.step or 0,
            sequence=candidate.sequence or 0,
            world_size=manifest.world_size if manifest else 0,
        )

    def random_bytes(self) -> bytes:
        """Returns the current state of this worker's random generators, in the format
        of a commit."""
        buffer = io.BytesIO()
        if self.random_state is not None:
            self.random_state.save(buffer)
        return buffer.getvalue()

    def load_named_states(self, candidate: Entry) -> None:
        """Loads the named States from a commit.

        Called on every worker, on the main thread. If the commit lacks a State, a
        warning is logged.

        Raises:
            CheckpointMismatchError: the program has only named States, and the commit
                has none of these; no State was changed.
        """
        missing, states = list[str](), self.registry.in_order()
        for state in states:
            is_there = load_state(candidate, state, self.cluster)
            # If the commit has no file of this worker at all, do not warn again for
            # each State: `warn_about_workers` has logged a warning.
            is_known = state.per_worker and not has_part_of(candidate, self.cluster)
            if not (is_there or is_known or state._is_optional):
                missing.append(state.name)
        if missing and len(missing) == len(states) and type(self.contents) is Contents:
            raise errors.CheckpointMismatchError(
                f"{candidate.path} has no State {' or '.join(map(repr, missing))}, and "
                "the program saves nothing else, so another program may have written "
                "the checkpoint. Use a separate checkpoint directory for each run, or "
                "restore=False to start from scratch. If this program wrote the "
                "checkpoint, create the States of the checkpoint before the handler."
            )
        for name in missing:
            _log.warning(
                "%s has no State %r; the State keeps the initial value of the program",
                candidate.path,
                name,
            )

    def check(self, candidate: Entry) -> None:
        """Verifies the files of a checkpoint, and that every worker can restore them.

        No variable or State is changed. A corrupt commit is added to `corrupt`. The
        tensors read from a small commit are kept in memory for `restore`, which then
        need not read them again.

        Raises:
            CheckpointCorruptedError: a file of the checkpoint is corrupt.
        """
        self.highest_sequence = max(self.highest_sequence, candidate.sequence or 0)
        sums: Mapping[str, tuple[int, int]] = {}
        is_small = (candidate.size or 0) < restoring.MUCH
        if (
            candidate.manifest is not None
            and candidate.prefix is not None
            and is_small
            # A sparse file of terabytes, in place of a small file, is not read.
            and not faults(candidate, every_byte=False)
        ):
            sums = self.contents.read_ahead(candidate.prefix)
        try:
            restoring.verify(candidate, sums)
            if candidate.prefix is not None:
                self.contents.check(candidate.prefix)
            states = {
                state.name + layout.STATE_SUFFIX: state
                for state in self.registry.in_order()
            }
            for entry in candidate.files:
                path = candidate.file(entry.name)
                folder, name = os.path.split(path)
                if os.path.dirname(folder) == candidate.shards:
                    check_state_file(path, states.get(name))
        except errors.CheckpointCorruptedError:
            self.corrupt.add(candidate.token)
            self.contents.free_read_ahead()
            raise

    # --- deleting and mirroring ------------------------------------------------------

    def delete(self, checkpoint: Checkpoint) -> None:
        """Deletes a commit in the directory and in the mirror. Called on the chief.

        Raises:
            ConfigurationError: the checkpoint belongs to a CheckpointManager or a
                save_fn; or is neither in this directory nor in its mirror.
            CheckpointCorruptedError: the commit cannot be read.
            CheckpointError: the disk or the store failed.
        """
        entry = self._commit_at(checkpoint.path)
        if entry is not None and entry.kind is Kind.FLAT:
            raise errors.ConfigurationError(
                f"{checkpoint!r} belongs to a CheckpointManager or a save_fn; expected "
                "a checkpoint in a directory of its own. Delete the checkpoint with "
                "the CheckpointManager (max_to_keep), or with the program of the "
                "save_fn"
            )
        holder, _, name = checkpoint.path.rstrip("/").rpartition("/")
        may_be_own = holder == self.path and layout.COMMIT.fullmatch(name) is not None
        is_known = entry is not None or may_be_own
        if self.mirror is not None:
            is_known = self.mirror.delete(checkpoint.path, entry) or is_known
        if not is_known:
            raise errors.ConfigurationError(
                f"Got {checkpoint!r}; expected a checkpoint in this handler's "
                f"directory {self.path!r} or in its mirror_dir. Nothing was deleted"
            )
        if entry is None:
            _log.warning(
                "%r is no longer in the checkpoint directory, so nothing was deleted",
                checkpoint,
            )
            return
        with os_errors.translated(f"delete {entry.path!r}", self.path):
            self.identity.check()
            retention.delete(self.files, entry)

    def _commit_at(self, path: str) -> Entry | None:
        """Returns the local commit at a path; None if there is no such commit.

        Args:
            path: path of the commit, or the URI of its folder in the mirror.

        Raises:
            CheckpointCorruptedError: the commit cannot be read.
        """
        name = path.rstrip("/").rpartition("/")[2]
        with os_errors.translated("read the checkpoints", self.path):
            found = catalog.scan(self.path)
        for entry in found:
            is_twin = name == catalog.folder_name(entry.step or 0, entry.token)
            is_meant = is_twin or os.path.abspath(path) == os.path.abspath(entry.path)
            if entry.is_committed and is_meant:
                return entry
            if entry.condition is CommitStatus.CORRUPT and is_meant:
                raise errors.CheckpointCorruptedError(
                    f"{entry.path!r} cannot be read, so nothing was deleted: "
                    f"{entry.problems[0].rstrip('.')}. Check the directory and the "
                    f"disk, or delete {entry.path!r} by hand"
                )
        return None

    @property
    def mirror_status(self) -> MirrorStatus | None:
        """Progress of the mirror; None without a mirror. Any thread may read."""
        return None if self.mirror is None else self.mirror.status

    def wait_for_mirror(self, timeout: float | None) -> bool:
        """Waits until the newest commit is in the mirror; see `Mirror.wait`.

        Returns:
            Whether the newest commit is in the mirror, or there is no mirror.
        """
        return self.mirror is None or self.mirror.wait(timeout)

    def release(self) -> None:
        """Releases the leases of the directory and the mirror, so that another program
        can take them. The next save takes the leases again."""
        if self.lease is not None:
            self.lease.release()
        if self.mirror is not None:
            self.mirror.release()


def check_nothing_came(path: str) -> None:
    """Raises an error if another run has committed since this process's last commit.

    Between two handlers of a program no process holds the lease of the directory, so
    another run can commit. The second handler would restore that commit, but the Python
    values of this program belong to an older step. Called on the main thread of the
    chief.

    Args:
        path: the checkpoint directory.

    Raises:
        DirectoryLockedError: another run has committed.
        SaveError: the disk failed.
    """
    head = _heads.get((this_process(), os.path.realpath(path)))
    if head is None:
        return
    with os_errors.translated("read the last commit", path):
        found = catalog.scan(path)
    if head.has_moved(each for each in found if each.is_committed):
        raise errors.DirectoryLockedError(
            f"another program has committed in {path!r} since this process closed its "
            "handler for this directory; resuming in this process would mix two runs. "
            "Start this program again (in a notebook: restart the kernel) after the "
            "other program has ended, or use another directory"
        )
