"""The agreement on a step, as a transition table: events in, actions out.

Every worker has a `WorkerState`; `apply(settings, state, event)` returns the next state
and the actions to take. The module uses no I/O, clock, thread or TensorFlow. So a
search in tests/cluster can try every order of events in this table, with crashes, with
running workers that are taken for crashed, and with late and duplicate notices.
docs/agreement.md has the rules, and the reason for every rule. If you change a rule,
change the search in the same commit.
"""

# ruff: noqa: D103 - a row has the name of its event, and the event has the docstring

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tfpreempt.coordination import protocol_types as ev
from tfpreempt.coordination.protocol_types import (
    Action,
    CommitKind,
    DecidedStep,
    ExitDirective,
    Insert,
    Key,
    MainThreadState,
    NoticeKind,
    ProtocolConfig,
    ProtocolEvent,
    Tombstone,
    WatcherState,
    WorkerState,
)
from tfpreempt.core.events import Outcome

Moved = tuple[WorkerState, tuple[Action, ...]]
Row = Callable[[ProtocolConfig, WorkerState, Any], Moved]

PREEMPTION = frozenset({NoticeKind.FINAL, NoticeKind.TRAIN_ON})
REAL = PREEMPTION | {NoticeKind.PERIODIC}
STANDING = frozenset({MainThreadState.WAITING, MainThreadState.FINISHING})

set_ = dataclasses.replace


class IllegalEventError(RuntimeError):
    """The table has no row for an event in this state: a bug in tfpreempt."""


def apply(settings: ProtocolConfig, state: WorkerState, event: ProtocolEvent) -> Moved:
    """Applies one event to the state of a worker.

    Args:
        settings: constants of the worker.
        state: current state of the worker.
        event: event to apply. Events of an earlier round change nothing.

    Returns:
        The next state, and the actions in the order in which they must take effect.

    Raises:
        IllegalEventError: the state has no row for the event.
    """
    late = getattr(event, "round", state.round) < state.round
    # Do not skip a late NoticeExists: this machine's notice is not handled yet.
    if late and not isinstance(event, ev.NoticeExists):
        return state, ()
    kind = type(event)
    row: Row | None
    if kind in WATCH:
        row = WATCH[kind].get(state.watch)
    elif kind in MAIN:
        row = MAIN[kind].get(state.main)
    else:
        row = ANY[kind]
    if row is not None:
        return row(settings, state, event)
    # Ignore the event: the watch role has read a key, but the store was then lost.
    answer = state.watch is WatcherState.GONE and kind in WATCH
    if answer or isinstance(event, MAY_COME_LATE):
        return state, ()
    raise IllegalEventError(
        f"worker {settings.worker}: no row for {event} while watch is "
        f"{state.watch.name} and main is {state.main.name} (round {state.round})"
    )


INITIAL: Moved = WorkerState(), (ev.Get(Key.NOTICE, 1),)
"""The first state of a worker and the actions that open its first round."""


# --- watch ---------------------------------------------------------------------------


def notice_read(
    settings: ProtocolConfig, state: WorkerState, event: ev.NoticeRead
) -> Moved:
    if event.kind is NoticeKind.FINISHED:
        state = set_(state, watch=WatcherState.OVER, notice=event.kind)
        if state.main is MainThreadState.FINISHING:
            return leave(settings, state, Outcome.FINISHED)
        return state, ()
    state = set_(state, watch=WatcherState.COUNTING, notice=event.kind)
    state, actions = decide(settings, state)
    return state, (ev.RaiseFlag(), ev.ReadCounter(), *actions)


def counter_read(
    settings: ProtocolConfig, state: WorkerState, event: ev.CounterRead
) -> Moved:
    count = ev.StepCount(event.count)
    return set_(state, watch=WatcherState.PUBLISHING), (
        Insert(Key.COUNT, state.round, count, settings.worker),
    )


def own_count(
    settings: ProtocolConfig, state: WorkerState, event: ev.OwnCount
) -> Moved:
    state = set_(state, own=event.value)
    if isinstance(event.value, Tombstone):
        state = set_(state, watch=WatcherState.EXCLUDED)
        if state.main in STANDING:
            return excluded(settings, state)
        if state.main is not MainThreadState.DETACHED or not settings.host:
            return state, ()
    state = set_(state, watch=WatcherState.DECIDING)
    state, actions = gather_counts(settings, state)
    return state, (ev.Get(Key.DECISION, state.round), *actions)


