"""One handler, or one fit, with its steps and its journal; and the open ones."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tfpreempt.checkpoint.commit import Permit
from tfpreempt.checkpoint.save import Save
from tfpreempt.checkpoint.unfinished_caches import clear_interrupted, written_caches
from tfpreempt.coordination.deadlines import Deadlines
from tfpreempt.core.clock import SystemClock, process_seconds
from tfpreempt.core.events import (
    CacheWrite,
    Commit,
    Event,
    Exit,
    Fault,
    Outcome,
    Restored,
)
from tfpreempt.core.journal import Journal, directory_to_write
from tfpreempt.core.restarts import num_restarts
from tfpreempt.handler.commits import Commits
from tfpreempt.handler.now import Doing, Now, Telling, now_path, read_now
from tfpreempt.notice.watcher import Watcher
from tfpreempt.platforms.config import TerminationConfig

HANDS_IN = 5.0
"""Seconds at most for the end of the journal to be copied to the object store."""

log = logging.getLogger(__name__)

NEVER = 1 << 62
"""More steps than any training makes."""


@dataclasses.dataclass(eq=False)
class Member:
    """What the session serves. Main thread unless said otherwise.

    Args:
        config: says how to leave.
        commits: what it saves and restores.
        deadlines: how long a notice leaves.
        watcher: of the notices that are its own; closed when the member is dropped.
        amid: what the state is in the midst of outside of steps too, such as
            "model.fit"; empty where it is whole there.
        async_save: whether periodic saves are asynchronous, where they can be.
        is_alive: whether boundaries are still to come; any thread.
        start_seconds: that it took to agree on what to restore, and to fetch that.

    Attributes:
        runs: steps that came back in this process.
        stop_at: runs at which the loop has to look at more than the flag; -1 where no
            run may follow.
        base: steps that the restored commit carries.
        saved_at: runs at the newest save, tried or done; None where more than steps
            has come since, or the round of that save has committed nothing; equal on
            all workers.
        is_resumed: whether it goes on from a commit that is not of the end of training,
            and has saved nothing since: the end may come without another step.
        left_at: its step when its exit was served. SystemExit may have been caught, or
            the exit function come back: another handler may go on from its commit.
        is_unconfirmed: whether only the chief knows if the newest save was committed:
            the save was asynchronous, or was made without a round.
        is_armed: whether training has begun.
        is_at_end: whether what it is in the midst of came to its end, and `close` may
            commit that.
        is_closed: whether it takes part no more.
    """

    config: TerminationConfig
    commits: Commits
    deadlines: Deadlines
    watcher: Watcher
    _: dataclasses.KW_ONLY
    amid: str = ""
    async_save: bool = False
    is_alive: Callable[[], bool] = lambda: True
    start_seconds: float = 0.0
    runs: int = 0
    stop_at: int = 0
    base: int = dataclasses.field(init=False)
    saved_at: int | None = 0
    is_resumed: bool = False
    left_at: int | None = None
    is_unconfirmed: bool = False
    is_armed: bool = False
    is_at_end: bool = False
    is_closed: bool = False

    def __post_init__(self) -> None:
        found = self.commits.candidate
        self.base = 0 if found is None else found.step or 0
        self._clock = SystemClock()
        self._telling: Telling | None = None  # while it takes part
        self._journal = Journal(
            directory_to_write(self.commits.directory),
            self.commits.cluster.worker,
            self._clock,
            os.environ.get("TFPREEMPT_INCARNATION", self.commits.token),
        )
        self.record = self._journal.record  # an event; any thread
        self.read_earlier = self._journal.read_earlier  # records of a kind of event
        weakref.finalize(self, self.watcher.close)
        if self.commits.mirror is not None:
            weakref.finalize(self, self.commits.mirror.stop).atexit = False

    # --- what is known of it ---------------------------------------------------------

    @property
    def step(self) -> int:
        """The step that a save would carry; any thread."""
        return self.base + self.runs

    @property
    def has_moved(self) -> bool:
        """Whether anything has come since its newest save; equal on all workers."""
        return self.runs != self.saved_at

    @property
    def saves_async(self) -> bool:
        """Whether its periodic saves are asynchronous."""
        return self.async_save and self.commits.store.contents.can_be_async

    # --- the start -------------------------------------------------------------------

    def restore(self, *, named_states: bool = True) -> None:
        """Restores the agreed commit, and the number of its steps.

        Args:
            named_states: False where `commits.load_states` was called before.

        Raises:
            CheckpointMismatchError: another model's checkpoint; nothing was assigned.
        """
        began = self._clock.monotonic()
        restored = self.commits.restore(named_states=named_states)
        took = self.start_seconds + self._clock.monotonic() - began
        self._record_start(restored, took)
        if restored.path is not None:
            # Not a fault, but what whoever looks at a restarted run asks first.
            log.warning(
                "tfpreempt: goes on at step %d, of %s", restored.step, restored.path
            )
        elif restart := num_restarts():
            log.warning(
                "tfpreempt: this is restart %d, and there is no commit in %s: training "
                "begins at step 0. If there was one, see whether the directory is the "
                "same, on storage that outlives the machine",
                restart,
                self.commits.directory,
            )
        self.base = restored.step
        found = self.commits.candidate
        manifest = None if found is None else found.manifest
        is_of_end = manifest is not None and manifest.because == "finished"
        self.is_resumed = found is not None and not is_of_end

    def adopt(self) -> None:
        """Counts on from the agreed commit, of which nothing is wanted."""
        self.commits.candidate = None
        world = self.commits.cluster.world
        adopted_as = Restored(path=None, step=self.base, sequence=0, world_size=world)
        self._record_start(adopted_as, self.start_seconds)

    def clear_caches(self, *, is_all_restored: bool) -> None:
        """Deletes the unfinished files of `Dataset.cache(path)` of earlier processes.

        Called after the restore, before data are read.

        Args:
            is_all_restored: False if the program may make iterators later that the
                commit restores: files that are older than the commit are kept.
        """
        found, since = self.commits.candidate, 0.0
        if found is not None and not is_all_restored:
            since = math.inf if found.time is None else found.time
        clear_interrupted(self._journal.read_earlier(CacheWrite), since=since)

    def record_caches(self) -> None:
        """Records the caches that this process has begun to write; any thread."""
        for path, lock in written_caches():
            self.record(CacheWrite(path=path, lock=lock))

    def _record_start(self, restored: Restored, seconds: float) -> None:
        before = read_now(self._now_path)
        told = dataclasses.replace(
            restored,
            seconds=seconds,
            process_seconds=process_seconds(),
            start=os.environ.get("TFPREEMPT_SUPERVISED"),
            reached=None if before is None else before.step,
        )
        self.record(told)

    # --- how far it is ---------------------------------------------------------------

    def tell_now(self, doing: Callable[[], Doing]) -> None:
        """Tells how far it is from now on, until it is closed, or dropped.

        Args:
            doing: what it is at; any thread.
        """
        mine = weakref.ref(self)

        def look() -> Now | None:
            member = mine()
            if member is None:
                return None
            member.record_caches()
            return member._now(doing())

        self._telling = Telling(self._now_path, self._clock, look)

    @property
    def _now_path(self) -> Path:
        return now_path(self._journal.path.parent, self.commits.cluster.worker)

    def _now(self, doing: Doing) -> Now:
        """How far it is, but for what takes two looks; any thread."""
        wall, since, told = (
            self._clock.wall(),
            self.deadlines.since_notice,
            self.deadlines.told,
        )
        left = None if told is None else told - self._clock.monotonic()
        return Now(
            at=wall,
            worker=self.commits.cluster.worker,
            world=self.commits.cluster.world,
            host=socket.gethostname(),
            pid=os.getpid(),
            doing=doing,
            step=self.step,
            noticed_at=None if since is None else wall - since,
            deadline=None if left is None else wall + left,
            upload=self.commits.mirror_status,
        )

    # --- a save ----------------------------------------------------------------------

    def stage(self, name: str, *args: Any, **kwargs: Any) -> Save:
        """Writes this worker's part of a save.

        Args:
            name: of the save; equal on all workers, and never used again.
            *args: the user's, for a manager's `save` or a save_fn.
            **kwargs: likewise.
        """
        self._begin_save()
        return self.commits.stage(self.step, name, *args, **kwargs)

    def capture(self, name: str, permit: Permit) -> Save:
        """Takes this worker's part of an asynchronous save.

        Args:
            name: see `stage`.
            permit: of the save.
        """
        self._begin_save()
        return self.commits.capture(self.step, name, permit)

    def take_snapshot(self, name: str) -> bool:
        """Captures a snapshot of this step, where there are any.

        Args:
            name: see `stage`.

        Returns:
            Whether it did, and has the one before whole.
        """
        return self.commits.take_snapshot(self.step, name)

    def _begin_save(self) -> None:
        if self.commits.snapshots is not None:
            self.commits.snapshots.give_up()
        self.saved_at = self.runs
        self.is_resumed = False

    def commit(self, save: Save, because: str, workers: Sequence[int]) -> Commit | None:
        """Makes it durable, and records it; on the chief, any thread.

        Args:
            save: was written.
            because: "preemption", or why else.
            workers: whose parts are there.
        """
        deadlines = self.deadlines
        commit = self.commits.commit(save, because, workers, lambda: deadlines.left)
        if commit is None:
            return None
        commit = dataclasses.replace(
            commit,
            notice_to_commit_seconds=(
                deadlines.since_notice if because == "preemption" else None
            ),
            step_seconds=deadlines.step_seconds() or None,
        )
        took = commit.save_seconds
        if save.is_async:  # takes longer, as training goes on beside it
            took = min(took, deadlines.save_seconds or took)
        deadlines.save_seconds = deadlines.planned(took, save.share_seconds)
        self.record(commit)
        log.info("tfpreempt: committed step %d in %s", commit.step, commit.path)
        return commit

    # --- the end ---------------------------------------------------------------------

    def record_exit(self, outcome: Outcome, why: str = "") -> None:
        """Writes to the journal how it leaves; any thread."""
        code: int | None = 0
        if outcome is Outcome.FAILED:
            code = None
        elif outcome is not Outcome.FINISHED:
            code = self.config.code(outcome is Outcome.COMMITTED)
        self.record(Exit(outcome=outcome, code=code, step=self.step, detail=why))

    def close(self) -> None:
        """Listens, copies and records no more; others may have the directory."""
        self.is_closed = True
        self.stop_at = -1
        self.watcher.close()
        if self._telling is not None:
            self._telling.stop()
        if self.commits.snapshots is not None:
            self.commits.snapshots.close()
        if self.commits.mirror is not None:
            self.commits.mirror.hand_in_journal(HANDS_IN)
            self.commits.mirror.close()
        self.commits.release()
        self._journal.close()


class Members:
    """Those of a session that are not closed, oldest first; iterated on any thread.

    A member that was never used is held weakly: who drops the handler has closed it.
    From the first step on it is kept, because a program that never closes its handler
    still gets a last boundary.

    Attributes:
        kept: those with which training has begun; dropped, they go with their handler.
    """

    def __init__(self) -> None:
        self._refs: list[weakref.ref[Member]] = []
        self.kept: set[Member] = set()

    def __iter__(self) -> Iterator[Member]:
        members = [member for ref in self._refs if (member := ref()) is not None]
        return iter([member for member in members if not member.is_closed])

    def __bool__(self) -> bool:
        return any(True for _ in self)

    def add(self, member: Member) -> None:
        """It takes part from now on."""
        self._refs = [weakref.ref(each) for each in (*self, member)]

    def record(self, event: Event) -> None:
        """Writes an event to every journal; any thread."""
        for member in self:
            member.record(event)

    def fault(self, where: str, error: Exception) -> None:
        """Training survives this; it is logged and written to the journals."""
        log.error("tfpreempt: %s failed: %s", where, error)
        self.record(Fault(where=where, error=f"{type(error).__name__}: {error}"))
