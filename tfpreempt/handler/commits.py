"""The commits of one handler: saved, restored, copied, and deleted when asked."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from tfpreempt import errors
from tfpreempt.checkpoint import catalog, handle
from tfpreempt.checkpoint.catalog import Entry
from tfpreempt.checkpoint.commit import Permit
from tfpreempt.checkpoint.directory import Directory
from tfpreempt.checkpoint.handle import Checkpoint
from tfpreempt.checkpoint.lease import Lease
from tfpreempt.checkpoint.manifest import Parent
from tfpreempt.checkpoint.remote.exchange import ShardExchange, clear_others
from tfpreempt.checkpoint.remote.mirror import Mirror
from tfpreempt.checkpoint.remote.status import MirrorStatus
from tfpreempt.checkpoint.save import Save
from tfpreempt.checkpoint.state_loader import StateLoader
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.events import Commit, Fault, Restored
from tfpreempt.core.journal import journal_directory
from tfpreempt.handler.snapshots import Snapshots

log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class Commits:
    """What a handler's checkpoint directory and object store hold, and get.

    It knows of no agreement: its `Member` says when. Main thread unless said otherwise.

    Args:
        store: the checkpoint directory.
        cluster: who the workers are.
        counter: the variable that holds the number of runs; None without a checkpoint.
        candidate: the commit that all workers are to restore; None to start afresh.
        token: unique to this start, equal on all workers; begins the names of saves.
        mirror: on the chief, its copy in an object store; None without one.
        lease: on the chief, of the directory; None elsewhere.
        exchange: takes the parts of workers with other disks there; None without any.
        skipped: what was found damaged on the way (chief only).
        tier: where the candidate is: "memory", "disk" or "bucket".
        on_disk: the newest commit of the directory, where the candidate is a snapshot.
        snapshots: what this worker has in memory, where all workers have some.

    Attributes:
        directory: where they lie.
    """

    store: Directory
    cluster: Cluster
    counter: Any
    candidate: Entry | None
    token: str
    mirror: Mirror | None
    lease: Lease | None
    exchange: ShardExchange | None
    skipped: Sequence[str]
    tier: str = "disk"
    on_disk: Entry | None = None
    snapshots: Snapshots | None = None

    def __post_init__(self) -> None:
        self.directory = self.store.path
        self._restored_from = self.store
        agreed = self.candidate
        if self.tier == "memory" and self.snapshots is not None:
            self._restored_from = self.snapshots.directory
            agreed = None if agreed is None else self.snapshots.keep_states(agreed)
        self._random_at_start = b""
        found = catalog.scan(self.directory)
        self.store.check_others(found)
        highest = catalog.highest_sequence(found)
        if self.tier == "memory" and agreed is not None:
            # Its own number is its rank in memory; here it comes after what there is.
            agreed = dataclasses.replace(agreed, sequence=highest)
        # Of the commits on the disk, as far as this worker knows; the chief's counts.
        token = self.on_disk.token if self.on_disk is not None else ""
        self._parent = Parent(token=token, sequence=highest)
        if self.snapshots is not None:
            for each in (self.on_disk, self.candidate):
                if each is not None and each.manifest is not None:
                    self.snapshots.expect_as_in(each.manifest)
        self._state_loader = StateLoader(
            self.directory,
            self.cluster,
            agreed=agreed,
            after=highest,
        )

    # --- a save, in two phases -------------------------------------------------------

    def stage(self, step: int, name: str, *args: Any, **kwargs: Any) -> Save:
        """Writes this worker's part of a save.

        Args:
            step: that the save carries.
            name: of the save; equal on all workers.
            *args: for a manager's `save`, or a save_fn.
            **kwargs: likewise.
        """
        return self.write(self.capture(step, name, None, *args, **kwargs))

    def capture(
        self, step: int, name: str, permit: Permit | None, *args: Any, **kwargs: Any
    ) -> Save:
        """Captures this worker's part of a save.

        Args:
            step: see `stage`.
            name: see `stage`.
            permit: of an asynchronous save.
            *args: see `stage`.
            **kwargs: see `stage`.
        """
        if self.counter is not None:
            self.counter.assign(step)
        self.warn_of_unrestored()
        save = Save(self.store, step, f"{self.token}-{name}", permit)
        save.capture(*args, **kwargs)
        return save

    def write(self, save: Save) -> Save:
        """Writes what was captured, and returns the save; any thread."""
        save.write()
        if self.exchange is not None:
            self.exchange.send(save)
        is_apart = self.exchange is not None and self.exchange.is_apart
        if not self.cluster.is_chief and not is_apart:
            self._state_loader.expect(save.staging)
        return save

    def commit(
        self,
        save: Save,
        because: str,
        workers: Sequence[int],
        left: Callable[[], float],
    ) -> Commit | None:
        """Makes a staged save durable, and has it copied; on the chief, any thread.

        Args:
            save: was written.
            because: written into the manifest.
            workers: whose parts are there.
            left: seconds that a notice leaves.

        Returns:
            The commit; None where a save_fn left nothing to commit.
        """
        if self.exchange is not None:
            try:
                workers = self.exchange.collect(save, workers, because, left)
            except errors.SaveError:
                self.discard(save)
                raise
        try:
            commit = save.publish(because, tuple(workers))
        finally:
            if self.exchange is not None:
                self._clear(self.exchange, save)
        has_followers = self.mirror is not None or self.snapshots is not None
        if commit is not None and has_followers:
            try:
                self._tell(commit)
            except (OSError, errors.CheckpointError) as error:
                log.warning(
                    "tfpreempt: %s stands, but cannot be read back, and so is not "
                    "copied: %s",
                    commit.path,
                    error,
                )
        return commit

    def _tell(self, commit: Commit) -> None:
        """Of a new commit, to those who go by it."""
        made = catalog.at(commit.path)
        self._parent = Parent(token=made.token, sequence=commit.sequence)
        if self.snapshots is not None and made.manifest is not None:
            self.snapshots.expect_as_in(made.manifest)
        if self.mirror is not None:
            self.mirror.add(made)

    def discard(self, save: Save) -> None:
        """Removes a save that will not be committed; on the chief."""
        save.discard()
        if self.exchange is not None:
            self._clear(self.exchange, save)

    def _clear(self, exchange: ShardExchange, save: Save) -> None:
        """Removes the parts of a save that is over from the object store."""
        if self.mirror is not None:
            self.mirror.task(functools.partial(exchange.clear, save.attempt))

    # --- snapshots -------------------------------------------------------------------

    def take_snapshot(self, step: int, name: str) -> bool:
        """Captures a snapshot, where there are any; see `Snapshots.capture`.

        Args:
            step: that it is of.
            name: see `stage`.
        """
        if self.snapshots is None:
            return False
        if self.counter is not None:
            self.counter.assign(step)
        return self.snapshots.capture(step, f"{self.token}-{name}", self._parent)

    # --- restore ---------------------------------------------------------------------

    def restore(self, *, named_states: bool) -> Restored:
        """Restores the agreed commit.

        Args:
            named_states: False where `load_states` was called before.

        Raises:
            CheckpointMismatchError: another model's checkpoint; nothing was assigned.
        """
        restored = Restored(
            path=None, step=0, sequence=0, world_size=self.cluster.world
        )
        if self.candidate is not None:
            restored = self._restored_from.restore(
                self.candidate, named_states=named_states
            )
            if self.counter is not None and self.candidate.prefix is None:
                self.counter.assign(restored.step)  # saved without the variable
            if self.counter is not None:
                step = int(self.counter.numpy())
                restored = dataclasses.replace(restored, step=step)
            if self.tier == "memory":
                self.store.contents.restored(self.candidate)
            restored = dataclasses.replace(restored, tier=self.tier)
            self._random_at_start = self._restored_from.random_bytes()
        return dataclasses.replace(restored, skipped=tuple(self.skipped))

    @property
    def unrestored_variables(self) -> Sequence[str]:
        """Names of variables of the restored commit that no object has yet."""
        return self._restored_from.contents.unrestored_variables()

    def warn_of_unrestored(self) -> None:
        """Warns of the unrestored variables, once."""
        self._restored_from.contents.warn_of_unrestored()

    def load_states(self) -> None:
        """Loads the named States of the agreed commit, ahead of `restore`."""
        if self.candidate is not None and self.candidate.manifest is not None:
            self._restored_from.load_named_states(self.candidate)

    def load_random_state(self) -> None:
        """Sets this worker's random generators to those of the agreed commit."""
        if self.candidate is not None:
            self._restored_from.load_random_state(self.candidate)

    def warn_of_late_random_state(self) -> None:
        """A first boundary after the first step finds the generators moved on."""
        if self.candidate is None:
            return
        if self._restored_from.random_bytes() != self._random_at_start:
            log.warning(
                "tfpreempt: random numbers were drawn after the restart and before the "
                "first save_checkpoint_if_preempted(); the generators are set back to "
                "the commit only now. For an exact resume enter "
                "watch_preemption_scope() before the loop, or call this first in it."
            )

    # --- what lies there -------------------------------------------------------------

    def load_state(self, state: Any) -> bool:
        """Loads one named State, registered or not, of what was restored or saved
        since; whether there was something."""
        return self._state_loader.load(state)

    def latest(self) -> Checkpoint | None:
        """The newest commit in the directory."""
        return handle.latest(self.directory)

    def delete(self, checkpoint: Checkpoint) -> None:
        """Deletes a commit on both sides; on the chief.

        Raises:
            ConfigurationError: it is not ours to delete.
            CheckpointError: the disk or the store.
        """
        entry = self.store.commit_of(checkpoint.path)
        if entry is not None and entry.kind is catalog.Kind.FLAT:
            raise errors.ConfigurationError(
                f"{checkpoint!r} belongs to a CheckpointManager, whose max_to_keep "
                "says what goes, or to a save_fn; delete it by their own means"
            )
        is_known = entry is not None or self.store.may_hold(checkpoint.path)
        if self.mirror is not None:
            is_known = self.mirror.delete(checkpoint.path, entry) or is_known
        if not is_known:
            raise errors.ConfigurationError(
                f"{checkpoint!r} is not of this handler's directory, "
                f"{self.directory!r}, nor of its remote_checkpoint_dir; nothing was "
                "deleted"
            )
        if entry is None:
            log.warning(
                "tfpreempt: %r is not (any more) in this directory, so there was "
                "nothing to delete",
                checkpoint,
            )
        else:
            self.store.delete(entry)

    # --- the copy --------------------------------------------------------------------

    def begin_copying(self, record: Callable[[Fault], None]) -> None:
        """The handler stands: the chief copies its commits from now on.

        Args:
            record: a method that is told faults; held weakly.

        Raises:
            ConfigurationError: another open handler copies to the same place.
        """
        if self.mirror is not None:
            journal = journal_directory(self.directory)
            self.mirror.begin(self.directory, self.on_disk, record, journal)
            store, token = self.mirror.store, self.token
            self.mirror.task(functools.partial(clear_others, store, token))

    @property
    def mirror_status(self) -> MirrorStatus | None:
        """How far the copying is; None where nothing is copied. Any thread."""
        return None if self.mirror is None else self.mirror.status

    def wait_for_mirror(self, timeout: float | None) -> bool:
        """Waits until all is copied; whether the newest commit is. Any thread."""
        return self.mirror is None or self.mirror.wait(timeout)

    def release(self) -> None:
        """Other programs may use the directory; a save takes it again, if it can."""
        if self.snapshots is not None:
            self.snapshots.give_up()
        if self.lease is not None:
            self.lease.release()
        if self.mirror is not None:
            self.mirror.release()

    def resume(self) -> None:
        """The process goes on after `release`: so does what is being copied."""
        if self.mirror is not None:
            self.mirror.resume()