def decision_read(
    settings: ProtocolConfig, state: WorkerState, event: ev.DecisionRead
) -> Moved:
    state = set_(state, watch=WatcherState.FOLLOWING, decision=event.decided)
    get = ev.Get(Key.COMMIT, state.round)
    actions: tuple[Action, ...] = ()
    if state.main in STANDING:
        state, actions = act(settings, state)
    elif state.main is MainThreadState.DETACHED and settings.host:
        actions = (Insert(Key.COMMIT, state.round, CommitKind.NONE),)
    return state, (get, *actions)


def commit_read(
    settings: ProtocolConfig, state: WorkerState, event: ev.CommitRead
) -> Moved:
    state = set_(state, watch=WatcherState.OVER, commit=event.kind)
    if state.main is MainThreadState.AWAITING:
        return outcome_known(settings, state)
    if state.main is not MainThreadState.TRAINING:
        return state, ()
    if event.kind is CommitKind.TRAIN_ON:
        return next_round(state)  # the commit does not need this worker
    if was_dropped(state):  # wait for a notice: its round may need this worker's count
        return state, (ev.Get(Key.NOTICE, state.round + 1),)
    return state, ()


def notice_ahead(
    settings: ProtocolConfig, state: WorkerState, event: ev.NoticeRead
) -> Moved:
    """Handles a preemption notice of the next round, after a periodic save has failed.

    The main thread is still training up to the boundary of the failed save. This
    boundary may be far away, and the chief does not wait so long for this worker's
    count. So this worker skips the save. But it does not skip a save that needs every
    worker, because another worker may be in a collective operation of the save.
    """
    is_ahead = event.round > state.round and event.kind in PREEMPTION
    if is_ahead and state.main is MainThreadState.TRAINING and settings.saves_alone:
        return next_round(state)
    return state, ()


def store_gone(
    settings: ProtocolConfig, state: WorkerState, event: ev.StoreGone
) -> Moved:
    state = set_(state, watch=WatcherState.GONE)
    if state.main is MainThreadState.LEAVING:
        return ended(state)
    if state.main in {*STANDING, MainThreadState.AWAITING, MainThreadState.COLLECTING}:
        return ended(set_(state, outcome=Outcome.LOST))
    return state, ()


# --- main ----------------------------------------------------------------------------


def boundary(settings: ProtocolConfig, state: WorkerState, event: ev.Boundary) -> Moved:
    state = set_(state, at=event.count, last=event.last)
    if state.watch is WatcherState.GONE and (state.notice in REAL or event.last):
        return ended(set_(state, outcome=Outcome.LOST))
    if isinstance(state.own, Tombstone) and state.notice is not None:
        return excluded(settings, state)
    if state.commit is not None and not was_dropped(state):
        return outcome_known(settings, state)  # committed without this worker's part
    if state.decision is not None:
        return act(settings, state)
    if not event.last:
        return set_(state, main=MainThreadState.WAITING), ()
    state = set_(state, main=MainThreadState.FINISHING)
    if state.own is not None:
        return state, ()
    final = ev.StepCount(event.count, final=True)
    return state, (Insert(Key.COUNT, state.round, final, settings.worker),)


def act(settings: ProtocolConfig, state: WorkerState) -> Moved:
    """Acts on the decision at a boundary: saves, trains on, or ends the round.

    Called when the main thread is at a boundary and the decision is known.
    """
    assert state.decision is not None
    target = state.decision.boundary
    if target is None:
        if not settings.host:
            return set_(state, main=MainThreadState.AWAITING), ()
        if settings.saves_alone and not isinstance(state.own, Tombstone):
            return set_(state, main=MainThreadState.SAVING), (
                ev.SaveDirective(state.at, True, False),
            )
        return nothing_saved(settings, state)
    if state.at >= target or state.last:
        repeat = state.saved_at == state.at
        return set_(state, main=MainThreadState.SAVING), (
            ev.SaveDirective(state.at, False, repeat),
        )
    return set_(state, main=MainThreadState.TRAINING), (ev.Proceed(target),)


def excluded(settings: ProtocolConfig, state: WorkerState) -> Moved:
    """Exits without a save, because this worker's count is a tombstone."""
    if state.notice is NoticeKind.FINISHED:
        return leave(settings, state, Outcome.FINISHED)
    if settings.host:
        return nothing_saved(settings, state)
    return leave(settings, state, Outcome.LOST)


