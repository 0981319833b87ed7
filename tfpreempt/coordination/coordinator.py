"""Executes the actions of the agreement: reads and inserts keys, and sets the flag.

The flag is the value that stops the training loop at the next boundary. The loop uses
only the attribute `step_flag`, which has the flag and the loop's counter. Only `wait`
blocks, and only the main thread calls `wait`. Any thread may call the other methods.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tfpreempt.coordination import keys, state_machine
from tfpreempt.coordination import protocol_types as ev
from tfpreempt.coordination.deadlines import Deadlines
from tfpreempt.coordination.key_gather import KeyGather
from tfpreempt.coordination.protocol_types import (
    Key,
    MainThreadState,
    NoticeKind,
    Tombstone,
    WatcherState,
)
from tfpreempt.coordination.state_machine import PREEMPTION
from tfpreempt.coordination.step_flag import StepFlag
from tfpreempt.coordination.store_executor import StoreExecutor
from tfpreempt.core import deadline as dl
from tfpreempt.core.clock import Clock
from tfpreempt.core.events import BAD_STEP, Decision, Event, Fault, Notice, Outcome

log = logging.getLogger(__name__)

# Longest time for a save with other workers if the deadline is unknown, as a multiple
# of `peer_timeout`.
MAX_TIMEOUTS = 10
FOREVER = 3600.0  # seconds; a wait without a deadline is a loop of waits of this length


@dataclasses.dataclass(slots=True, eq=False)
class Round:
    """Facts about the current round that the transition table does not need.

    A round is a notice, the agreement after the notice, and the save. At the end of the
    round a new object replaces this object. Times are on the monotonic clock.

    Attributes:
        is_asked: whether this worker requested the round, for a periodic save.
        lost_because: first failure of this round, such as a missing worker; becomes the
            reason in messages if nothing is committed. "" without a failure.
        lost_at: time at which this worker read that no common save is possible.
        must_exit: whether the grace period of some worker is too short for another
            round.
        gathering: newest wait for keys of several workers.
        leave_by: time at which the main thread stops waiting for `bye` keys, and exits.
        leaves_since: time at which this worker began to insert or read `bye` keys.
        timeouts_left: number of `peer_timeout` periods that a save with other workers
            may still take.
        waits_since: time at which the main thread began its newest wait; copied from
            the previous round.
        vetoes: from the keys `notice` and `done`, the fields of workers that have found
            a bad step, so that no worker may commit.
    """

    is_asked: bool = False
    lost_because: str = ""
    lost_at: float | None = None
    must_exit: bool = False
    gathering: KeyGather | None = None
    leave_by: float | None = None
    leaves_since: float | None = None
    timeouts_left: int = MAX_TIMEOUTS
    waits_since: float = 0.0
    vetoes: list[keys.Extra] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Coordinator:
    """Runs the agreement for one worker, during the lifetime of the process.

    Args:
        settings: constants of this worker for the transition table.
        incarnation: name of this start of all workers, equal on every worker; used in
            the names of the keys.
        executor: reads and writes the key-value store, and calls functions at given
            times.
        clock: time source for deadlines.
        peer_timeout: seconds that a wait for other workers may take if the deadline is
            unknown.
        step_seconds: function that returns the duration of a step on this worker.
        record: function that writes an event to the journal.
        on_overrun: function that ends the process at once; called with the reason.

    Attributes:
        settings: constants of this worker for the transition table.
        state: current state of the agreement; any thread may read.
        step_flag: counter and flag of the training loop.
        deadlines: deadlines of this process.
        extra: for every key, additional fields that the next insert of the key writes.
        commit_extra: additional fields that the chief wrote with its newest `commit`.
        is_saving: whether the main thread saves outside of a round; the main thread
            writes the attribute.
        is_snapshot: whether the current round, or a round that this worker has
            requested, saves a snapshot and not a commit.
        notes: further facts about the current round.
    """

    settings: ev.ProtocolConfig
    incarnation: dataclasses.InitVar[str]
    executor: StoreExecutor
    clock: Clock
    _: dataclasses.KW_ONLY
    peer_timeout: dataclasses.InitVar[float]
    step_seconds: dataclasses.InitVar[Callable[[], float]]
    record: Callable[[Event], None]
    on_overrun: Callable[[str], None]

    def __post_init__(
        self, incarnation: str, peer_timeout: float, step_seconds: Callable[[], float]
    ) -> None:
        self.state = ev.WorkerState()
        self.step_flag = StepFlag()
        self.deadlines = Deadlines(
            self.executor,
            self.clock,
            peer_timeout,
            step_seconds,
            self._last_call,
            self._on_deadline,
            self.settings.num_workers,
        )
        self.extra: dict[Key, keys.Extra] = {}
        self.commit_extra: keys.Extra = {}
        self.is_saving = False
        self.is_snapshot = False
        self._name = functools.partial(keys.name, incarnation)
        self._changed = threading.Condition()  # held while `state` changes
        self._verdict: ev.Directive | None = None
        self.notes = Round()

    def start(self) -> None:
        """Starts to wait for the key `notice` of the first round."""
        with self._changed:
            self.state, actions = state_machine.INITIAL
            for action in actions:
                self._execute(action)

    # --- main thread -----------------------------------------------------------------

    def wait(self, limit: float | None = None) -> ev.Directive | None:
        """Waits for the directive: the instruction that follows the last event.

        Args:
            limit: seconds to wait; 0: return at once; None: wait until the deadline.

        Returns:
            The directive; None if there is no directive after `limit` seconds.
        """
        give_up = None if limit is None else self.clock.monotonic() + limit
        with self._changed:
            while True:
                if self._verdict is not None:
                    verdict, self._verdict = self._verdict, None
                    return verdict
                now = self.clock.monotonic()
                if give_up is not None and now >= give_up:
                    return None
                end = self.main_deadline()
                if end is not None and now >= end:
                    self.dispatch(ev.DeadlinePassed())
                    continue
                ends = [t for t in (end, give_up) if t is not None]
                self._changed.wait(min([t - now for t in ends], default=FOREVER))

    def wait_until_open(self, limit: float) -> None:
        """Waits until a round is open, at most `limit` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.state.notice is not None, limit)

    def main_deadline(self) -> float | None:
        """Returns the deadline of the wait for a directive, on the monotonic clock.

        None means no deadline: the main thread waits while the other workers train,
        possibly for days.
        """
        state = self.state
        if state.main is MainThreadState.LEAVING:
            return self.notes.leave_by
        if state.notice in PREEMPTION:
            return self.deadlines.at
        if state.main is MainThreadState.AWAITING and self.notes.lost_at is not None:
            # A worker that a periodic save needs has crashed. The wait needs a
            # deadline: the chief may be in a step that waits for this worker, while
            # this worker waits for the chief.
            return self.notes.lost_at + self.deadlines.default_wait_seconds
        return None

    # --- any thread ------------------------------------------------------------------

    def notice(self, notice: Notice, veto: keys.Extra | None = None) -> None:
        """Handles a notice for this machine: opens a round on every worker.

        The end of the grace period becomes the deadline of this process. If the notice
        has no grace period, the time left is unknown, so training ends at once, even if
        an earlier notice had a long grace period.

        Args:
            notice: the notice.
            veto: fields for `Round.vetoes` of the other workers; None without a veto.
        """
        with self._changed:
            deadlines, at = self.deadlines, notice.received_at
            trains_on = deadlines.second_commit_is_worthwhile(notice.grace_seconds)
            is_new = deadlines.shorten(at, notice.grace_seconds)
            held = self.state.held
            ends_training = held is NoticeKind.TRAIN_ON and not notice.grace_seconds
            if held is not None and not is_new and not ends_training:
                return  # the notice is known already
            deadlines.noticed_at = deadlines.noticed_at or at
            self.extra[Key.NOTICE] = {"worker": notice.worker, "from": notice.source}
            if veto is not None:
                self.extra[Key.NOTICE]["veto"] = veto
            kind = NoticeKind.TRAIN_ON if trains_on else NoticeKind.FINAL
            self.dispatch(ev.LocalNotice(kind))
            if trains_on:
                deadlines.schedule_final_round()

    def periodic(self, *, snapshot: bool = False) -> bool:
        """Requests that all workers save the same step, and continue training.

        Args:
            snapshot: whether to save a snapshot; if False, a commit.

        Returns:
            Whether the request was made. False during a round (the agreement and save
            after a notice or request), or if an earlier request is pending.
        """
        with self._changed:
            if self.state.notice is not None or self.notes.is_asked:
                return False
            self.notes.is_asked, self.is_snapshot = True, snapshot
            self.dispatch(ev.LocalNotice(NoticeKind.PERIODIC))
            return True

    @property
    def preemption_pending(self) -> bool:
        """Whether a preemption notice for any machine has reached this process.

        Stays True after a first commit while the grace period lasts.
        """
        return self.state.held is not None or self.deadlines.at is not None

    def forget_rounds(self, rounds: Sequence[int]) -> None:
        """Deletes the keys of rounds (by number) that no worker needs any more."""
        for round in rounds:
            name = self._name(round, Key.NOTICE).rpartition("/")[0]
            self.executor.delete(name)

    def store_gone(self, error: Exception) -> None:
        """Handles the loss of the key-value store; called by the `StoreExecutor`.

        Args:
            error: the error of the store.
        """
        with self._changed:
            if self.state.watch is not WatcherState.GONE:
                log.warning("%s", error)
                where = ev.PHASES[self.state.main]
                gone = f"worker 0, the host of the store, was lost in {where}: {error}"
                self.notes.lost_because = self.notes.lost_because or gone
                self.dispatch(ev.StoreGone())

    def dispatch(self, event: ev.ProtocolEvent) -> None:
        """Passes an event to the transition table, and executes the table's actions."""
        with self._changed:
            if isinstance(event, ev.DeadlinePassed):
                self.notes.lost_because = self.notes.lost_because or self._waited_for()
            self.state, actions = state_machine.apply(self.settings, self.state, event)
            if isinstance(event, ev.Boundary | ev.Saved | ev.Committed):
                self.notes.waits_since = self.clock.monotonic()
                self.deadlines.extend(at_boundary=isinstance(event, ev.Boundary))
            if isinstance(event, ev.NextRound) and self.state.held is None:
                # Not after each round: after a first commit in a long grace period, a
                # worker without a notice needs the deadline, too, because the noticed
                # worker may hang and never open the final round.
                self.deadlines.forget()
            for action in actions:
                self._execute(action)
            self._changed.notify_all()  # so that `wait` computes its deadline again

    def _waited_for(self) -> str:
        """Returns the message for a wait that timed out: workers, seconds and phase."""
        gathering = self.notes.gathering
        missing = sorted(gathering.missing) if gathering else []
        whom = ", ".join(map(str, missing or [0]))
        workers = "workers" if len(missing) > 1 else "worker"
        seconds = self.clock.monotonic() - self.notes.waits_since
        where = ev.PHASES[self.state.main]
        return f"no answer within {seconds:.0f} s from {workers} {whom} in {where}"

    # --- performing ------------------------------------------------------------------

    def _execute(self, action: ev.Action) -> None:
        match action:
            case ev.RaiseFlag():
                self.step_flag.flag = True
                gathering = self.notes.gathering
                if gathering is not None and self.state.notice in PREEMPTION:
                    self._limit(gathering)
            case ev.LowerFlag():
                self.step_flag.flag = False
                self._close_round()
            case ev.ReadCounter():
                self.dispatch(ev.CounterRead(self.state.round, self.step_flag.started))
            case ev.Get(key, round):
                self.executor.get(
                    self._name(round, key), functools.partial(self._read, key, round)
                )
            case ev.Insert():
                self._insert(action)
            case ev.Gather(key, round, workers):
                self.notes.gathering = gathering = KeyGather(
                    self.executor,
                    key,
                    {worker: self._name(round, key, worker) for worker in workers},
                    by=self.settings.worker,
                    then=functools.partial(self._answered, key),
                    on_complete=functools.partial(self._gathered, action),
                )
                if key is Key.BYE:
                    self.notes.leave_by = 1.0 + self.deadlines.limits().of[key]
                    # The other workers begin a moment later, when they read the commit.
                    self.notes.leaves_since = 1.0 + self.clock.monotonic()
                # Without a preemption, the wait for counts has no time limit: a worker
                # may train for long, so only a crashed worker is given up.
                if key is not Key.COUNT or self.state.notice in PREEMPTION:
                    self._limit(gathering)
            case ev.Directive():
                self._verdict = action

    def _read(self, key: Key, round: int, text: str) -> None:
        value, extra = keys.decode(key, text)
        reason = str(extra.get("reason") or "")
        if key is Key.DECISION and not self.is_snapshot:
            # Record before the lock is acquired, because the write may take long.
            self.record(Decision(round=round, boundary=value.boundary, reason=reason))
        with self._changed:
            self.notes.lost_because = self.notes.lost_because or reason
            if "veto" in extra and round == self.state.round:
                self.notes.vetoes.append(extra["veto"])
            match key:
                case Key.NOTICE if round != self.state.round:
                    # This notice belongs to a later round.
                    self.dispatch(ev.NoticeRead(round, value))
                case Key.NOTICE:
                    is_mine = extra.get("worker") == self.settings.worker
                    is_periodic = value is NoticeKind.PERIODIC
                    self.is_snapshot = is_periodic and extra.get("snapshot") is True
                    if value in PREEMPTION and not is_mine:
                        self._share_deadline(extra)
                    self.dispatch(ev.NoticeRead(round, value))
                case Key.DECISION:
                    if value.boundary is None:
                        self.notes.lost_at = self.clock.monotonic()
                    self.dispatch(ev.DecisionRead(round, value))
                case Key.COMMIT:
                    self.commit_extra = extra
                    if "save_seconds" in extra:
                        self.deadlines.save_seconds = extra["save_seconds"]
                    self.dispatch(ev.CommitRead(round, value))

    def _share_deadline(self, extra: keys.Extra) -> None:
        """Adopts the deadline that another worker has sent with its notice.

        Also logs the notice, if this worker has seen no notice before.

        Args:
            extra: extra fields of the other worker's key `notice`.
        """
        remaining = extra.get("remaining")
        now = self.clock.monotonic()
        if remaining is not None:
            remaining = dl.remaining_after_delay(max(0.1, float(remaining)))
        self.deadlines.shorten(now, remaining)
        if self.deadlines.noticed_at is None:
            self.deadlines.noticed_at = now - float(extra.get("age") or 0.0)
            if (source := extra.get("from")) == BAD_STEP:
                log.info(
                    "worker %s has found a bad step; all workers stop at the same step",
                    extra.get("worker"),
                )
                return
            log.info(
                "worker %s received a preemption notice from %s; all workers save the "
                "same step",
                extra.get("worker"),
                source,
            )

    def commit_kind(self, *, steps_follow: bool = True) -> ev.CommitKind:
        """Decides, on the chief, whether the workers exit or train on after a commit.

        Called after the chief has written the marker.

        Args:
            steps_follow: whether the program can continue training; False if the
                program is about to raise an error.
        """
        with self._changed:
            state = self.state
            if state.decision is not None and state.decision.boundary is None:
                return ev.CommitKind.ALONE
            if state.notice is NoticeKind.PERIODIC:
                return ev.CommitKind.TRAIN_ON
            has_all = len(state.staged) == self.settings.num_workers
            # A worker whose count is a tombstone exits, and can join again only if all
            # workers restart. So without this worker training must not continue.
            is_left_out = any(isinstance(count, Tombstone) for count in state.counts)
            needs_all = self.settings.collectives or is_left_out
            may_go_on = state.notice is NoticeKind.TRAIN_ON and steps_follow
            if (
                may_go_on
                and (has_all or not needs_all)
                and not self.notes.must_exit
                and self.deadlines.limits().may_train_on
            ):
                return ev.CommitKind.TRAIN_ON
            return ev.CommitKind.EXIT

    def _insert(self, action: ev.Insert) -> None:
        if action.key is Key.BYE:
            self.notes.leave_by = self.deadlines.limits().of[Key.BYE]
            self.notes.leaves_since = self.clock.monotonic()
        extra = dict(self.extra.get(action.key, {}))
        if action.value is NoticeKind.PERIODIC:
            extra = {"worker": self.settings.worker, "snapshot": self.is_snapshot}
        if action.key is Key.NOTICE:
            terminates_at = self.deadlines.terminates_at
            left = (
                None
                if terminates_at is None
                else terminates_at - self.clock.monotonic()
            )
            extra["remaining"] = left
            extra["age"] = self.deadlines.since_notice
        if action.key is Key.DONE and self.state.held is NoticeKind.FINAL:
            extra["final"] = True
        if action.value == ev.DecidedStep(None):
            extra["reason"] = self.notes.lost_because or "a worker did not answer"
        if action.value in (ev.CommitKind.NONE, ev.CommitKind.EXIT):
            # Also after a commit: a worker that knows of a lost worker does not wait
            # for the lost worker when its process ends.
            extra.setdefault("reason", self.notes.lost_because)
        if isinstance(action.value, Tombstone):
            extra |= {"by": self.settings.worker, "reason": self.notes.lost_because}
        self.executor.insert(
            self._name(action.round, action.key, action.worker),
            keys.encode(action.value, extra),
            functools.partial(self._inserted, action),
        )

    def _inserted(self, action: ev.Insert, text: str) -> None:
        value, _ = keys.decode(action.key, text)
        round = action.round
        own = action.worker == self.settings.worker
        with self._changed:
            state = self.state
            match action.key:
                case Key.COUNT if own and isinstance(action.value, ev.StepCount):
                    if action.value.final:
                        self.dispatch(ev.FinalCount(round, value))
                    elif state.watch is WatcherState.PUBLISHING:
                        self.dispatch(ev.OwnCount(round, value))
                case Key.NOTICE if value is not action.value:
                    self.dispatch(ev.NoticeExists(round, value))
                case Key.BYE if own and state.round == round:
                    self.dispatch(ev.GoodbyeSent())

    # --- gathering -------------------------------------------------------------------

    def _answered(self, key: Key, worker: int, value: Any, extra: keys.Extra) -> None:
        if isinstance(value, Tombstone) and key is not Key.BYE:
            reason = str(extra.get("reason") or f"worker {worker} left")
            self.notes.lost_because = self.notes.lost_because or reason
            self.record(Fault(where=ev.AWAITED[key], error=reason))
            log.warning("this save leaves out worker %d: %s", worker, reason)
        elif key is Key.DONE:
            self.notes.must_exit |= extra.get("final") is True
            if "veto" in extra:
                self.notes.vetoes.append(extra["veto"])

    def _gathered(self, action: ev.Gather, values: dict[int, Any]) -> None:
        match action.key:
            case Key.COUNT:
                self.dispatch(
                    ev.AllCountsReceived(action.round, tuple(values.values()))
                )
            case Key.DONE:
                staged = tuple(j for j, done in values.items() if done is True)
                self.dispatch(ev.AllStagedReceived(action.round, staged))
            case Key.BYE:
                self.dispatch(ev.AllGoodbyesReceived(action.round))

    def _limit(self, gathering: KeyGather) -> None:
        """Sets the alarm that ends a wait for keys of other workers.

        The alarm gives up the workers that have not answered at the time which
        `Deadlines.limits` returns for keys of this kind.

        Args:
            gathering: the reads of the keys that the alarm ends.
        """
        when = self.deadlines.limits().of[gathering.key]
        seconds = when - self.clock.monotonic()
        why = f"no answer within {seconds:.1f} s"
        late = frozenset(gathering.names)  # `give_up` skips workers that have answered
        self.executor.call_at(when, lambda: gathering.give_up(late, why))

    # --- deadlines -------------------------------------------------------------------

    def _close_round(self) -> None:
        before, self.notes = self.notes, Round(waits_since=self.notes.waits_since)
        self.extra.pop(Key.COMMIT, None)
        if self.deadlines.at is not None:  # all rounds of a notice share one budget
            self.notes.timeouts_left = before.timeouts_left
        if self.state.held is None:
            self.extra.clear()
        elif self.state.held is NoticeKind.TRAIN_ON:
            self.deadlines.schedule_final_round()

    def _last_call(self) -> None:
        with self._changed:
            if self.state.held is NoticeKind.TRAIN_ON:
                log.info("the grace period is almost over")
                self.dispatch(ev.LocalNotice(NoticeKind.FINAL))

    def _on_deadline(self, is_known: bool) -> bool:
        """Ends the wait of the main thread for other workers, just before the deadline.

        If the main thread does not wait, ends the process; at a soft deadline only if
        `_abort_reason` returns a reason.

        Args:
            is_known: whether a notice had the deadline; False for a soft deadline.

        Returns:
            Whether the process is ending; if not, the method is called again.
        """
        with self._changed:
            if self.state.main in state_machine.WAITS:
                stays = self.state.outcome is Outcome.FINISHED
                self.dispatch(ev.DeadlinePassed())
                return not stays
            if self.state.main is MainThreadState.ENDED:
                return True  # the main thread has its directive, and is exiting
            why = self._what_is_late() if is_known else self._abort_reason()
        if why:
            self.on_overrun(why)
        return bool(why)

    def _what_is_late(self) -> str:
        """Returns the reason to end the process at a known deadline, as text."""
        why = "no step ended before the deadline"
        if self.is_saving or self.state.main in (
            MainThreadState.SAVING,
            MainThreadState.COMMITTING,
        ):
            why = "the save did not end before the deadline"
        return f"{why} ({self.notes.lost_because})" if self.notes.lost_because else why

    def _abort_reason(self) -> str:
        """Returns the reason to end the process now; "" if the main thread may finish
        its work.

        Called at a soft deadline: no source has given a grace period, so the main
        thread may usually finish its step or save, until the platform kills the
        process. The process ends now in three cases: a save with other workers takes
        too long (the other workers may have left the collective operations); the other
        workers have ended the round while the main thread is in a step; the chief has
        given up the save.
        """
        main, is_alone = self.state.main, self.settings.num_workers == 1
        because = self.notes.lost_because or "saved"
        left = f"the others leave without this worker ({because})"
        if main is MainThreadState.SAVING and state_machine.is_given_up(self.state):
            return left
        if self.is_saving or main in (
            MainThreadState.SAVING,
            MainThreadState.COMMITTING,
        ):
            self.notes.timeouts_left -= not is_alone
            if self.notes.timeouts_left > 0:
                log.info("waiting for a save that takes long")
                return ""
            return "the save with the other workers did not end"
        if main is MainThreadState.TRAINING and not state_machine.is_over(self.state):
            return ""
        return left
