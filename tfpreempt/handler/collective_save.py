"""Saves that need every worker: in a round, or at a common point of the program.

A round is a notice with the agreement and the save that follow. A common point is a
call, such as `save()`, that every worker makes after the same number of steps.

A save has three steps: every worker writes its part (its files of the commit), every
worker reports that the part is written, and the chief writes the marker. In a round the
agreement controls the steps. Outside of a round, a worker reports to the chief with an
insert-once key. A periodic save may be asynchronous: training continues once this
worker has captured its part, and a thread writes the part and reports. At most one
asynchronous save runs at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from tfpreempt.checkpoint.directory.commit import CancellationToken
from tfpreempt.checkpoint.restore.save import AsyncSave, Save
from tfpreempt.coordination import keys
from tfpreempt.coordination.coordinator import Coordinator
from tfpreempt.coordination.key_gather import KeyGather
from tfpreempt.coordination.protocol_types import CommitKind, Key, NoticeKind
from tfpreempt.coordination.state_machine import PREEMPTION
from tfpreempt.coordination.store_executor import call_and_wait
from tfpreempt.core.cluster import Cluster
from tfpreempt.core.deadline import SAFETY
from tfpreempt.core.error_causes import describe_loss
from tfpreempt.core.events import BadStep, Commit, Fault
from tfpreempt.errors import BadStepsError, CollectiveReadError, SaveError
from tfpreempt.handler.exit import defer_sigint
from tfpreempt.handler.run import (
    RESTORED_COMMIT_IS_KEPT,
    Run,
    Runs,
    created_later,
    record_bad_step,
)
from tfpreempt.handler.snapshots import TRIES, Snapshots, SnapshotTiming

log = logging.getLogger(__name__)

ASKS_AGAIN = 0.05
"""Seconds until a due save is retried while another save is being written."""

_TICK_SECONDS = 0.05  # seconds between two checks for a notice, during a wait
_LONGEST_FOR_SNAPSHOT = 1.0  # longest wait for the previous snapshot, in seconds

_ALL = "all"  # chief's outcome: every worker has captured the snapshot
_OVER = "over"  # chief's outcome: no more snapshots are taken


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Veto:
    """The report of a worker that has found a bad step, so that no worker may commit.

    Attributes:
        reason: the reason, for the log of every worker.
        run: token of the run.
        bad_step: the bad step, which the chief records.
    """

    reason: str
    run: str
    bad_step: BadStep

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Veto:
        """Returns the report from the fields in a key."""
        return cls(
            reason=str(fields["reason"]),
            run=str(fields["run"]),
            bad_step=BadStep(**fields["bad_step"]),
        )


class VetoError(SaveError):
    """Raised in a save, on a worker that has found a bad step, and on the chief: all
    workers stop soon, and the chief records the step then."""

    def __init__(self, veto: Veto) -> None:
        super().__init__(veto.reason)
        self.extra: keys.Extra = {"veto": dataclasses.asdict(veto)}


def first_of(vetoes: Sequence[Veto]) -> Veto:
    """Returns the report with the earliest bad step; a later step may be bad only
    because of an earlier step."""

    def order(veto: Veto) -> tuple[int, int, int, bool]:
        found = veto.bad_step
        return found.fit, found.epoch, found.batch, found.is_sought

    return min(vetoes, key=order)


@dataclasses.dataclass(eq=False)
class CollectiveSaves:
    """Saves at common points: `save()`, saves by step count, the final save.

    Use on the main thread, unless a method says otherwise.

    Args:
        cluster: the workers of the run.
        prefix: namespace of the keys.
        coordinator: coordinator of this worker; gives the notice, its deadline, and the
            key-value store.
        runs: the open runs.
        on_failure: function called with an error if this worker could not join
            a collective read; reports the error to the peers.
    """

    cluster: Cluster
    prefix: str
    coordinator: Coordinator
    runs: Runs
    on_failure: Callable[[Exception], None]
    _saves: int = 0  # number of saves begun, not counting final saves
    _fit: int = 1  # number of the current training (handler or fit) in this process
    # On the chief: workers that have finished training.
    _final: set[int] = dataclasses.field(default_factory=set)
    _listens: bool = False
    _gathering: KeyGather | None = None
    # Key: token of a run. Value: name and step of the newest save of the run.
    _newest: dict[str, tuple[str, int]] = dataclasses.field(default_factory=dict)
    # On the chief: names of saves that were not committed.
    _dropped: set[str] = dataclasses.field(default_factory=set)
    _under_way: AsyncSave | None = None
    # Key: token of a run. Value: error of the newest failed asynchronous save of the
    # run.
    _errors: dict[str, str] = dataclasses.field(default_factory=dict)

    def finishing(self) -> None:
        """Notifies the chief that this worker has finished training.

        Later saves of the chief do not wait for this worker.
        """
        self.end_async()
        if not self.cluster.is_chief:
            name = f"{self.prefix}/final-{self._fit}/{self.cluster.worker}"
            executor = self.coordinator.executor
            executor.insert(name, keys.encode(True), lambda held: None)
        self._fit += 1
        self._final = set()
        self._listens = False

    # --- the saves that a program, a period or the end asks for ----------------------

    def save(self, run: Run, because: str, *, is_async: bool = False) -> Commit | None:
        """Saves on every worker; every worker calls the method at the same point.

        Args:
            run: the run to save.
            because: reason for the save, written into the manifest of the commit:
                "save", "periodic", "error" or "finished".
            is_async: whether the save is asynchronous, see `begin`.

        Returns:
            The commit, on the chief. None on the other workers, because the chief may
            still be writing the commit, and for an asynchronous save.

        Raises:
            SaveError: (chief) a worker's part did not arrive in time.
            CheckpointError: this worker's part could not be written.
        """
        name = self._next_name(run, because)
        self.coordinator.is_saving = True
        try:
            with defer_sigint(lambda: True), self.breaking_off():
                if is_async:
                    self.begin(run, name, self._final, because)
                    return None
                self.end_async()
                self._remember(run, name)
                write = functools.partial(run.stage, name)
                return self._complete(run, name, because, self._final, write)
        finally:
            self.coordinator.is_saving = False

    def try_save(self, run: Run, because: str = "periodic") -> None:
        """Saves like `save`, but logs and records a failure instead of raising it.

        A periodic save is asynchronous if possible, and begins after the end of the
        previous asynchronous save.

        Args:
            run: the run to save.
            because: "periodic", or "error" if `fit` is about to raise an error. The
                reason is part of the save's name. So if only some workers raise an
                error, their save is not mixed up with a periodic save of the peers.

        Raises:
            CollectiveReadError: the peers are in a collective read without this worker.
        """
        is_async = because == "periodic" and run.saves_async
        try:
            self.save(run, because, is_async=is_async)
        except Exception as error:  # a State has failed, or no thread can be started
            if is_async:
                self.keep_error(run, error)
            self.runs.fault(f"{because} save", error)
            if breaks_off(error, self.cluster.num_workers):
                raise

    def repeat(self, seconds: float, mine: weakref.ref[Run]) -> None:
        """Requests a commit from all workers periodically, until a run is closed.

        Called on the chief.

        Args:
            seconds: period between two requests.
            mine: weak reference to the run.
        """
        c = self.coordinator

        def ask() -> None:
            run = mine()
            if run is None or run not in self.runs:
                return
            # Request the commit again soon if a save is in progress, or if the open
            # round takes a snapshot: such a round is short.
            is_snapshot = c.is_snapshot
            if c.step_flag.started > 0 and (
                self.is_busy or (not c.periodic() and is_snapshot)
            ):
                c.executor.call_at(c.clock.monotonic() + ASKS_AGAIN, ask)
            else:
                self.repeat(seconds, mine)

        c.executor.call_at(c.clock.monotonic() + seconds, ask)

    def _next_name(self, run: Run, because: str) -> str:
        """Returns the name of a new save: equal on every worker, never used again.

        Args:
            run: the run to save.
            because: reason for the save, the first part of the name.
        """
        # The round's number is equal on every worker, even if the workers have made
        # different numbers of steps.
        number = self.coordinator.state.round
        if because != "finished":
            self._saves += 1
            number = self._saves
        # Two runs may end in the same round: the token makes their names different.
        return f"{because}-{number}-{run.start.token}"

    @contextlib.contextmanager
    def breaking_off(self) -> Iterator[None]:
        """Context manager: notifies the peers of a `CollectiveReadError` in the body.

        The error means that this worker could not participate in a collective read, in
        which the peers wait. The program may catch the error, so the peers are notified
        before the program receives the error.
        """
        try:
            yield
        except Exception as error:
            if breaks_off(error, self.cluster.num_workers):
                self.on_failure(error)
            raise

    def begin(
        self, run: Run, name: str, may_miss: set[int], because: str = "periodic"
    ) -> None:
        """Begins an asynchronous save; called by every worker.

        Waits first for an asynchronous save in progress.

        Args:
            run: the run to save.
            name: name of the save; equal on every worker, and never used again.
            may_miss: workers that have finished training, so the save needs no part
                from them. Another thread may add workers.
            because: reason for the save, as in `save`.

        Raises:
            CheckpointError: this worker's part could not be captured.
        """
        self.end_async()
        self._remember(run, name)
        cancel_token = CancellationToken()
        go_on = functools.partial(self._complete, run, name, because, may_miss)

        def on_error(error: Exception) -> None:
            self.keep_error(run, error)
            self.runs.fault(f"{because} save", error)

        captured = None
        try:
            captured = run.capture(name, cancel_token)
            write = functools.partial(run.write, captured)
            complete = functools.partial(go_on, write)
            self._under_way = AsyncSave(name, cancel_token, complete, on_error)
        except BaseException as error:
            if captured is not None and self.cluster.is_chief:
                captured.discard()
            with contextlib.suppress(type(error)):
                go_on(functools.partial(_raise, error))  # notifies the peers
            if isinstance(error, MemoryError) or captured is not None:
                raise SaveError(
                    f"cannot start an asynchronous save ({error or 'no memory'}). An "
                    "asynchronous save needs memory for a copy of the state, and a "
                    "thread; async_save=False needs neither."
                ) from error
            raise

    # --- the asynchronous save that is under way -------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether an asynchronous save is in progress; may be read on any thread."""
        return not self.wait(0.0)

    def wait(self, seconds: float | None = None) -> bool:
        """Waits for the asynchronous save in progress; any thread may call.

        Args:
            seconds: longest wait; None: until the save is over.

        Returns:
            Whether no save is in progress.
        """
        under_way = self._under_way
        return under_way is None or under_way.wait(seconds)

    def keep_error(self, run: Run, error: Exception) -> None:
        """Keeps the error of an asynchronous save for `raise_error`. Thread-safe."""
        if not isinstance(error, VetoError):
            self._errors[run.start.token] = f"{type(error).__name__}: {error}"

    def raise_error(self, run: Run) -> None:
        """Raises the error of a run's newest failed asynchronous save, once.

        Only the text of the error is kept, because the frames of its traceback may have
        references to large values.

        Raises:
            SaveError: an asynchronous save of this worker has failed.
        """
        if text := self._errors.pop(run.start.token, ""):
            raise SaveError(
                f"an asynchronous save has failed: {text.rstrip('.')}. The last commit "
                "is still valid, and training may continue"
            )

    def end_async(self) -> None:
        """Waits for the asynchronous save in progress, before another save begins.

        Without a notice the wait has no limit. After a notice, enough time for the new
        save is reserved. A longer asynchronous save is given up. In three cases the
        asynchronous save may take all the remaining time: the new save would not finish
        in time anyway, the duration of a save is unknown, or both saves are of the same
        step. A commit of an older step is better than no commit.
        """
        while not self.wait(_TICK_SECONDS):
            if self.coordinator.state.notice in PREEMPTION:
                self.end_async_within(self._time_for_async())
                return

    def _time_for_async(self) -> float:
        """Returns the seconds that the asynchronous save may take after a notice."""
        deadlines, under_way = self.coordinator.deadlines, self._under_way
        left, took = deadlines.left, deadlines.save_seconds
        is_newest = under_way is not None and any(
            self._newest.get(each.start.token) == (under_way.name, each.step)
            for each in self.runs
        )
        if took is None or is_newest or left <= SAFETY * took:
            return left
        return left - SAFETY * took

    def end_async_within(self, seconds: float) -> None:
        """Waits for the asynchronous save, and gives the save up after a timeout.

        Only the chief can give up a save; the save is then never committed.

        Args:
            seconds: time left for the save.
        """
        under_way = self._under_way
        if under_way is None or under_way.wait(seconds) or not self.cluster.is_chief:
            return
        if under_way.give_up():
            self._under_way = None
            self._publish_outcome(under_way.name, False)

    def _remember(self, run: Run, name: str) -> None:
        run.is_unconfirmed = True
        self._newest[run.start.token] = name, run.step

    def _complete(
        self,
        run: Run,
        name: str,
        because: str,
        may_miss: set[int],
        write: Callable[[], Save],
    ) -> Commit | None:
        """Writes and reports the part of this worker; the chief also commits.

        Called on the main thread, or on the thread of an asynchronous save.

        Args:
            run: the run to save.
            name: name of the save, as in `begin`.
            because: reason for the save, as in `save`.
            may_miss: workers that have finished training, as in `begin`.
            write: function that writes this worker's part.

        Returns:
            The commit, on the chief; None on the other workers.

        Raises:
            VetoError: a worker has found a bad step.
        """
        timeout = self.coordinator.deadlines.peer_timeout
        if not self.cluster.is_chief:
            done, extra = False, {}
            try:
                write()
                done = True
            except VetoError as error:
                extra = error.extra
                raise
            finally:
                key, text = (
                    f"{self.prefix}/{name}/{self.cluster.worker}",
                    keys.encode(done, extra),
                )
                insert = functools.partial(self.coordinator.executor.insert, key, text)
                # Wait for the insert, because the process may end right after the save.
                call_and_wait(insert, min(timeout, 5.0))
            return None
        commit = None
        try:
            staged = write()
            try:
                absent, failed = self._absent(name, timeout, may_miss)
                missing = sorted(failed | (absent.keys() - may_miss))
                if missing and because != "finished":
                    reasons = "; ".join(filter(None, map(absent.get, missing)))
                    raise _without(missing, because, reasons)
            except BaseException:
                staged.discard()
                raise
            present = sorted(set(range(self.cluster.num_workers)) - absent.keys())
            commit = run.commit(staged, because, present)
            if commit is not None:
                self.runs.log_commit(run, commit)
        finally:
            # Publish the outcome after an error, too: if a notice arrives at this step,
            # the other workers read the outcome.
            self._publish_outcome(name, commit is not None)
        return commit

    def _publish_outcome(self, name: str, is_committed: bool) -> None:
        """Records whether a save was committed, and inserts the outcome for the other
        workers.

        Called on the chief, on any thread.

        Args:
            name: name of the save.
            is_committed: whether the save was committed.
        """
        if not is_committed:
            self._dropped.add(name)
        if self.cluster.num_workers > 1:
            key, text = f"{self.prefix}/{name}/commit", keys.encode(is_committed)
            self.coordinator.executor.insert(key, text, lambda held: None)

    def last_save_is_committed(self, run: Run, timeout: float) -> bool:
        """Returns whether the newest save of a run is a commit of the current step.

        The result is equal on every worker: the chief publishes whether the save was
        committed, and the other workers wait for this outcome.

        Args:
            run: the run.
            timeout: seconds to wait for the chief, whose save may still be in progress.
        """
        name, step = self._newest.get(run.start.token, ("", None))
        if step != run.step or self.cluster.is_chief:
            return step == run.step and name not in self._dropped
        key, executor = f"{self.prefix}/{name}/commit", self.coordinator.executor
        answer = call_and_wait(
            lambda then: executor.get_each([key], lambda _, text: then(text)), timeout
        )
        return answer is not None and keys.decode(Key.DONE, answer)[0] is True

    def _absent(
        self, name: str, timeout: float, may_miss: set[int]
    ) -> tuple[dict[int, str], set[int]]:
        """Waits until the other workers have reported their parts. Chief only.

        Args:
            name: name of the save, as in `begin`.
            timeout: longest wait in seconds.
            may_miss: workers that have finished training, as in `begin`.

        Returns:
            A dict with the reason for each worker whose part is missing; and the set of
            workers that have reported a failure. The part of such a worker is required
            even if the worker has finished training since the report.

        Raises:
            VetoError: a worker has found a bad step.
        """
        others = range(1, self.cluster.num_workers)
        absent: dict[int, str] = {}
        failed: set[int] = set()
        vetoes: list[Veto] = []
        if not others:
            return absent, failed
        self._listen(others)

        def then(worker: int, value: Any, extra: keys.Extra) -> None:
            if value is not True:
                absent[worker] = str(extra.get("reason", ""))
            if value is False:
                failed.add(worker)
            if "veto" in extra:
                vetoes.append(Veto.parse(extra["veto"]))

        gathering = KeyGather(
            self.coordinator.executor,
            Key.DONE,
            {j: f"{self.prefix}/{name}/{j}" for j in others},
            by=self.cluster.worker,
            then=then,
        )
        self._gathering = gathering if may_miss is self._final else None
        gathering.give_up(frozenset(may_miss), "the worker has finished training")
        late = gathering.wait(timeout)
        why = f"no answer within {timeout:g} s"
        gathering.give_up(late, why)
        if vetoes:
            raise VetoError(first_of(vetoes))
        return {**absent, **dict.fromkeys(late, why)}, failed

    def _listen(self, others: Sequence[int]) -> None:
        """Starts to watch which peers have finished training. Chief only."""
        if self._listens:
            return
        self._listens = True
        final = self._final  # `finishing` replaces the set for the next training

        def then(index: int, text: str) -> None:
            final.add(others[index])
            if self._gathering is not None:
                self._gathering.give_up(
                    frozenset(final), "the worker has finished training"
                )

        names = [f"{self.prefix}/final-{self._fit}/{j}" for j in others]
        self.coordinator.executor.get_each(names, then)