def nothing_saved(settings: ProtocolConfig, state: WorkerState) -> Moved:
    """Ends the round without a commit: the chief notifies the workers, and exits."""
    state, actions = leave(settings, state, Outcome.LOST)
    return state, (Insert(Key.COMMIT, state.round, CommitKind.NONE), *actions)


def final_count(
    settings: ProtocolConfig, state: WorkerState, event: ev.FinalCount
) -> Moved:
    if state.own is None:
        state = set_(state, own=event.value)
    if state.main is not MainThreadState.FINISHING:
        return state, ()
    if isinstance(state.own, Tombstone) and state.notice is not None:
        return excluded(settings, state)
    return gather_counts(settings, state)


def saved(settings: ProtocolConfig, state: WorkerState, event: ev.Saved) -> Moved:
    if not settings.host:
        state = set_(state, main=MainThreadState.AWAITING)
        done = Insert(Key.DONE, state.round, event.ok, settings.worker)
        if state.watch is WatcherState.GONE:
            return ended(set_(state, outcome=Outcome.LOST))
        if state.commit is None:
            return state, (done,)
        state, actions = outcome_known(settings, state)
        return state, (done, *actions)
    if not event.ok:
        return not_saved(settings, state)
    assert state.decision is not None
    alone = state.decision.boundary is None
    others = tuple(
        j
        for j, count in enumerate(state.counts)
        if not (alone or j == settings.worker or isinstance(count, Tombstone))
    )
    if not others:
        return marker(settings, state, ())
    state = set_(state, main=MainThreadState.COLLECTING)
    return state, (ev.Gather(Key.DONE, state.round, others),)


def marker(
    settings: ProtocolConfig, state: WorkerState, others: tuple[int, ...]
) -> Moved:
    """Starts the commit, on the chief.

    Args:
        settings: constants of the chief.
        state: state of the chief.
        others: workers whose parts the commit contains, besides the chief's part.
    """
    staged = (settings.worker, *others)
    state = set_(state, main=MainThreadState.COMMITTING, staged=staged)
    return state, (ev.WriteMarker(staged),)


def committed(
    settings: ProtocolConfig, state: WorkerState, event: ev.Committed
) -> Moved:
    if event.kind is CommitKind.NONE:
        return not_saved(settings, state)
    state = set_(state, main=MainThreadState.AWAITING)
    return state, (Insert(Key.COMMIT, state.round, event.kind),)


def not_saved(settings: ProtocolConfig, state: WorkerState) -> Moved:
    """Handles a failed save of the chief.

    After a failed periodic save training continues; after a preemption the chief exits.
    """
    if state.notice is not NoticeKind.PERIODIC:
        return nothing_saved(settings, state)
    state = set_(state, main=MainThreadState.AWAITING)
    return state, (Insert(Key.COMMIT, state.round, CommitKind.NONE),)


def was_dropped(state: WorkerState) -> bool:
    """Returns whether a periodic save was given up, although no worker was lost.

    If so, every worker continues training.
    """
    periodic = state.notice is NoticeKind.PERIODIC
    agreed = state.decision is not None and state.decision.boundary is not None
    return periodic and agreed and state.commit is CommitKind.NONE


def is_given_up(state: WorkerState) -> bool:
    """Returns whether this round ends without a commit, and every worker exits."""
    return state.commit is CommitKind.NONE and not was_dropped(state)


def is_over(state: WorkerState) -> bool:
    """Returns whether the workers have ended the round without this worker.

    Also True if the store is lost. If True, the current step or save of the main thread
    is useless.
    """
    has_ended = state.commit is not None and not was_dropped(state)
    return has_ended or state.watch in {WatcherState.EXCLUDED, WatcherState.GONE}


def outcome_known(settings: ProtocolConfig, state: WorkerState) -> Moved:
    """Ends the round, after the main thread has saved and the key `commit` was read."""
    match state.commit:
        case CommitKind.TRAIN_ON:
            state, actions = next_round(set_(state, saved_at=state.at))
            return state, (*actions, ev.Resume())
        case CommitKind.NONE if was_dropped(state):
            state, actions = next_round(state)
            return state, (*actions, ev.Resume())
        case CommitKind.EXIT:
            return leave(settings, state, Outcome.COMMITTED)
        case CommitKind.ALONE if settings.host:
            return leave(settings, state, Outcome.COMMITTED)
    return leave(settings, state, Outcome.LOST)


