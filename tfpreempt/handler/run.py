"""`Run`: the common part of a handler and a fit.

A run counts steps, makes saves and writes the journal. The session of the process holds
the open runs.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
import socket
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfpreempt.checkpoint.directory import catalog
from tfpreempt.checkpoint.directory.commit import CancellationToken
from tfpreempt.checkpoint.directory.layout import name_remark
from tfpreempt.checkpoint.directory.manifest import Parent
from tfpreempt.checkpoint.mirror.shard_transfer import clear_others
from tfpreempt.checkpoint.restore.reshard import is_resized, load_worker_state
from tfpreempt.checkpoint.restore.save import Save
from tfpreempt.checkpoint.restore.state_loader import StateLoader
from tfpreempt.checkpoint.state.state import WorkerSteps
from tfpreempt.checkpoint.state.unfinished_caches import (
    clear_interrupted,
    written_caches,
)
from tfpreempt.coordination.deadlines import Deadlines
from tfpreempt.core import frameworks
from tfpreempt.core.clock import process_seconds
from tfpreempt.core.events import (
    BadStep,
    CacheWrite,
    Commit,
    Event,
    Exit,
    Fault,
    Outcome,
    Restored,
)
from tfpreempt.core.journal import Journal, journal_directory
from tfpreempt.core.replay import read_replay
from tfpreempt.core.restarts import num_restarts
from tfpreempt.errors import BadStepsError
from tfpreempt.handler.restore_agreement import Agreed
from tfpreempt.handler.status_file import (
    StatusWriter,
    WorkerActivity,
    WorkerStatus,
    read_worker_status,
    status_path,
    with_step_times,
)
from tfpreempt.notice.watcher import Watcher
from tfpreempt.platforms.config import TerminationConfig

HANDS_IN = 5.0
"""Longest time in seconds for the upload of the last journal entries."""

LOGS_EVERY = 60.0
"""Minimum time in seconds between two log lines about periodic commits of a process."""

_COMPLETE = (
    ". The previous run ended at this step. No step follows, unless the program now "
    "trains longer, or has left its loop by break"
)

RESTORED_COMMIT_IS_KEPT = (
    "no step was made since the restart, and the first step creates variables of the "
    "restored commit, such as those of an optimizer, so the restored commit is kept. "
    "Changes since the restart are not saved"
)
"""Log line about a run with variables that are `created_later`."""

log = logging.getLogger(__name__)

NEVER = 1 << 62
"""A step number larger than in any training."""


@dataclasses.dataclass(eq=False)
class Run:
    """Counts steps, makes saves and writes the journal, for a handler or a fit.

    Use on the main thread, unless a method says otherwise.

    Args:
        config: configuration of the exit.
        start: result of the agreement at the start, such as the commit to restore.
        deadlines: source of the time left after a notice.
        watcher: watcher of the notice sources; closed when the program has dropped the
            run.
        counter: variable that holds the number of `run()` calls; None without a
            checkpoint.
        amid: name of an activity, such as "model.fit", during which the state is
            incomplete even between steps; "" if the state between steps is complete.
        async_save: whether periodic saves may be asynchronous.
        is_alive: function that returns whether the run will reach more boundaries;
            called on any thread.
        before_save: function called on the main thread before the state is captured;
            raises an error if the state must not be saved. Or returns the error, which
            is raised after the capture: the other workers may wait in a collective
            operation of the capture.

    Attributes:
        directory: the checkpoint directory.
        source: directory of the commit to restore: the checkpoint directory, or the
            directory of the snapshots.
        candidate: the commit to restore; None to start from scratch.
        snapshots: snapshots of this worker in memory; None if at least one worker has
            no memory for snapshots.
        states: loader of named States from the restored commit, or a later one.
        journal: journal of the run's events; for use on any thread.
        steps_made: number of steps completed in this process.
        stop_at: value of `steps_made` from which on a boundary calls the session even
            if no notice has raised the flag; -1 if no step may follow.
        base: number of steps in the restored commit.
        saved_at: value of `steps_made` at the newest save, even if the save failed.
            None if the state has changed since without a counted step, or if the round
            of the save made no commit. Equal on every worker.
        may_have_changed: whether the program may have changed its state since the
            newest save without a step: `save()` or `check_preemption()` has returned,
            or a watch scope has begun. Equal on every worker.
        is_resumed: whether the run was restored from a commit of unfinished training,
            and has saved nothing since. Training may then end without another step, and
            needs a final commit.
        left_at: value of `step` at the call of the exit function; None before. If the
            process continues nevertheless (SystemExit was caught, or the exit function
            returned), another handler may resume from the commit.
        is_unconfirmed: whether only the chief knows if the newest save was committed:
            the save was asynchronous, or was made outside of a round.
        is_armed: whether training has begun.
        save_arguments: positional and keyword arguments of the program for a manager's
            `save` or for a save_fn.
        is_at_end: whether the fit ended as planned, so that `close` may commit the
            final state.
        is_closed: whether the run no longer participates.
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
    before_save: Callable[[], Exception | None] = lambda: None
    steps_made: int = 0
    stop_at: int = 0
    base: int = dataclasses.field(init=False)
    saved_at: int | None = 0
    may_have_changed: bool = False
    is_resumed: bool = False
    left_at: int | None = None
    is_unconfirmed: bool = False
    is_armed: bool = False
    save_arguments: tuple[tuple[Any, ...], Mapping[str, Any]] = ((), {})
    is_at_end: bool = False
    is_closed: bool = False

    def __post_init__(self, async_save: bool) -> None:
        start = self.start
        self.directory = start.directory
        self.snapshots = start.snapshots
        self.candidate = start.candidate
        self.base = 0 if start.candidate is None else start.candidate.step or 0
        self.source = start.directory  # directory of the commit to restore
        agreed = start.candidate
        if start.tier == "memory" and start.snapshots is not None:
            self.source = start.snapshots.directory
            agreed = None if agreed is None else start.snapshots.keep_states(agreed)
        found = catalog.scan(self.directory.path)
        self.directory.check_others([each for each in found if each.is_committed])
        highest = catalog.highest_sequence(found)
        if start.tier == "memory" and agreed is not None:
            # The sequence of a snapshot counts snapshots, not commits. For the States,
            # give the snapshot a sequence after the commits on disk.
            agreed = dataclasses.replace(agreed, sequence=highest)
        if start.snapshots is not None:
            # The newest commit known to this worker; only the chief's value is used.
            token = "" if start.on_disk is None else start.on_disk.token
            start.snapshots.parent = Parent(token=token, sequence=highest)
            for each in (start.on_disk, start.candidate):
                if each is not None and each.manifest is not None:
                    start.snapshots.expect_as_in(each.manifest)
        self.states = StateLoader(
            self.directory.path,
            self.directory.cluster,
            agreed=agreed,
            after=highest,
            loaded={each.name for each in self.directory.registry.in_order()},
        )
        self._async_save = async_save and self.directory.contents.can_be_async
        self._status: StatusWriter | None = None  # `arm` starts the status file
        self.journal = Journal(
            journal_directory(self.directory.path),
            self.directory.cluster.worker,
            self.directory.clock,
            os.environ.get("TFPREEMPT_INCARNATION", start.token),
        )
        # Close the watcher when the interpreter exits, too. Python then ends running
        # threads, and a thread inside a C++ function would abort the process.
        weakref.finalize(self, self.watcher.close)
        if self.directory.mirror is not None:
            weakref.finalize(self, self.directory.mirror.stop).atexit = False

    # --- the counters ----------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of steps over all restarts; may be read on any thread."""
        return self.base + self.steps_made

    @property
    def has_moved(self) -> bool:
        """Whether the state has changed since the newest save.

        The value is equal on every worker.
        """
        return self.steps_made != self.saved_at

    @property
    def has_moved_or_changed(self) -> bool:
        """Whether the state may have changed since the newest save, also without a
        step.

        Changes in front of the first step of the process do not count: a restart
        executes this code again, and a commit would lack the variables that the first
        step creates.
        """
        return self.has_moved or (self.may_have_changed and self.steps_made > 0)

    @property
    def saves_async(self) -> bool:
        """Whether periodic saves are asynchronous: requested by `async_save`, supported
        by the contents of the save, and without arguments of the program."""
        return self._async_save and not any(self.save_arguments)

    # --- the start -------------------------------------------------------------------

    def restore(
        self,
        *,
        named_states: bool = True,
        is_partial: bool = False,
        assign: Callable[[str], None] | None = None,
    ) -> None:
        """Restores the agreed commit, and its number of steps.

        Args:
            named_states: whether to load the named States; False if loaded before.
            is_partial: whether variables that do not fit the commit keep their values.
            assign: function that restores the variables; see `Directory.restore`.

        Raises:
            CheckpointMismatchError: the commit belongs to another model; no variable
                was assigned.
        """
        clock, found = self.directory.clock, self.candidate
        began = clock.monotonic()
        num_workers = self.directory.cluster.num_workers
        restored = Restored(path=None, step=0, sequence=0, world_size=num_workers)
        if found is not None:
            restored = self.source.restore(
                found,
                named_states=named_states,
                is_partial=is_partial,
                assign=assign,
            )
            step = restored.step
            if self.counter is not None:
                if found.prefix is None or assign is not None:
                    # Without a TensorFlow checkpoint, there is no counter variable.
                    self.counter.assign(step)
                step = int(self.counter.numpy())
            if self.source is not self.directory:
                self.directory.contents.restored(found)
            if not is_resized(found, self.source.cluster):
                own = WorkerSteps(step)
                load_worker_state(found, own, self.source.cluster)
                step = own.steps
            restored = dataclasses.replace(restored, step=step, tier=self.start.tier)
        restored = dataclasses.replace(restored, skipped=tuple(self.start.skipped))
        took = self.start.seconds + clock.monotonic() - began
        self._record_start(restored, took)
        is_of_end = found is not None and found.because == "finished"
        if restored.path is not None:
            log.info(
                "resumed at step %d from %s%s",
                restored.step,
                _shown(restored.path),
                # A fit logs a line of its own, because `epochs` may have been raised.
                _COMPLETE if is_of_end and not self.amid else "",
            )
        elif (restart := num_restarts()) and (
            # The journal of this directory begins with this start, or has a commit.
            len(self.journal.read_earlier(Restored)) < 2
            or self.journal.read_earlier(Commit)
        ):
            log.warning(
                "no commit in %s at restart %d: training starts from step 0. If an "
                "earlier start made commits, check that the directory is the same, on "
                "storage that outlives the machine",
                self.directory.path,
                restart,
            )
        self.base = restored.step
        self.is_resumed = found is not None and not is_of_end

    def adopt(self) -> None:
        """Starts the run without a restore, at the commit's number of steps."""
        self.candidate = None
        self.source.contents.free_read_ahead()
        num_workers = self.directory.cluster.num_workers
        adopted_as = Restored(
            path=None, step=self.base, sequence=0, world_size=num_workers
        )
        self._record_start(adopted_as, self.start.seconds)

    def start_mirror(self) -> None:
        """Starts to mirror commits. Does nothing on workers other than the chief.

        Raises:
            ConfigurationError: another open handler mirrors to the same location.
        """
        mirror = self.directory.mirror
        if mirror is not None:
            path, token = self.directory.path, self.start.token
            mirror.begin(path, self.start.on_disk, self.record, journal_directory(path))
            mirror.enqueue(functools.partial(clear_others, mirror.store, token))

    def arm(
        self,
        doing: Callable[[], WorkerActivity],
        step_times: Callable[[], Sequence[float]],
    ) -> None:
        """Begins training: sets the random generators, and starts the status file.

        Args:
            doing: function that returns the current activity of the process; called on
                any thread.
            step_times: function that returns the seconds of the newest steps.
        """
        self.is_armed = True
        self.watcher.rearm()
        generators = self.source.random_state
        if self.candidate is not None and generators is not None:
            load_worker_state(self.candidate, generators, self.source.cluster)
        mine = weakref.ref(self)

        def look() -> WorkerStatus | None:
            run = mine()
            if run is None:
                return None
            run.record_caches()
            for framework in frameworks.adapters("compile_cache"):
                if run.steps_made > 1:
                    framework.keep(run.directory.path, run.directory.mirror)
            return with_step_times(run._now(doing()), step_times())

        cluster, clock = self.directory.cluster, self.directory.clock
        path = status_path(self.journal.path.parent, cluster.worker)
        self._status = StatusWriter(path, clock, look, cluster.framework)

    def clear_caches(self, *, is_all_restored: bool) -> None:
        """Deletes unfinished files of `Dataset.cache(path)` of earlier processes.

        Called after the restore, before data are read.

        Args:
            is_all_restored: whether every iterator of the commit is restored. If False,
                the program may restore more iterators later, so files older than the
                commit are kept.
        """
        found, since = self.candidate, 0.0
        if found is not None and not is_all_restored:
            since = math.inf if found.time is None else found.time
        clear_interrupted(self.journal.read_earlier(CacheWrite), since=since)

    def record_caches(self) -> None:
        """Records the files of `Dataset.cache(path)` begun by the process.

        May be called on any thread.
        """
        for path, lock in written_caches():
            self.record(CacheWrite(path=path, lock=lock))

    def _record_start(self, restored: Restored, seconds: float) -> None:
        """Records the start, with the step reached by the previous process.

        Args:
            restored: event that describes the restored commit.
            seconds: duration of the start.
        """
        path = status_path(self.journal.path.parent, self.directory.cluster.worker)
        before = read_worker_status(path)
        started = dataclasses.replace(
            restored,
            seconds=seconds,
            process_seconds=process_seconds(),
            start=os.environ.get("TFPREEMPT_SUPERVISED"),
            reached=None if before is None else before.step,
        )
        self.record(started)

    # --- the status ------------------------------------------------------------------

    def _now(self, doing: WorkerActivity) -> WorkerStatus:
        """Returns the current status, without the rate, which needs two samples.

        Called on the thread of the status file.

        Args:
            doing: current activity of the process.
        """
        clock, deadlines = self.directory.clock, self.deadlines
        wall, since = clock.wall(), deadlines.since_notice
        ends = deadlines.terminates_at
        return WorkerStatus(
            at=wall,
            worker=self.directory.cluster.worker,
            num_workers=self.directory.cluster.num_workers,
            host=socket.gethostname(),
            pid=os.getpid(),
            doing=doing,
            step=self.step,
            noticed_at=None if since is None else wall - since,
            deadline=None if ends is None else wall + (ends - clock.monotonic()),
            upload=self.directory.mirror_status,
        )

    # --- a save ----------------------------------------------------------------------

    def stage(self, name: str) -> Save:
        """Captures and writes this worker's part of a save (its files of the commit).

        Args:
            name: name of the save; equal on every worker, and never used again.
        """
        return self.write(self.capture(name, None))

    def capture(self, name: str, cancel_token: CancellationToken | None) -> Save:
        """Copies the values for this worker's part of a save; `write` writes the part.

        Args:
            name: name of the save, as in `stage`.
            cancel_token: token with which an asynchronous save can be cancelled; None
                if training waits for the save.
        """
        refusal = self.before_save()
        if self.snapshots is not None:
            self.snapshots.give_up()
        self.saved_at = self.steps_made
        self.may_have_changed = self.is_resumed = False
        if self.counter is not None:
            self.counter.assign(self.step)
        self.source.contents.warn_of_unrestored()
        attempt = f"{self.start.token}-{name}"
        save = Save(self.directory, self.step, attempt, cancel_token)
        args, kwargs = self.save_arguments
        save.capture(*args, **kwargs)
        if refusal is not None:
            if self.directory.cluster.is_chief:
                save.discard()
            raise refusal
        return save

    def write(self, save: Save) -> Save:
        """Writes a captured part, and returns the save; may run on any thread."""
        save.write()
        exchange, is_chief = self.directory.exchange, self.directory.cluster.is_chief
        if not (is_chief or (exchange is not None and exchange.has_separate_storage)):
            self.states.expect(save.staging)
        return save

    def commit(self, save: Save, because: str, workers: Sequence[int]) -> Commit | None:
        """Makes a save a commit, and records the commit in the journal.

        Called on the chief, on any thread.

        Args:
            save: the written save.
            because: reason for the save, for the manifest: "preemption" or "periodic",
                for example.
            workers: workers whose parts are written.

        Returns:
            The commit; None if a save_fn left no files to commit.
        """
        deadlines = self.deadlines
        commit = save.publish(because, workers, left=lambda: deadlines.left)
        if commit is None:
            return None
        if self.snapshots is not None:
            made = save.made
            assert made is not None
            assert made.manifest is not None
            self.snapshots.parent = Parent(token=made.token, sequence=commit.sequence)
            self.snapshots.expect_as_in(made.manifest)
        commit = dataclasses.replace(
            commit,
            notice_to_commit_seconds=(
                deadlines.since_notice if because == "preemption" else None
            ),
            step_seconds=deadlines.step_seconds() or None,
        )
        took = commit.save_seconds
        # Do not raise the estimate for the save after a notice: an asynchronous save
        # takes longer.
        if save.is_async:
            took = min(took, deadlines.save_seconds or took)
        deadlines.save_seconds = deadlines.planned(took, save.share_seconds)
        self.record(commit)
        return commit

    def take_snapshot(self, name: str) -> bool:
        """Captures a snapshot of the current step, if the supervisor has lent memory.

        Args:
            name: name of the save, as in `stage`.

        Returns:
            Whether the snapshot was captured, and the previous snapshot is intact too.
        """
        if self.snapshots is None:
            return False
        refusal = self.before_save()
        if self.counter is not None:
            self.counter.assign(self.step)
        attempt = f"{self.start.token}-{name}"
        return self.snapshots.capture(self.step, attempt) and refusal is None

    # --- the end ---------------------------------------------------------------------

    def record(self, event: Event) -> None:
        """Appends an event to the journal; may run on any thread."""
        self.journal.record(event)

    def record_exit(
        self,
        outcome: Outcome,
        why: str = "",
        code: int | None = None,
        *,
        is_permanent: bool = False,
    ) -> None:
        """Records the exit of the process in the journal; may run on any thread.

        Args:
            outcome: outcome of the process.
            why: the reason, for people.
            code: the exit code; None if the code depends on an error of the program.
            is_permanent: whether each restart would end by the same error.
        """
        self.record(
            Exit(
                outcome=outcome,
                code=code,
                step=self.step,
                detail=why,
                is_permanent=is_permanent,
            )
        )

    def close(self) -> None:
        """Closes the notice sources, mirror and journal, and releases the lease."""
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
        """Releases the lease of the directory, so that the next start need not wait.

        A snapshot in progress is given up. A later save acquires the lease again.
        """
        if self.snapshots is not None:
            self.snapshots.give_up()
        self.directory.release()