@dataclasses.dataclass(eq=False)
class RoundSave:
    """Makes the save of a round (a notice with its agreement) for the coordinator.

    The main thread calls the methods.

    Args:
        runs: the open runs.
        coordinator: coordinator of this worker.
        collective: saves outside of rounds; reports whether a run already has a commit
            of the current step.
        arrived_at: monotonic seconds at which training stopped for the round.
    """

    runs: Runs
    coordinator: Coordinator
    collective: CollectiveSaves
    arrived_at: float
    _began: float = 0.0
    # Whether a thread writes the files after the round: asynchronous save or snapshot.
    _is_async: bool = False
    _due: Sequence[Run] = ()
    _staged: Sequence[tuple[Run, Save]] = ()
    _snapshots: Snapshots | None = None
    _steps: int = 0  # steps made when the snapshot was captured

    def stage(self) -> bool:
        """Writes or captures this worker's part of the save.

        Returns:
            Whether the part was written. An asynchronous save reports a failure later.
        """
        name = f"round-{self.coordinator.state.round}"
        deadlines = self.coordinator.deadlines
        deadlines.share_seconds = 0.0
        is_periodic = self.coordinator.state.notice is NoticeKind.PERIODIC
        if is_periodic and self.coordinator.is_snapshot:
            return self._take_snapshot(name)
        self.collective.end_async()
        self._began = self.coordinator.clock.monotonic()

        def is_committed(run: Run) -> bool:
            return self.collective.last_save_is_committed(run, deadlines.left)

        # Only an unconfirmed save needs the outcome of the chief.
        due = [
            run
            for run in self.runs
            if (run.has_moved if is_periodic else run.has_moved_or_changed)
            or not (is_periodic or not run.is_unconfirmed or is_committed(run))
        ]
        if is_periodic and len(due) == 1:
            [run] = due
            if run.saves_async:
                return self._begin(run, name)
        if not due:
            due = [run for run in self.runs if not is_committed(run)]
        # Without a commit on disk, an incomplete commit is better than none.
        keeping = [r for r in due if created_later(r) and r.start.tier != "memory"]
        if keeping:
            log.warning(RESTORED_COMMIT_IS_KEPT)
            due = [run for run in due if run not in keeping]
        self._due = due
        for run in due:
            run.is_unconfirmed = False  # the outcome of the round tells every worker
        try:
            self._staged = [(run, run.stage(name)) for run in due]
        # This worker reports the failure to the other workers.
        except Exception as error:
            self._failed(error)
            if is_periodic and breaks_off(error, self.coordinator.settings.num_workers):
                raise
            return False
        deadlines.share_seconds = sum(part.share_seconds for _, part in self._staged)
        return True

    def _begin(self, run: Run, name: str) -> bool:
        """Begins an asynchronous save of the agreed step.

        Returns True even after a failure, because the save itself reports the failure
        to the chief.
        """
        self._is_async = True
        try:
            self.collective.begin(run, name, set())  # every worker participates
        except Exception as error:  # the workers are notified, and continue training
            self.collective.keep_error(run, error)
            self.runs.fault("periodic save", error)
            if breaks_off(error, self.coordinator.settings.num_workers):
                raise
        return True

    def _take_snapshot(self, name: str) -> bool:
        """Captures this worker's snapshot of the agreed step, if there is time.

        No snapshot is taken if several handlers train side by side, without a common
        step. There is no time if a notice is pending, or if a commit or the previous
        snapshot is being written. Without time for a snapshot, this worker only joins
        the collectives of the peers.

        Returns:
            True if this worker has captured its snapshot and has the previous snapshot
            intact, and also if no snapshot is to be taken.
        """
        self._is_async = True
        c = self.coordinator
        armed = [run for run in self.runs if run.is_armed]
        if len(armed) != 1 or not armed[0].has_moved:
            return True
        [run] = armed
        snapshots = self._snapshots = run.snapshots
        self._steps = run.steps_made
        if snapshots is None:
            return False
        if c.settings.host:
            snapshots.rounds.append(c.state.round)
        limit = self.coordinator.clock.monotonic() + _LONGEST_FOR_SNAPSHOT
        while not (snapshots.wait(_TICK_SECONDS) or c.preemption_pending):
            if self.coordinator.clock.monotonic() >= limit:
                break
        is_busy = snapshots.is_busy or self.collective.is_busy
        has_time = not (c.preemption_pending or is_busy)
        is_captured = False
        try:
            if has_time:
                is_captured = run.take_snapshot(name)
            else:
                snapshots.take_part()
        except Exception as error:  # a snapshot is optional: all workers train on
            self.runs.fault("snapshot", error)
            if breaks_off(error, c.settings.num_workers):
                raise
        if has_time and not is_captured and c.settings.host:
            self._refuse(snapshots)
        return is_captured

    def _refuse(self, snapshots: Snapshots) -> None:
        """Counts a round in which some worker took no snapshot. Chief only.

        A round after a commit is not counted, because the commit may have interrupted
        the previous snapshot. After `TRIES` counted rounds every worker stops taking
        snapshots.
        """
        if snapshots.is_after_commit:
            snapshots.is_after_commit = False
            return
        snapshots.refused += 1
        if snapshots.is_off or snapshots.refused >= TRIES:
            extra = self.coordinator.extra
            extra[Key.COMMIT] = {**extra.get(Key.COMMIT, {}), "snapshots": _OVER}

    def committed_nothing(self) -> None:
        """Marks the runs as changed since their last save, because the round made no
        commit."""
        for run in self._due:
            run.saved_at = None

    def go_on(self) -> None:
        """Ends the round on this worker, before training continues.

        Starts to write the captured snapshot. If some worker has captured no snapshot,
        the snapshot is discarded.
        """
        snapshots, self._snapshots = self._snapshots, None
        if snapshots is None:
            return
        c = self.coordinator
        decided = c.commit_extra.get("snapshots")
        if decided == _ALL:
            timing = SnapshotTiming(
                arrived=self.arrived_at,
                left=c.clock.monotonic(),
                steps=self._steps,
                intervals=c.step_flag.started,
            )
            snapshots.go_on(timing, should_save=not c.preemption_pending)
            return
        snapshots.discard()
        if decided == _OVER:
            snapshots.end()

    def _mark_snapshots(self, workers: tuple[int, ...]) -> None:
        """Decides whether the captured snapshots are written. Chief only.

        Args:
            workers: workers that have captured a snapshot. The remaining workers have
                reported a failure, or are lost.
        """
        c, snapshots = self.coordinator, self._snapshots
        extra: keys.Extra = {}
        if c.deadlines.save_seconds is not None:  # duration of the previous save
            extra["save_seconds"] = c.deadlines.save_seconds
        c.extra[Key.COMMIT] = extra
        if snapshots is None:
            return
        if len(workers) < c.settings.num_workers:
            self._refuse(snapshots)
            return
        extra["snapshots"] = _ALL
        # Every worker has ended the earlier rounds, so no worker reads the keys of
        # these rounds any more.
        c.forget_rounds(snapshots.rounds[:-1])
        del snapshots.rounds[:-1]

    def mark(self, workers: tuple[int, ...], steps_follow: bool) -> CommitKind:
        """Commits the save, once every part is written. Chief only.

        Args:
            workers: workers whose parts are written.
            steps_follow: whether training can continue after the save.

        Returns:
            The result of the round: commit or not, and whether the workers exit.
        """
        c, staged = self.coordinator, self._staged
        if self._is_async:
            self._mark_snapshots(workers)
            return CommitKind.NONE  # the round has no commit, and no worker exits
        because = "preemption"
        if c.state.notice is NoticeKind.PERIODIC:
            because = "periodic"
            if len(workers) < self.coordinator.settings.num_workers:
                return self._drop(workers)
        try:
            if c.notes.vetoes:
                return self._drop_bad_step()
            commits = [m.commit(part, because, workers) for m, part in staged]
            for (run, _), commit in zip(staged, commits, strict=True):
                if commit is not None:
                    self.runs.log_commit(run, commit)
        except BadStepsError:  # ends this worker by an error, which ends all workers
            raise
        except Exception as error:  # noqa: BLE001 - reported to the workers, which exit
            self._failed(error)
            return CommitKind.NONE
        done = [commit for commit in commits if commit is not None]
        extra: keys.Extra = dict(c.commit_extra) if not staged else {}
        if done:
            extra = {"step": done[0].step, "path": done[0].path}
        if staged:
            took = self.coordinator.clock.monotonic() - self._began
            took = c.deadlines.planned(took, c.deadlines.share_seconds)
            c.deadlines.save_seconds = extra["save_seconds"] = took
        if staged and not done:
            extra["note"] = "save_fn returned no path, so its files are not verified"
        c.extra[Key.COMMIT] = extra
        kind = c.commit_kind(steps_follow=steps_follow)
        if kind is CommitKind.TRAIN_ON and because == "preemption" and done:
            log.info(
                "checkpoint for step %d committed; training continues during the "
                "grace period",
                done[0].step,
            )
        return kind

    def _drop(self, workers: tuple[int, ...]) -> CommitKind:
        """Drops a periodic save in which the parts of some workers are missing.

        Training continues, so there will be another save. Until then the last commit is
        worth more than a newer commit without the random generators and the data
        position of a worker.
        """
        for _, part in self._staged:
            part.discard()
        missing = sorted(
            set(range(self.coordinator.settings.num_workers)) - set(workers)
        )
        self.runs.fault("periodic save", _without(missing, "periodic"))
        return CommitKind.NONE

    def _drop_bad_step(self) -> CommitKind:
        """Drops a save in which a worker has found a bad step, and records the step.

        Raises:
            BadStepsError: the journal cannot be written.
        """
        c = self.coordinator
        for _, part in self._staged:
            part.discard()
        veto = first_of([*map(Veto.parse, c.notes.vetoes)])
        for run in self.runs:
            if run.start.token == veto.run:
                record_bad_step(run, veto.bad_step, veto.reason)
        c.notes.lost_because = veto.reason
        c.extra[Key.COMMIT] = {"reason": veto.reason}
        return CommitKind.NONE

    def _failed(self, error: Exception) -> None:
        c = self.coordinator
        if isinstance(error, VetoError):
            c.notes.lost_because = f"{error}"
            c.extra[Key.COMMIT] = {"reason": f"{error}"}
            c.extra[Key.DONE] = error.extra
            return
        log.error("the save failed; the last commit is still valid", exc_info=error)
        run = next(iter(self.runs))
        where = f"the save of step {run.step}"
        reason = describe_loss(error, run.directory.cluster, where) or (
            f"worker {c.settings.worker}: {type(error).__name__}: {error}"
        )
        c.notes.lost_because = reason
        self.runs.record(Fault(where="save", error=reason))
        c.extra[Key.COMMIT] = c.extra[Key.DONE] = {"reason": reason}


def breaks_off(error: Exception, num_workers: int) -> bool:
    """Returns whether training must stop after the failure of an optional save.

    After a `CollectiveReadError` the other workers still wait in a collective of the
    save. If this worker trained on, the collectives of its next step would be paired
    with the collective of the save.
    """
    return num_workers > 1 and isinstance(error, CollectiveReadError)


def _raise(error: BaseException) -> NoReturn:
    raise error


def _without(workers: Sequence[int], because: str, why: str = "") -> SaveError:
    known = f" ({why})" if why else ""
    return SaveError(
        f"no part of the {because} save came from worker(s) {list(workers)}{known}. "
        "The save is dropped; the last commit is still valid. Check the logs of "
        "those workers."
    )