def step_failed(
    settings: ProtocolConfig, state: WorkerState, event: ev.StepFailed
) -> Moved:
    """Handles a step that failed because a peer crashed.

    After a preemption notice this worker exits with the outcome LOST. Without a notice
    tfpreempt does not end the process: the program receives the error of the step.
    """
    if state.notice not in PREEMPTION:
        state, actions = detached(settings, state, ev.Detached())
        return state, (*actions, ev.Raise())
    inserts: tuple[Action, ...] = ()
    if state.own is None:
        inserts = (Insert(Key.COUNT, state.round, Tombstone(), settings.worker),)
    if settings.host:
        inserts += (Insert(Key.DECISION, state.round, DecidedStep(None)),)
        state, actions = nothing_saved(settings, state)
    else:
        state, actions = leave(settings, state, Outcome.LOST)
    return state, (*inserts, *actions)


def detached(settings: ProtocolConfig, state: WorkerState, event: ev.Detached) -> Moved:
    state = set_(state, main=MainThreadState.DETACHED)
    inserts: tuple[Action, ...] = ()
    if state.own is None:
        inserts = (Insert(Key.COUNT, state.round, Tombstone(), settings.worker),)
    if not settings.host:
        if state.decision is not None:
            inserts += (Insert(Key.DONE, state.round, False, settings.worker),)
        return state, (*inserts, Insert(Key.BYE, state.round, True, settings.worker))
    if state.decision is not None:
        return state, (Insert(Key.COMMIT, state.round, CommitKind.NONE),)
    if state.own is None:
        state = set_(state, own=Tombstone())
    state, actions = gather_counts(settings, state)
    return state, (*inserts, *actions)


def deadline_passed(
    settings: ProtocolConfig, state: WorkerState, event: ProtocolEvent
) -> Moved:
    if state.main is MainThreadState.LEAVING:
        return ended(state)
    state, actions = ended(set_(state, outcome=Outcome.LOST))
    if settings.host:
        return state, (Insert(Key.COMMIT, state.round, CommitKind.NONE), *actions)
    return state, (Insert(Key.BYE, state.round, True, settings.worker), *actions)


def leave(settings: ProtocolConfig, state: WorkerState, outcome: Outcome) -> Moved:
    """Begins the exit: a worker inserts its key `bye`, the chief waits for these keys.

    The chief exits last, because its process hosts the store.
    """
    state = set_(state, main=MainThreadState.LEAVING, outcome=outcome)
    if state.watch is WatcherState.GONE:
        return ended(state)
    if not settings.host:
        return state, (Insert(Key.BYE, state.round, True, settings.worker),)
    others = tuple(range(1, settings.num_workers))
    if not others:
        return ended(state)
    return state, (ev.Gather(Key.BYE, state.round, others),)


def byes_over(
    settings: ProtocolConfig, state: WorkerState, event: ProtocolEvent
) -> Moved:
    """Exits, when the keys `bye` are inserted, so no worker needs the store any more.

    The chief waits for the keys of all other workers (or gives late workers up); the
    other workers wait only for their own key.
    """
    return ended(state)


def ended(state: WorkerState) -> Moved:
    assert state.outcome is not None
    return set_(state, main=MainThreadState.ENDED), (ExitDirective(state.outcome),)


def go_on(settings: ProtocolConfig, state: WorkerState, event: ev.NextRound) -> Moved:
    held = None if event.served else state.held
    state, actions = next_round(set_(state, held=held))
    if held is not None:
        actions += (Insert(Key.NOTICE, state.round, held),)
    return state, actions


def next_round(state: WorkerState) -> Moved:
    """Opens the next round with a new state, and lowers the flag."""
    state = WorkerState(round=state.round + 1, held=state.held, saved_at=state.saved_at)
    return state, (ev.LowerFlag(), ev.Get(Key.NOTICE, state.round))


# --- gather --------------------------------------------------------------------------


def gather_counts(settings: ProtocolConfig, state: WorkerState) -> Moved:
    """Starts, on the chief, to read the counts of the other workers, once per round."""
    if not settings.host or state.counts:
        return state, ()
    assert state.own is not None
    state = set_(state, counts=(state.own,))
    others = tuple(range(1, settings.num_workers))
    if not others:
        return decide(settings, state)
    return state, (ev.Gather(Key.COUNT, state.round, others),)


def counts_read(
    settings: ProtocolConfig, state: WorkerState, event: ev.AllCountsReceived
) -> Moved:
    return decide(settings, set_(state, counts=(*state.counts, *event.counts)))


