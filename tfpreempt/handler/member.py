"""A member of the session: one handler, or one fit, with its steps and its commits."""

from __future__ import annotations

import dataclasses
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from tfpreempt.checkpoint.payload import Staged
from tfpreempt.coordination.deadlines import Deadlines
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.events import Commit, Event, Exit, Fault, Outcome
from tfpreempt.core.journal import Journal, journal_directory
from tfpreempt.handler.commits import Commits
from tfpreempt.handler.remote_cluster import Connection
from tfpreempt.notice.watcher import Watcher
from tfpreempt.platforms.config import TerminationConfig

log = logging.getLogger(__name__)


class Member:
    """What the session serves. Main thread unless said otherwise.

    Args:
        config: says how to leave.
        cluster: who the workers are.
        connection: to remote workers; None without.
        commits: what it saves and restores.
        deadlines: how long a notice leaves.
        watcher: of the notices that are its own; closed when the member is dropped.
        amid: what the state is in the midst of outside of steps too, such as
            "model.fit"; empty where it is whole there.
        is_alive: whether boundaries are still to come; any thread.

    Attributes:
        runs: steps that came back in this process.
        stop_at: runs at which the loop has to look at more than the flag.
        base: steps that the restored commit carries.
        saved_at: runs at the newest save, tried or done; equal on all workers.
        is_armed: whether training has begun.
        is_at_end: whether what it is in the midst of came to its end, and `close` may
            commit that.
        is_closed: whether it takes part no more.
    """

    def __init__(
        self,
        config: TerminationConfig,
        cluster: Cluster,
        connection: Connection | None,
        commits: Commits,
        deadlines: Deadlines,
        watcher: Watcher,
        *,
        amid: str = "",
        is_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        self.config = config
        self.connection = connection
        self.commits = commits
        self.watcher = watcher
        self.amid = amid
        self.is_alive = is_alive
        self.runs = self.stop_at = self.base = self.saved_at = 0
        self.is_armed = self.is_at_end = self.is_closed = False
        self._cluster = cluster
        self._deadlines = deadlines
        self._journal = Journal(
            journal_directory(commits.directory),
            cluster.worker,
            incarnation=os.environ.get("TFPREEMPT_INCARNATION", commits.token),
        )
        weakref.finalize(self, watcher.close)
        weakref.finalize(self, commits.stop_copying).atexit = False

    # --- what is known of it ---------------------------------------------------------

    @property
    def directory(self) -> str:
        """Where it commits."""
        return self.commits.directory

    @property
    def step(self) -> int:
        """The step that a save would carry; any thread."""
        return self.base + self.runs

    @property
    def has_moved(self) -> bool:
        """Whether there are steps since its newest save; equal on all workers."""
        return self.runs != self.saved_at

    # --- restore ---------------------------------------------------------------------

    def restore(self, *, named_states: bool = True) -> None:
        """Restores the agreed commit, and the number of its steps.

        Args:
            named_states: False where `commits.load_states` was called before.

        Raises:
            CheckpointMismatchError: another model's checkpoint; nothing was assigned.
        """
        restored = self.commits.restore(named_states=named_states)
        self.record(restored)
        if restored.path is not None:
            # Not a fault, but what whoever looks at a restarted run asks first.
            log.warning(
                "tfpreempt: goes on at step %d, of %s", restored.step, restored.path
            )
        self.base = restored.step

    def adopt(self) -> None:
        """Counts on from the agreed commit, whose variables are not wanted."""
        self.base = self.commits.adopt()

    # --- a save ----------------------------------------------------------------------

    def stage(self, name: str, *args: Any, **kwargs: Any) -> Staged:
        """Writes this worker's part of a save.

        Args:
            name: of the save; equal on all workers, and never used again.
            *args: the user's, for a manager's `save` or a save_fn.
            **kwargs: likewise.
        """
        self.saved_at = self.runs
        return self.commits.stage(self.step, name, *args, **kwargs)

    def commit(
        self, staged: Staged, because: str, workers: Sequence[int]
    ) -> Commit | None:
        """Makes it durable, and records it; on the chief.

        Args:
            staged: what was staged.
            because: "preemption", or why else.
            workers: whose parts are there.
        """
        deadlines = self._deadlines
        commit = self.commits.commit(staged, because, workers, lambda: deadlines.left)
        if commit is None:
            return None
        if because == "preemption":
            waited = deadlines.since_notice
            commit = dataclasses.replace(commit, notice_to_commit_seconds=waited)
        self.record(commit)
        log.info("tfpreempt: committed step %d in %s", commit.step, commit.path)
        return commit

    def record(self, event: Event) -> None:
        """Writes to the journal; any thread."""
        if isinstance(event, Exit) and event.code is None:
            code = self.config.code(event.outcome is not Outcome.LOST)
            finished = event.outcome is Outcome.FINISHED
            event = dataclasses.replace(event, code=0 if finished else code)
        self._journal.record(event)

    # --- the end ---------------------------------------------------------------------

    def finish_copy(self, seconds: float) -> bool:
        """Gives the newest commit's copy so much time; whether it is whole."""
        mirror = self.commits.mirror
        if mirror is None or mirror.finish(seconds):
            return True
        status = mirror.status
        why = f": {status.fault}" if status.fault else ""
        late = f"the copy of step {status.newest} in {status.uri} was not whole in time"
        self.record(Fault(where="mirror", error=late + why))
        return False

    def leave(self, committed: bool, mirrored: bool = True) -> None:
        """Ends the process by SystemExit, or returns; any thread."""
        self.config.leave(committed, self._cluster, mirrored=mirrored)

    def close(self) -> None:
        """Listens, copies and records no more."""
        self.is_closed = True
        self.stop_at = -1
        self.watcher.close()
        self.commits.close()
        self._journal.close()