@dataclasses.dataclass(eq=False)
class Runs:
    """The open runs of a session, oldest first; any thread may iterate.

    Before the first step a run is held by a weak reference, so the run of a handler
    that the program drops is closed. From the first step on the run is held by `kept`:
    if the program never closes its handler, the final state is still committed at the
    end of the program.

    Attributes:
        kept: runs whose training has begun.
    """

    kept: set[Run] = dataclasses.field(default_factory=set)
    _refs: list[weakref.ref[Run]] = dataclasses.field(default_factory=list)
    # Key: a directory. Value: its newest periodic commit, if the commit was not logged.
    _unlogged: dict[str, Commit] = dataclasses.field(default_factory=dict)
    # Monotonic seconds from which a periodic commit may be logged again.
    _logs_from: float = -math.inf

    def __iter__(self) -> Iterator[Run]:
        runs = [run for ref in self._refs if (run := ref()) is not None]
        return iter([run for run in runs if not run.is_closed])

    def __bool__(self) -> bool:
        return any(True for _ in self)

    def add(self, run: Run) -> None:
        """Adds a run, which takes part in saves and notices from now on."""
        self._refs = [weakref.ref(each) for each in (*self, run)]

    def record(self, event: Event) -> None:
        """Writes an event to the journal of every run; any thread may call."""
        for run in self:
            run.record(event)

    def log_commit(self, run: Run, commit: Commit) -> None:
        """Logs a commit; a periodic commit at most once per `LOGS_EVERY` seconds.

        So the log has the first periodic commit of a process, and `log_last` adds the
        last; only the journal has all commits. A commit because of a notice is not
        logged here, because the exit logs the commit. Called on any thread.
        """
        directory, now = run.directory, run.directory.clock.monotonic()
        if commit.because == "preemption":
            self._unlogged.pop(directory.path, None)
            return
        self._unlogged[directory.path] = commit
        more = ""
        if commit.because == "periodic":
            if now < self._logs_from:
                return
            if self._logs_from == -math.inf:
                more = " (further periodic commits are logged at most once a minute)"
            self._logs_from = now + LOGS_EVERY
        self.log_last(run, more)

    def log_last(self, run: Run, more: str = "") -> None:
        """Logs the newest commit of a run, if the commit was not logged before.

        Args:
            run: the run.
            more: end of the line.
        """
        commit = self._unlogged.pop(run.directory.path, None)
        if commit is not None:
            path = _shown(commit.path)
            log.info("checkpoint for step %d committed: %s%s", commit.step, path, more)

    def fault(self, where: str, error: Exception) -> None:
        """Logs an error after which training continues, and records the error."""
        log.warning("%s failed: %s", where, error)
        self.record(Fault(where=where, error=f"{type(error).__name__}: {error}"))