def decide(settings: ProtocolConfig, state: WorkerState) -> Moved:
    """Inserts the decision, on the chief, if all counts and the notice are known.

    If there is no notice and every count is final, inserts the notice `FINISHED`.
    """
    counts = state.counts
    if len(counts) < settings.num_workers:
        return state, ()
    alive = [count for count in counts if isinstance(count, ev.StepCount)]
    if state.notice is None:
        if all(count.final for count in alive):
            return state, (Insert(Key.NOTICE, state.round, NoticeKind.FINISHED),)
        return state, ()
    if state.notice is NoticeKind.FINISHED:
        return state, ()
    lost = not alive or (settings.collectives and len(alive) < len(counts))
    target = None if lost else max(count.count for count in alive)
    return state, (Insert(Key.DECISION, state.round, DecidedStep(target)),)


def dones_read(
    settings: ProtocolConfig, state: WorkerState, event: ev.AllStagedReceived
) -> Moved:
    return marker(settings, state, event.staged)


# --- notice --------------------------------------------------------------------------


def local_notice(
    settings: ProtocolConfig, state: WorkerState, event: ev.LocalNotice
) -> Moved:
    if event.kind is NoticeKind.PERIODIC:  # an open round makes a save anyway
        if state.notice is not None:
            return state, ()
        return state, (Insert(Key.NOTICE, state.round, event.kind),)
    held = NoticeKind.FINAL if state.held is NoticeKind.FINAL else event.kind
    state = set_(state, held=held)
    if state.notice is None:
        return state, (Insert(Key.NOTICE, state.round, held),)
    return state, behind(state, state.round, state.notice)


def notice_exists(
    settings: ProtocolConfig, state: WorkerState, event: ev.NoticeExists
) -> Moved:
    return state, behind(state, event.round, event.kind)


def behind(state: WorkerState, round: int, kind: NoticeKind) -> tuple[Action, ...]:
    """Inserts this machine's notice into the next round, because the round has a
    notice.

    Not needed if the older notice also ends the process, or is of the same kind.

    Args:
        state: state of this worker.
        round: round of the older notice.
        kind: kind of the older notice.
    """
    covered = kind in {NoticeKind.FINAL, NoticeKind.FINISHED, state.held}
    if covered or state.held is None:
        return ()
    return (Insert(Key.NOTICE, max(round + 1, state.round), state.held),)


# --- the table -----------------------------------------------------------------------

WAITS = (
    *STANDING,
    MainThreadState.COLLECTING,
    MainThreadState.AWAITING,
    MainThreadState.LEAVING,
)

WATCH: dict[type, dict[WatcherState, Row]] = {
    ev.NoticeRead: {
        WatcherState.LISTENING: notice_read,
        WatcherState.OVER: notice_ahead,
    },
    ev.CounterRead: {WatcherState.COUNTING: counter_read},
    ev.OwnCount: {WatcherState.PUBLISHING: own_count},
    ev.DecisionRead: {WatcherState.DECIDING: decision_read},
    ev.CommitRead: {WatcherState.FOLLOWING: commit_read},
}
MAIN: dict[type, dict[MainThreadState, Row]] = {
    ev.Boundary: {MainThreadState.TRAINING: boundary},
    ev.Saved: {MainThreadState.SAVING: saved},
    ev.Committed: {MainThreadState.COMMITTING: committed},
    ev.StepFailed: {MainThreadState.TRAINING: step_failed},
    ev.Detached: dict.fromkeys(
        set(MainThreadState) - {MainThreadState.DETACHED}, detached
    ),
    ev.NextRound: {MainThreadState.ENDED: go_on},
    ev.AllStagedReceived: {MainThreadState.COLLECTING: dones_read},
    ev.GoodbyeSent: {MainThreadState.LEAVING: byes_over},
    ev.AllGoodbyesReceived: {MainThreadState.LEAVING: byes_over},
    ev.DeadlinePassed: dict.fromkeys(WAITS, deadline_passed),
}
ANY: dict[type, Row] = {
    ev.StoreGone: store_gone,
    ev.FinalCount: final_count,
    ev.AllCountsReceived: counts_read,
    ev.LocalNotice: local_notice,
    ev.NoticeExists: notice_exists,
}
MAY_COME_LATE = (
    ev.NoticeRead,
    ev.AllStagedReceived,
    ev.GoodbyeSent,
    ev.AllGoodbyesReceived,
    ev.DeadlinePassed,
)
