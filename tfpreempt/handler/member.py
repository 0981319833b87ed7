"""What one handler keeps: its checkpoint, its step, its journal."""

from __future__ import annotations

import dataclasses
import logging
import os
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from tfpreempt import errors
from tfpreempt.checkpoint import catalog
from tfpreempt.checkpoint import restore as restoring
from tfpreempt.checkpoint.handle import Checkpoint
from tfpreempt.checkpoint.payload import Staged
from tfpreempt.checkpoint.recall import Recall
from tfpreempt.checkpoint.remote.status import MirrorStatus
from tfpreempt.checkpoint.state import State
from tfpreempt.coordination.coordinator import Coordinator
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.events import Commit, Event, Exit, Fault, Outcome, Restored
from tfpreempt.core.journal import Journal, journal_directory
from tfpreempt.handler.start import Start
from tfpreempt.platforms.config import TerminationConfig

log = logging.getLogger(__name__)


class Handler(Protocol):
    """What a keeper needs of its handler."""

    @property
    def is_amid(self) -> bool:
        """Whether its state is not whole outside of steps too."""

    @property
    def runs(self) -> int:
        """Calls that came back in this process."""

    def save(self) -> Any:
        """All workers save now."""

    def close(self, timeout: float | None = None) -> None:
        """The last boundary."""

    def _quiet(self) -> None:
        """Closes without one."""


