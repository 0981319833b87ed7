"""Performs the agreement's actions: keys, waits, and the flag that training looks at.

Never blocks, except in `wait`, which the main thread calls. Everything else may be
called from any thread. The training loop touches only the gate.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tfpreempt.coordination import agreement, keys
from tfpreempt.coordination import events as ev
from tfpreempt.coordination.agreement import PREEMPTION
from tfpreempt.coordination.deadlines import Deadlines
from tfpreempt.coordination.events import Key, Main, NoticeKind, Tombstone, Watch
from tfpreempt.coordination.gate import Gate
from tfpreempt.coordination.gathering import Gathering
from tfpreempt.coordination.runtime import Runtime
from tfpreempt.core import deadline as dl
from tfpreempt.core.clock import Clock
from tfpreempt.core.events import Decision, Event, Fault, Notice, Outcome

log = logging.getLogger(__name__)

PATIENCE = 10  # save_timeouts that a save with others may take, no deadline being told
FOREVER = 3600.0  # a wait without a deadline is a chain of such waits


@dataclasses.dataclass(slots=True, eq=False)
class Round:
    """The notes of one round, which end with the round. Times are monotonic seconds.

    Attributes:
        is_asked: whether this worker asked for the round, as a periodic save.
        lost_because: the first reason for which nothing is committed; "" if none.
        lost_at: when the decision to commit nothing was read.
        must_exit: whether a worker has no time for another round.
        gathering: the newest wait for keys of all workers.
        leave_by: when the main thread exits without the `bye` of the others.
        timeouts_left: how often a save of many may outlast `save_timeout`.
        waits_since: when the main thread began its newest wait, of any round.
    """

    is_asked: bool = False
    lost_because: str = ""
    lost_at: float | None = None
    must_exit: bool = False
    gathering: Gathering | None = None
    leave_by: float | None = None
    timeouts_left: int = PATIENCE
    waits_since: float = 0.0


@dataclasses.dataclass(eq=False)
class Coordinator:
    """One worker's side of the agreement, for the life of its process.

    Args:
        settings: who this worker is.
        incarnation: namespace of the keys; equal on all workers.
        runtime: access to the store, and alarms.
        clock: for deadlines.
        save_timeout: seconds that a wait for others may take where no deadline is told.
        step_seconds: how long a step takes here.
        record: is given the events that belong in the journal.
        on_overrun: called if the process has to end where it is, with the reason.

    Attributes:
        settings: who this worker is.
        state: what it knows; any thread may look.
        gate: what training looks at.
        deadlines: by when all must be over.
        extra: what is to travel beside the next value of a key.
        commit_extra: what the chief's newest `commit` carries.
        is_saving: whether main saves outside of a round; main writes it.
        is_snapshot: whether this round is for a snapshot, or was asked to be.
        round: the notes of this round.
    """

    settings: ev.Settings
    incarnation: dataclasses.InitVar[str]
    runtime: Runtime
    clock: Clock
    _: dataclasses.KW_ONLY
    save_timeout: dataclasses.InitVar[float]
    step_seconds: dataclasses.InitVar[Callable[[], float]]
    record: Callable[[Event], None]
    on_overrun: Callable[[str], None]

    def __post_init__(
        self, incarnation: str, save_timeout: float, step_seconds: Callable[[], float]
    ) -> None:
        self.state = ev.State()
        self.gate = Gate()
        self.deadlines = Deadlines(
            self.runtime,
            self.clock,
            save_timeout,
            step_seconds,
            self._last_call,
            self._guard,
            self.settings.world,
        )
        self.extra: dict[Key, keys.Extra] = {}
        self.commit_extra: keys.Extra = {}
        self.is_saving = False
        self.is_snapshot = False
        self._name = functools.partial(keys.name, incarnation)
        self._changed = threading.Condition()  # its lock is held wherever state moves
        self._verdict: ev.Verdict | None = None
        self.notes = Round()

    def start(self) -> None:
        """Begins to listen."""
        with self._changed:
            self.state, actions = agreement.INITIAL
            for action in actions:
                self._perform(action)

    # --- main thread -----------------------------------------------------------------

    def wait(self, limit: float | None = None) -> ev.Verdict | None:
        """Waits for the verdict on what main was last told to do.

        Args:
            limit: seconds after which None is returned, 0 at once; None waits for the
                deadline.
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
                    self.feed(ev.DeadlinePassed())
                    continue
                ends = [t for t in (end, give_up) if t is not None]
                self._changed.wait(min([t - now for t in ends], default=FOREVER))

    def main_deadline(self) -> float | None:
        """When main stops waiting for a verdict, in monotonic seconds.

        None: as long as the others live (they may train for days after this one).
        """
        state = self.state
        if state.main is Main.LEAVING:
            return self.notes.leave_by
        if state.notice in PREEMPTION:
            return self.deadlines.at
        if state.main is Main.AWAITING and self.notes.lost_at is not None:
            # Nobody goes away, but one that all need is reported dead. The chief may be
            # in a step that waits for this worker.
            return self.notes.lost_at + self.deadlines.patience
        return None

    # --- any thread ------------------------------------------------------------------

    def notice(self, notice: Notice) -> None:
        """This machine is going away: brings it before all, and holds its deadline."""
        with self._changed:
            deadlines, at = self.deadlines, notice.received_at
            trains_on = deadlines.pays_twice(notice.grace_seconds)
            is_new = deadlines.shorten(at, notice.grace_seconds)
            if self.state.held is not None and not is_new:
                return  # said again
            deadlines.noticed_at = deadlines.noticed_at or at
            self.extra[Key.NOTICE] = {"worker": notice.worker, "from": notice.source}
            kind = NoticeKind.TRAIN_ON if trains_on else NoticeKind.FINAL
            self.feed(ev.LocalNotice(kind))
            if trains_on:
                deadlines.set_last_call()

    def periodic(self, *, snapshot: bool = False) -> bool:
        """Asks all workers for a commit at an agreed step; nobody leaves.

        Args:
            snapshot: each is to take a snapshot in place of that.

        Returns:
            Whether it could; False while another round goes on, or is asked for.
        """
        with self._changed:
            if self.state.notice is not None or self.notes.is_asked:
                return False
            self.notes.is_asked, self.is_snapshot = True, snapshot
            self.feed(ev.LocalNotice(NoticeKind.PERIODIC))
            return True

    @property
    def is_told_to_go(self) -> bool:
        """Whether a notice of any machine is known here, served or not."""
        return self.state.held is not None or self.deadlines.at is not None

    def forget_rounds(self, rounds: Sequence[int]) -> None:
        """Deletes the keys of rounds which every worker has left behind it."""
        for round in rounds:
            name = self._name(round, Key.NOTICE).rpartition("/")[0]
            self.runtime.delete(name)

    def store_gone(self, error: Exception) -> None:
        """The runtime cannot reach the store."""
        with self._changed:
            if self.state.watch is not Watch.GONE:
                log.warning("tfpreempt: %s", error)
                where = ev.PHASES[self.state.main]
                gone = f"worker 0, the host of the store, was lost in {where}: {error}"
                self.notes.lost_because = self.notes.lost_because or gone
                self.feed(ev.StoreGone())

    def feed(self, event: ev.Event) -> None:
        """Moves the agreement on and performs what it says."""
        with self._changed:
            if isinstance(event, ev.DeadlinePassed):
                self.notes.lost_because = self.notes.lost_because or self._waited_for()
            self.state, actions = agreement.step(self.settings, self.state, event)
            if isinstance(event, ev.Boundary | ev.Saved | ev.Committed):
                self.notes.waits_since = self.clock.monotonic()
                self.deadlines.extend(at_boundary=isinstance(event, ev.Boundary))
            for action in actions:
                self._perform(action)
            self._changed.notify_all()  # the deadline of a wait may be another now

    def _waited_for(self) -> str:
        """Whom main has waited for, for how long and in what."""
        gathering = self.notes.gathering
        missing = sorted(gathering.missing) if gathering else []
        whom = ", ".join(map(str, missing or [0]))
        workers = "workers" if len(missing) > 1 else "worker"
        seconds = self.clock.monotonic() - self.notes.waits_since
        where = ev.PHASES[self.state.main]
        return f"waited {seconds:.0f} s in vain for {workers} {whom} in {where}"

    # --- performing ------------------------------------------------------------------

    def _perform(self, action: ev.Action) -> None:
        match action:
            case ev.RaiseFlag():
                self.gate.flag = True
                gathering = self.notes.gathering
                if gathering is not None and self.state.notice in PREEMPTION:
                    self._limit(gathering)
            case ev.LowerFlag():
                self.gate.flag = False
                self._close_round()
            case ev.ReadCounter():
                self.feed(ev.CounterRead(self.state.round, self.gate.started))
            case ev.Get(key, round):
                self.runtime.get(
                    self._name(round, key), functools.partial(self._read, key, round)
                )
            case ev.Insert():
                self._insert(action)
            case ev.Gather(key, round, workers):
                self.notes.gathering = gathering = Gathering(
                    self.runtime,
                    key,
                    {worker: self._name(round, key, worker) for worker in workers},
                    by=self.settings.worker,
                    then=functools.partial(self._answered, key),
                    whole=functools.partial(self._gathered, action),
                )
                if key is Key.BYE:
                    self.notes.leave_by = 1.0 + self.deadlines.limits().of[key]
                # Before a notice others may train for long: only the dead are given up.
                if key is not Key.COUNT or self.state.notice in PREEMPTION:
                    self._limit(gathering)
            case ev.Verdict():
                self._verdict = action

    def _read(self, key: Key, round: int, text: str) -> None:
        value, extra = keys.decode(key, text)
        reason = str(extra.get("reason") or "")
        if key is Key.DECISION and not self.is_snapshot:
            # No lock is held while the journal writes.
            self.record(Decision(round=round, boundary=value.boundary, reason=reason))
        with self._changed:
            self.notes.lost_because = self.notes.lost_because or reason
            match key:
                case Key.NOTICE if round != self.state.round:
                    self.feed(ev.NoticeRead(round, value))  # main is not there yet
                case Key.NOTICE:
                    is_mine = extra.get("worker") == self.settings.worker
                    is_periodic = value is NoticeKind.PERIODIC
                    self.is_snapshot = is_periodic and extra.get("snapshot") is True
                    if value in PREEMPTION and not is_mine:
                        self._share_deadline(extra)
                    self.feed(ev.NoticeRead(round, value))
                case Key.DECISION:
                    if value.boundary is None:
                        self.notes.lost_at = self.clock.monotonic()
                    self.feed(ev.DecisionRead(round, value))
                case Key.COMMIT:
                    self.commit_extra = extra
                    if "save_seconds" in extra:
                        self.deadlines.save_seconds = extra["save_seconds"]
                    self.feed(ev.CommitRead(round, value))

    def _share_deadline(self, extra: keys.Extra) -> None:
        """Takes over the deadline that a peer's notice carries."""
        remaining = extra.get("remaining")
        now = self.clock.monotonic()
        if remaining is not None:
            remaining = dl.after_travel(max(0.1, float(remaining)))
        self.deadlines.shorten(now, remaining)
        if self.deadlines.noticed_at is None:
            self.deadlines.noticed_at = now - float(extra.get("age") or 0.0)

    def commit_kind(self, *, steps_follow: bool = True) -> ev.CommitKind:
        """The chief's word on how the round ends, once its marker is written.

        Args:
            steps_follow: False where an error, and no step, comes after this commit.
        """
        with self._changed:
            state = self.state
            if state.decision is not None and state.decision.boundary is None:
                return ev.CommitKind.ALONE
            if state.notice is NoticeKind.PERIODIC:
                return ev.CommitKind.TRAIN_ON
            has_all = len(state.staged) == self.settings.world
            # Who was left out leaves, and can come back only where all start again.
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
        extra = dict(self.extra.get(action.key, {}))
        if action.value is NoticeKind.PERIODIC:
            extra = {"worker": self.settings.worker, "snapshot": self.is_snapshot}
        if action.key is Key.NOTICE:
            told = self.deadlines.told
            left = None if told is None else told - self.clock.monotonic()
            extra["remaining"] = left
            extra["age"] = self.deadlines.since_notice
        if action.key is Key.DONE and self.state.held is NoticeKind.FINAL:
            extra["final"] = True
        if action.value == ev.Decided(None):
            extra["reason"] = self.notes.lost_because or "a worker did not answer"
        if action.value is ev.CommitKind.NONE:
            extra.setdefault("reason", self.notes.lost_because)
        if isinstance(action.value, Tombstone):
            extra |= {"by": self.settings.worker, "reason": self.notes.lost_because}
        self.runtime.insert(
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
                case Key.COUNT if own and isinstance(action.value, ev.Count):
                    if action.value.final:
                        self.feed(ev.FinalCount(round, value))
                    elif state.watch is Watch.PUBLISHING:
                        self.feed(ev.OwnCount(round, value))
                case Key.NOTICE if value is not action.value:
                    self.feed(ev.NoticeExists(round, value))
                case Key.BYE if own and state.round == round:
                    self.feed(ev.ByeSaid())

    # --- gathering -------------------------------------------------------------------

    def _answered(self, key: Key, worker: int, value: Any, extra: keys.Extra) -> None:
        if isinstance(value, Tombstone) and key is not Key.BYE:
            reason = str(extra.get("reason") or f"worker {worker} left")
            self.notes.lost_because = self.notes.lost_because or reason
            self.record(Fault(where=f"{key.value}/{worker}", error=reason))
            log.warning("tfpreempt: goes on without worker %d: %s", worker, reason)
        elif key is Key.DONE and extra.get("final") is True:
            self.notes.must_exit = True

    def _gathered(self, action: ev.Gather, values: dict[int, Any]) -> None:
        match action.key:
            case Key.COUNT:
                self.feed(ev.CountsRead(action.round, tuple(values.values())))
            case Key.DONE:
                staged = tuple(j for j, done in values.items() if done is True)
                self.feed(ev.DonesRead(action.round, staged))
            case Key.BYE:
                self.feed(ev.ByesRead(action.round))

    def _limit(self, gathering: Gathering) -> None:
        """Waits no longer than the deadline allows."""
        when = self.deadlines.limits().of[gathering.key]
        seconds = when - self.clock.monotonic()
        why = f"no answer within {seconds:.1f} s"
        late = frozenset(gathering.names)  # who has answered by then is left out
        self.runtime.at(when, lambda: gathering.give_up(late, why))

    # --- deadlines -------------------------------------------------------------------

    def _close_round(self) -> None:
        before, self.notes = self.notes, Round(waits_since=self.notes.waits_since)
        self.extra.pop(Key.COMMIT, None)
        if self.state.held is None:
            self.deadlines.forget()
            self.extra.clear()
            return
        self.notes.timeouts_left = before.timeouts_left  # over all rounds of a notice
        if self.state.held is NoticeKind.TRAIN_ON:
            self.deadlines.set_last_call()

    def _last_call(self) -> None:
        with self._changed:
            if self.state.held is NoticeKind.TRAIN_ON:
                log.info("tfpreempt: the grace period is almost over")
                self.feed(ev.LocalNotice(NoticeKind.FINAL))

    def _guard(self, is_told: bool) -> bool:
        """Just before the deadline; returns whether that was the end."""
        with self._changed:
            if self.state.main in agreement.WAITS:
                stays = self.state.outcome is Outcome.FINISHED
                self.feed(ev.DeadlinePassed())
                return not stays
            if self.state.main is Main.ENDED:
                return True  # it has its verdict, and leaves
            why = self._what_is_late() if is_told else self._why_ended()
        if why:
            self.on_overrun(why)
        return bool(why)

    def _what_is_late(self) -> str:
        """What main is in the midst of as the machine goes."""
        why = "no step ended before the deadline"
        if self.is_saving or self.state.main in (Main.SAVING, Main.COMMITTING):
            why = "the save did not end before the deadline"
        return f"{why} ({self.notes.lost_because})" if self.notes.lost_because else why

    def _why_ended(self) -> str:
        """Why main is not let finish what it does; "" lets it.

        Where nobody told a deadline it is for the platform to end a step or a save. But
        a save of many may hang in what the others do not do any more, and a step that
        they have not waited for leads nowhere, nor a save that the chief has given up.
        """
        main, is_alone = self.state.main, self.settings.world == 1
        because = self.notes.lost_because or "saved"
        left = f"the others leave without this worker ({because})"
        if main is Main.SAVING and agreement.is_given_up(self.state):
            return left
        if self.is_saving or main in (Main.SAVING, Main.COMMITTING):
            self.notes.timeouts_left -= not is_alone
            if self.notes.timeouts_left > 0:
                log.warning("tfpreempt: the save takes long; waiting for it")
                return ""
            return "the save with the other workers did not end"
        if main is Main.TRAINING and not agreement.is_over(self.state):
            return ""
        return left
