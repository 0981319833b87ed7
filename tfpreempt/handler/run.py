"""One handler, or one fit, as the session sees it: its steps, saves and journal."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfpreempt.checkpoint.directory import catalog
from tfpreempt.checkpoint.directory.commit import Permit
from tfpreempt.checkpoint.directory.manifest import Parent
from tfpreempt.checkpoint.mirror.shard_transfer import clear_others
from tfpreempt.checkpoint.restore.reshard import read_own
from tfpreempt.checkpoint.restore.save import Save
from tfpreempt.checkpoint.restore.state_loader import StateLoader
from tfpreempt.checkpoint.state.state import State
from tfpreempt.checkpoint.state.unfinished_caches import (
    clear_interrupted,
    written_caches,
)
from tfpreempt.coordination.deadlines import Deadlines
from tfpreempt.core.clock import process_seconds
from tfpreempt.core.events import (
    CacheWrite,
    Commit,
    Event,
    Exit,
    Fault,
    Outcome,
    Restored,
)
from tfpreempt.core.journal import Journal, journal_directory
from tfpreempt.core.restarts import num_restarts
from tfpreempt.handler.restore_agreement import Agreed
from tfpreempt.handler.status_file import Doing, Now, Telling, now_path, read_now
from tfpreempt.notice.watcher import Watcher
from tfpreempt.platforms.config import TerminationConfig

HANDS_IN = 5.0
"""Seconds at most for the end of the journal to be copied to the object store."""

log = logging.getLogger(__name__)

NEVER = 1 << 62
"""More steps than any training makes."""


@dataclasses.dataclass(eq=False)
class Run:
    """A handler, or a fit, that takes part in the session: counters, saves, journal.

    Main thread unless a method says otherwise.

    Args:
        config: how the process exits.
        start: the result of the start, equal on all workers.
        deadlines: how long a notice leaves.
        watcher: of the notices of this run; closed when the run is dropped.
        counter: the variable that holds the number of runs; None without a checkpoint.
        amid: what the state is in the middle of outside of steps too, such as
            "model.fit"; empty if the state is complete there.
        async_save: whether periodic saves may be asynchronous.
        is_alive: whether boundaries are still to come; any thread.

    Attributes:
        directory: the checkpoint directory.
        source: the directory of the commit that is restored: of the checkpoints, or of
            the snapshots.
        candidate: the commit that all workers restore; None to start from scratch.
        snapshots: of this worker in memory; None if not all workers have memory.
        saves_async: whether periodic saves are asynchronous.
        journal: records what happens to the run; any thread.
        record: appends an event to the journal; any thread.
        steps_made: steps that were completed in this process.
        stop_at: the value of `steps_made` at which the loop has to look at more than
            the flag; -1 if no step may follow.
        base: steps that the restored commit carries.
        saved_at: the value of `steps_made` at the newest save, tried or done; None if
            more than steps has come since, or the round of that save has committed
            nothing; equal on all workers.
        is_resumed: whether the run resumed from a commit that is not of the end of
            training, and has saved nothing since: the end may come without a step.
        left_at: its step when its exit was served. SystemExit may have been caught, or
            the exit function may have returned: another handler may resume from its
            commit.
        is_unconfirmed: whether only the chief knows if the newest save was committed:
            the save was asynchronous, or was made without a round.
        is_armed: whether training has begun.
        is_at_end: whether the fit came to its end, and `close` may commit that.
        is_closed: whether the run takes part no more.
    """

    config: TerminationConfig
    start: Agreed
    deadlines: Deadlines
    watcher: Watcher
    counter: Any = None
    _: dataclasses.KW_ONLY
    amid: str = ""
    async_save: dataclasses.InitVar[bool] = False
    is_alive: Callable[[], bool] = lambda: True
    steps_made: int = 0
    stop_at: int = 0
    base: int = dataclasses.field(init=False)
    saved_at: int | None = 0
    is_resumed: bool = False
    left_at: int | None = None
    is_unconfirmed: bool = False
    is_armed: bool = False
    is_at_end: bool = False
    is_closed: bool = False

    def __post_init__(self, async_save: bool) -> None:
        start = self.start
        self.directory = start.directory
        self.snapshots = start.snapshots
        self.candidate = start.candidate
        self.base = 0 if start.candidate is None else start.candidate.step or 0
        self.source = start.directory  # of the commit that is restored
        agreed = start.candidate
        if start.tier == "memory" and start.snapshots is not None:
            self.source = start.snapshots.directory
            agreed = None if agreed is None else start.snapshots.keep_states(agreed)
        found = catalog.scan(self.directory.path)
        self.directory.check_others([each for each in found if each.is_committed])
        highest = catalog.highest_sequence(found)
        if start.tier == "memory" and agreed is not None:
            # Its own number is its rank in memory; here it comes after what there is.
            agreed = dataclasses.replace(agreed, sequence=highest)
        if start.snapshots is not None:
            # The newest commit, as far as this worker knows; the chief's counts.
            token = "" if start.on_disk is None else start.on_disk.token
            start.snapshots.parent = Parent(token=token, sequence=highest)
            for each in (start.on_disk, start.candidate):
                if each is not None and each.manifest is not None:
                    start.snapshots.expect_as_in(each.manifest)
        self._states = StateLoader(
            self.directory.path, self.directory.cluster, agreed=agreed, after=highest
        )
        self.saves_async = async_save and self.directory.contents.can_be_async
        self._status: Telling | None = None  # written while training runs
        self.journal = Journal(
            journal_directory(self.directory.path),
            self.directory.cluster.worker,
            self.directory.clock,
            os.environ.get("TFPREEMPT_INCARNATION", start.token),
        )
        self.record = self.journal.record
        # Also at the end of the interpreter: Python ends a thread that still runs then,
        # and the process aborts if the thread is in a C++ function.
        weakref.finalize(self, self.watcher.close)
        if self.directory.mirror is not None:
            weakref.finalize(self, self.directory.mirror.stop).atexit = False

    # --- what is known of it ---------------------------------------------------------

    @property
    def step(self) -> int:
        """The step that a save would carry; any thread."""
        return self.base + self.steps_made

    @property
    def has_moved(self) -> bool:
        """Whether anything has come since its newest save; equal on all workers."""
        return self.steps_made != self.saved_at

    # --- the start -------------------------------------------------------------------

    def restore(self, *, named_states: bool = True) -> None:
        """Restores the agreed commit, and the number of its steps.

        Args:
            named_states: False if the named States were loaded before.

        Raises:
            CheckpointMismatchError: another model's checkpoint; nothing was assigned.
        """
        clock, found = self.directory.clock, self.candidate
        began = clock.monotonic()
        world = self.directory.cluster.world
        restored = Restored(path=None, step=0, sequence=0, world_size=world)
        if found is not None:
            restored = self.source.restore(found, named_states=named_states)
            if self.counter is not None and found.prefix is None:
                self.counter.assign(restored.step)  # saved without the variable
            if self.counter is not None:
                step = int(self.counter.numpy())
                restored = dataclasses.replace(restored, step=step)
            if self.source is not self.directory:
                self.directory.contents.restored(found)
            restored = dataclasses.replace(restored, tier=self.start.tier)
        restored = dataclasses.replace(restored, skipped=tuple(self.start.skipped))
        took = self.start.seconds + clock.monotonic() - began
        self._record_start(restored, took)
        if restored.path is not None:
            # Not a fault, but the first question about a restarted run.
            log.warning(
                "tfpreempt: goes on at step %d, of %s", restored.step, restored.path
            )
        elif restart := num_restarts():
            log.warning(
                "tfpreempt: this is restart %d, and there is no commit in %s: training "
                "begins at step 0. If there was one, see whether the directory is the "
                "same, on storage that outlives the machine",
                restart,
                self.directory.path,
            )
        self.base = restored.step
        manifest = None if found is None else found.manifest
        is_of_end = manifest is not None and manifest.because == "finished"
        self.is_resumed = found is not None and not is_of_end

    def adopt(self) -> None:
        """Counts from the agreed commit, without a restore."""
        self.candidate = None
        self.source.contents.free_read_ahead()
        world = self.directory.cluster.world
        adopted_as = Restored(path=None, step=self.base, sequence=0, world_size=world)
        self._record_start(adopted_as, self.start.seconds)

    @property
    def unrestored_variables(self) -> Sequence[str]:
        """Names of variables of the restored commit that no object has yet."""
        return self.source.contents.unrestored_variables()

    def load_state(self, state: State) -> bool:
        """Loads one named State, registered or not, of what was restored or saved
        since; returns whether there was something."""
        return self._states.load(state)

    def start_mirror(self) -> None:
        """The chief mirrors its commits from now on.

        Raises:
            ConfigurationError: another open handler mirrors to the same place.
        """
        mirror = self.directory.mirror
        if mirror is not None:
            path, token = self.directory.path, self.start.token
            mirror.begin(path, self.start.on_disk, self.record, journal_directory(path))
            mirror.task(functools.partial(clear_others, mirror.store, token))

    def arm(self, doing: Callable[[], Doing]) -> None:
        """Training begins: the random generators are set, and the status is written.

        Args:
            doing: what the process does now; any thread.
        """
        self.is_armed = True
        self.watcher.rearm()
        generators = self.source.random_state
        if self.candidate is not None and generators is not None:
            read_own(self.candidate, generators, self.source.cluster)
        mine = weakref.ref(self)

        def look() -> Now | None:
            run = mine()
            if run is None:
                return None
            run.record_caches()
            return run._now(doing())

        path = now_path(self.journal.path.parent, self.directory.cluster.worker)
        self._status = Telling(path, self.directory.clock, look)

    def clear_caches(self, *, is_all_restored: bool) -> None:
        """Deletes the unfinished files of `Dataset.cache(path)` of earlier processes.

        Called after the restore, before data are read.

        Args:
            is_all_restored: False if the program may make iterators later that the
                commit restores: files that are older than the commit are kept.
        """
        found, since = self.candidate, 0.0
        if found is not None and not is_all_restored:
            since = math.inf if found.time is None else found.time
        clear_interrupted(self.journal.read_earlier(CacheWrite), since=since)

    def record_caches(self) -> None:
        """Records the caches that this process has begun to write; any thread."""
        for path, lock in written_caches():
            self.record(CacheWrite(path=path, lock=lock))

    def _record_start(self, restored: Restored, seconds: float) -> None:
        """Records the start, with the step that an earlier process had reached."""
        path = now_path(self.journal.path.parent, self.directory.cluster.worker)
        before = read_now(path)
        told = dataclasses.replace(
            restored,
            seconds=seconds,
            process_seconds=process_seconds(),
            start=os.environ.get("TFPREEMPT_SUPERVISED"),
            reached=None if before is None else before.step,
        )
        self.record(told)

    # --- the status ------------------------------------------------------------------

    def _now(self, doing: Doing) -> Now:
        """How far it is, but for what takes two looks; any thread."""
        clock, deadlines = self.directory.clock, self.deadlines
        wall, since, told = clock.wall(), deadlines.since_notice, deadlines.told
        left = None if told is None else told - clock.monotonic()
        return Now(
            at=wall,
            worker=self.directory.cluster.worker,
            world=self.directory.cluster.world,
            host=socket.gethostname(),
            pid=os.getpid(),
            doing=doing,
            step=self.step,
            noticed_at=None if since is None else wall - since,
            deadline=None if left is None else wall + left,
            upload=self.directory.mirror_status,
        )

    # --- a save ----------------------------------------------------------------------

    def stage(self, name: str, *args: Any, **kwargs: Any) -> Save:
        """Captures and writes this worker's part of a save.

        Args:
            name: of the save; equal on all workers, and never used again.
            *args: the user's, for a manager's `save` or a save_fn.
            **kwargs: the user's.
        """
        return self.write(self.capture(name, None, *args, **kwargs))

    def capture(
        self, name: str, permit: Permit | None, *args: Any, **kwargs: Any
    ) -> Save:
        """Captures this worker's part of a save.

        Args:
            name: see `stage`.
            permit: of an asynchronous save; None if training waits for the save.
            *args: see `stage`.
            **kwargs: see `stage`.
        """
        if self.snapshots is not None:
            self.snapshots.give_up()
        self.saved_at = self.steps_made
        self.is_resumed = False
        if self.counter is not None:
            self.counter.assign(self.step)
        self.source.contents.warn_of_unrestored()
        attempt = f"{self.start.token}-{name}"
        save = Save(self.directory, self.step, attempt, permit)
        save.capture(*args, **kwargs)
        return save

    def write(self, save: Save) -> Save:
        """Writes what was captured, and returns the save; any thread."""
        save.write()
        exchange, is_chief = self.directory.exchange, self.directory.cluster.is_chief
        if not (is_chief or (exchange is not None and exchange.is_apart)):
            self._states.expect(save.staging)
        return save

    def commit(self, save: Save, because: str, workers: Sequence[int]) -> Commit | None:
        """Publishes a save and records the commit; on the chief, any thread.

        Args:
            save: was written.
            because: "preemption", "periodic" and so on; in the manifest.
            workers: the workers that have written their parts.
        """
        deadlines = self.deadlines
        commit = save.publish(because, workers, left=lambda: deadlines.left)
        if commit is None:
            return None
        if self.snapshots is not None:
            made = self.directory.read_back(commit.path)
            if made is not None and made.manifest is not None:
                parent = Parent(token=made.token, sequence=commit.sequence)
                self.snapshots.parent = parent
                self.snapshots.expect_as_in(made.manifest)
        commit = dataclasses.replace(
            commit,
            notice_to_commit_seconds=(
                deadlines.since_notice if because == "preemption" else None
            ),
            step_seconds=deadlines.step_seconds() or None,
        )
        took = commit.save_seconds
        if save.is_async:  # takes longer, as training continues beside it
            took = min(took, deadlines.save_seconds or took)
        deadlines.save_seconds = deadlines.planned(took, save.share_seconds)
        self.record(commit)
        log.info("tfpreempt: committed step %d in %s", commit.step, commit.path)
        return commit

    def take_snapshot(self, name: str) -> bool:
        """Captures a snapshot of this step, if this worker has memory for any.

        Args:
            name: see `stage`.

        Returns:
            Whether the snapshot was captured, and the snapshot before is intact.
        """
        if self.snapshots is None:
            return False
        if self.counter is not None:
            self.counter.assign(self.step)
        attempt = f"{self.start.token}-{name}"
        return self.snapshots.capture(self.step, attempt)

    # --- the end ---------------------------------------------------------------------

    def record_exit(
        self, outcome: Outcome, why: str = "", code: int | None = None
    ) -> None:
        """Records in the journal how the process exits; any thread.

        Args:
            outcome: of the process.
            why: the reason, for people.
            code: the exit code; None if the error of the program decides on the code.
        """
        self.record(Exit(outcome=outcome, code=code, step=self.step, detail=why))

    def close(self) -> None:
        """Ends the sources, the mirror and the journal, and releases the directory."""
        self.is_closed = True
        self.stop_at = -1
        self.watcher.close()
        if self._status is not None:
            self._status.stop()
        if self.snapshots is not None:
            self.snapshots.close()
        if self.directory.mirror is not None:
            self.directory.mirror.hand_in_journal(HANDS_IN)
            self.directory.mirror.close()
            if self._status is not None:
                self._status.write_upload(self.directory.mirror_status)
        self.release()
        self.journal.close()

    def release(self) -> None:
        """Lets other programs use the directory; a save takes the lease again."""
        if self.snapshots is not None:
            self.snapshots.give_up()
        self.directory.release()


@dataclasses.dataclass(eq=False)
class Runs:
    """The open runs of a session, oldest first; iterated on any thread.

    A run without a step is held weakly: a program that drops the handler has closed
    the run. From the first step on the run is kept, because a program that never closes
    its handler still gets a last boundary.

    Attributes:
        kept: the runs with which training has begun.
    """

    kept: set[Run] = dataclasses.field(default_factory=set)
    _refs: list[weakref.ref[Run]] = dataclasses.field(default_factory=list)

    def __iter__(self) -> Iterator[Run]:
        runs = [run for ref in self._refs if (run := ref()) is not None]
        return iter([run for run in runs if not run.is_closed])

    def __bool__(self) -> bool:
        return any(True for _ in self)

    def add(self, run: Run) -> None:
        """Adds a run, which takes part from now on."""
        self._refs = [weakref.ref(each) for each in (*self, run)]

    def record(self, event: Event) -> None:
        """Writes an event to every journal; any thread."""
        for run in self:
            run.record(event)

    def fault(self, where: str, error: Exception) -> None:
        """Training survives this; it is logged and written to the journals."""
        log.error("tfpreempt: %s failed: %s", where, error)
        self.record(Fault(where=where, error=f"{type(error).__name__}: {error}"))