class Keeper:
    """Restores when its handler says so, saves when the session does. A `Participant`.

    Args:
        start: what the workers agreed on.
        coordinator: this worker's; knows the age of a notice.
        config: says how to leave.
        cluster: who the workers are.
        counter: the variable that holds the number of runs; None without a checkpoint.
        handler: whose it is; held weakly, so that a dropped handler is gone at once.

    Attributes:
        base: runs that the restored commit carries.
        saved_at: runs at the newest save, tried or done; equal on all workers.
        save_arguments: for the next save, from the user.
    """

    def __init__(
        self,
        start: Start,
        coordinator: Coordinator,
        config: TerminationConfig,
        cluster: Cluster,
        counter: Any,
        *,
        handler: Handler,
    ) -> None:
        self.saved_at = 0
        self.save_arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self._saver = start.saver
        self._candidate = start.candidate
        self._last_path = ""
        self._recall = Recall(
            start.saver.directory,
            cluster.worker,
            cluster.world,
            agreed=start.candidate,
            after=catalog.highest_sequence(start.saver.directory),
        )
        self._skipped = tuple(start.skipped)
        self._token = start.token
        self._coordinator = coordinator
        self._config = config
        self._cluster = cluster
        self._counter = counter
        self._handler = weakref.ref(handler)
        self._known_runs = 0
        self._journal = Journal(
            journal_directory(self._saver.directory),
            cluster.worker,
            incarnation=os.environ.get("TFPREEMPT_INCARNATION", self._token),
        )
        self.base = 0
        self._random_at_start = b""
        self._remote = start.remote

    # --- what the session asks -------------------------------------------------------

    @property
    def token(self) -> str:
        """Of the start that all workers agreed on."""
        return self._token

    @property
    def directory(self) -> str:
        """Where it commits."""
        return self._saver.directory

    @property
    def step(self) -> int:
        """The step that a save would carry."""
        return self.base + self._runs()

    @property
    def has_moved(self) -> bool:
        """Whether there are steps since the newest save."""
        return self._runs() != self.saved_at

    @property
    def is_amid(self) -> bool:
        """Whether its state is not whole outside of steps too."""
        handler = self._handler()
        return handler is not None and handler.is_amid

    def stage(self, name: str) -> Staged:
        """Writes this worker's part of a save."""
        self.saved_at = self._runs()
        if self._counter is not None:
            self._counter.assign(self.step)
        args, kwargs = self.save_arguments
        attempt = f"{self._token}-{name}"
        staged = self._saver.stage(self.step, attempt, *args, **kwargs)
        if self._remote is not None:
            self._remote.send(staged)
        is_apart = self._remote is not None and self._remote.is_apart
        if not self._cluster.is_chief and not is_apart:
            self._recall.expect(staged.directory)
        return staged

    def commit(
        self, staged: Staged, because: str, workers: Sequence[int]
    ) -> Commit | None:
        """Makes a staged save durable, and has it copied."""
        if self._remote is not None:
            try:
                deadlines = self._coordinator.deadlines
                workers = self._remote.collect(
                    staged, workers, because, lambda: deadlines.left
                )
            except errors.SaveError:
                self.discard(staged)
                raise
        commit = self._saver.commit(staged, because, tuple(workers))
        if self._remote is not None:
            self._remote.saved(staged)
        if commit is None:
            return None
        if self._remote is not None:
            self._remote.committed(commit.path)
        self._last_path = commit.path
        if because == "preemption":
            waited = self._coordinator.deadlines.since_notice
            commit = dataclasses.replace(commit, notice_to_commit_seconds=waited)
        self.record(commit)
        log.info("tfpreempt: committed step %d in %s", commit.step, commit.path)
        return commit

    def discard(self, staged: Staged) -> None:
        """Throws away a staged save."""
        self._saver.discard(staged)
        if self._remote is not None:
            self._remote.saved(staged)

    def needs_peers(self) -> bool:
        """Whether a save needs every worker at once."""
        return self._saver.needs_peers()

    def save_now(self) -> str:
        """The handler's `save()`.

        Returns:
            The commit's directory on the chief; the checkpoint directory elsewhere,
            and where files lie flat or a save_fn left nothing to commit.

        Raises:
            CheckpointError: see the handler.
            UsageError: see the handler.
        """
        handler = self._handler()
        self._last_path = ""
        if handler is None:
            raise errors.HandlerClosedError(
                "the handler is gone; keep a reference to it"
            )
        handler.save()
        path = self._last_path
        return path if os.path.isdir(path) else self._saver.directory

    def load_state(self, state: State) -> bool:
        """Loads one named State, registered or not; main thread."""
        return self._recall.load(state)

    def record(self, event: Event) -> None:
        """Writes to the journal; any thread."""
        if isinstance(event, Exit) and event.code is None:
            code = self._config.code(event.outcome is not Outcome.LOST)
            finished = event.outcome is Outcome.FINISHED
            event = dataclasses.replace(event, code=0 if finished else code)
        self._journal.record(event)

    def finish_mirror(self, seconds: float) -> bool:
        """Gives the newest commit's copy so much time; whether it is whole."""
        if self._remote is None or self._remote.finish(seconds):
            return True
        status = self._remote.status
        what = "the copy" if status is None else f"the copy of step {status.newest}"
        why = f": {status.fault}" if status is not None and status.fault else ""
        where = f"{what} in {self._remote.store.uri} was not whole in time{why}"
        self.record(Fault(where="mirror", error=where))
        return False

    def leave(self, committed: bool, mirrored: bool = True) -> None:
        """Leaves as the config says."""
        self._config.leave(committed, self._cluster, mirrored=mirrored)

    def close(self, timeout: float | None = None) -> None:
        """The handler's last boundary."""
        handler = self._handler()
        if handler is not None:
            handler.close(timeout)

    def give_way(self) -> None:
        """Another handler goes on in the directory."""
        handler = self._handler()
        if handler is not None:
            handler._quiet()

    def _runs(self) -> int:
        """The handler's runs in this process; any thread."""
        handler = self._handler()
        if handler is not None:
            self._known_runs = handler.runs
        return self._known_runs

    # --- what the handler asks -------------------------------------------------------

    def try_states(self) -> None:
        """Warns of named States that cannot be saved."""
        self._saver.try_states()

    def begin_copying(self) -> None:
        """The handler stands: the chief copies its commits from now on.

        Raises:
            ConfigurationError: another open handler copies to the same place.
        """
        remote = self._remote
        if remote is None or not self._cluster.is_chief:
            return
        remote.open(
            self._saver.directory,
            self._candidate,
            token=self._token,
            max_to_keep=self._saver.loader.max_to_keep,
            record=self.record,
        )

    @property
    def has_candidate(self) -> bool:
        """Whether there is a commit to restore."""
        return self._candidate is not None

    def load_states(self) -> None:
        """Loads the named States of the agreed commit, ahead of `restore`."""
        if self._candidate is not None and self._candidate.manifest is not None:
            self._saver.loader.load_named_states(self._candidate)

    def adopt(self) -> None:
        """Counts on from the agreed commit without restoring it."""
        if self._candidate is not None:
            self.base = self._candidate.step or 0
            self._candidate = None  # nor its random generators

    def restore(self, *, named_states: bool = True) -> None:
        """Restores the agreed commit, and the number of its runs.

        Args:
            named_states: False where `load_states` was called before.

        Raises:
            CheckpointMismatchError: another model's checkpoint; nothing was assigned.
        """
        world = self._coordinator.settings.world
        restored = Restored(path=None, step=0, sequence=0, world_size=world)
        if self._candidate is not None:
            restored = self._saver.loader.restore(
                self._candidate, named_states=named_states
            )
            if self._counter is not None and self._candidate.prefix is None:
                self._counter.assign(restored.step)  # saved without the variable
            if self._counter is not None:
                step = int(self._counter.numpy())
                restored = dataclasses.replace(restored, step=step)
            self._random_at_start = self._saver.loader.random_bytes()
        restored = dataclasses.replace(restored, skipped=self._skipped)
        self.record(restored)
        if restored.path is not None:
            # Not a fault, but what whoever looks at a restarted run asks first.
            log.warning(
                "tfpreempt: goes on at step %d, of %s", restored.step, restored.path
            )
        self.base = restored.step

    def finished(self) -> None:
        """Training is over on all workers."""
        self.record(Exit(outcome=Outcome.FINISHED, code=None, step=self.step))

    def put_away(self) -> None:
        """Nothing more is to be copied or recorded."""
        if self._remote is not None:
            self._remote.close()
        self._journal.close()

    def latest(self) -> Checkpoint | None:
        """The newest commit in the directory."""
        found = restoring.find_candidates(self._saver.directory)
        return self._saver.loader.checkpoint(found[0]) if found else None

    @property
    def mirror_status(self) -> MirrorStatus | None:
        """How far the mirror is; any thread."""
        return None if self._remote is None else self._remote.status

    def wait_for_mirror(self, timeout: float | None = None) -> bool:
        """Waits until all is copied; any thread."""
        return self._remote is None or self._remote.wait(timeout)

    def hurry_mirror(self) -> None:
        """A notice has come; any thread."""
        if self._remote is not None:
            self._remote.hurry()

    def delete(self, checkpoint: Checkpoint) -> None:
        """Deletes a commit on both sides; does nothing on other workers.

        Raises:
            ConfigurationError: it is not ours to delete.
            CheckpointError: the disk or the store.
        """
        if not self._cluster.is_chief:
            return
        entry = self._saver.commit_of(checkpoint.path)
        if entry is not None and entry.kind is catalog.Kind.FLAT:
            raise errors.ConfigurationError(
                f"{checkpoint!r} belongs to a CheckpointManager, whose max_to_keep "
                "says what goes; delete it by the manager's own means"
            )
        is_known = entry is not None or self._saver.may_hold(checkpoint.path)
        if self._remote is not None:
            is_known = self._remote.delete(checkpoint, entry) or is_known
        if not is_known:
            raise errors.ConfigurationError(
                f"{checkpoint!r} is not of this handler's directory, "
                f"{self._saver.directory!r}, nor of its remote_checkpoint_dir; "
                "nothing was deleted"
            )
        if entry is None:
            log.warning("tfpreempt: %r is not (any more) in this directory", checkpoint)
        else:
            self._saver.delete(entry.path)

    def load_random_state(self) -> None:
        """Sets this worker's random generators to the restored commit."""
        if self._candidate is not None:
            self._saver.loader.load_random_state(self._candidate)

    def warn_of_late_random_state(self) -> None:
        """A first boundary after the first step finds the generators moved on."""
        if self._candidate is None:
            return
        if self._saver.loader.random_bytes() != self._random_at_start:
            log.warning(
                "tfpreempt: random numbers were drawn after the restart and before the "
                "first save_checkpoint_if_preempted(); the generators are set back to "
                "the commit only now. For an exact resume enter "
                "watch_preemption_scope() before the loop, or call this first in it."
            )