def record_bad_step(run: Run, found: BadStep, why: str) -> None:
    """Records a bad step on the chief, and checks that the next start can read the
    record: otherwise each start would find the step again, without end.

    Args:
        run: the run.
        found: the bad step.
        why: description of the step, for an error message.

    Raises:
        BadStepsError: the journal cannot be written.
    """
    run.record(found)
    names = ("fit", "epoch", "batch", "is_sought")
    wanted, records = dataclasses.asdict(found), run.journal.read_earlier(BadStep)
    if not any(all(each.get(n) == wanted[n] for n in names) for each in records):
        raise BadStepsError(
            f"A bad step ({why}) could not be recorded in the journal "
            f"{str(run.journal.path)!r}; expected a file that this user owns, and that "
            "no other user can write. Correct the owner, the permissions or the space "
            "on the disk, and start again"
        )


def created_later(run: Run) -> Sequence[str]:
    """Returns the names of restored variables that a save would lose, because the first
    step of the process creates them, such as those of an optimizer.

    Empty for a program that counts no steps: its code before this save is a step.
    """
    is_before_step = run.steps_made == 0 and run.base > 0
    return run.source.contents.created_later() if is_before_step else ()


def next_stop(run: Run, steps: int) -> int:
    """Returns a value for `Run.stop_at`: a number of steps, or the end of a replay.

    Args:
        run: the run.
        steps: value of `stop_at` without a replay.
    """
    replay = read_replay()
    return steps if replay is None else min(steps, replay.until - run.base)


def _shown(path: str) -> str:
    """Returns the path of a commit, with a remark about its name, if any."""
    remark = name_remark(os.path.basename(path))
    return f"{path} ({remark})" if remark else path
