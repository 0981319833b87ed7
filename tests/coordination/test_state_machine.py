"""Single rows of the table; tests/cluster tests their interaction."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tfpreempt.coordination import protocol_types as ev
from tfpreempt.coordination import state_machine
from tfpreempt.coordination.protocol_types import (
    CommitKind,
    DecidedStep,
    Insert,
    Key,
    MainThreadState,
    NoticeKind,
    StepCount,
    Tombstone,
    WatcherState,
)
from tfpreempt.coordination.state_machine import INITIAL, IllegalEventError, apply
from tfpreempt.core.events import Outcome

ALONE = ev.ProtocolConfig(0, 1)
CHIEF, OTHER = ev.ProtocolConfig(0, 2), ev.ProtocolConfig(1, 2)


def feed(settings, *events, state=None):
    """Feeds events in order; the last state, and the actions of the last event."""
    state, actions = (INITIAL[0] if state is None else state), ()
    for event in events:
        state, actions = apply(settings, state, event)
    return state, actions


def test_it_imports_nothing_that_does_anything():
    tree = ast.parse(Path(state_machine.__file__).read_text())
    imported = {
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    ours = {name for name in imported if name and name.startswith("tfpreempt")}
    assert ours == {
        "tfpreempt.coordination",
        "tfpreempt.coordination.protocol_types",
        "tfpreempt.core.events",
    }
    rest = imported - ours
    assert rest == {"__future__", "collections.abc", "dataclasses", "typing"}


def test_every_event_has_a_row():
    rows = {**state_machine.WATCH, **state_machine.MAIN, **state_machine.ANY}
    kinds = {getattr(ev, kind.__name__) for kind in ev.ProtocolEvent.__subclasses__()}
    assert set(rows) == kinds


def test_an_illegal_event_names_event_state_and_worker():
    with pytest.raises(IllegalEventError) as caught:
        feed(OTHER, ev.Saved(True))
    for part in ("worker 1", "Saved(ok=True)", "TRAINING", "LISTENING", "round 1"):
        assert part in str(caught.value)


def test_an_event_of_an_older_round_changes_nothing():
    state = ev.WorkerState(round=3)
    for event in (
        ev.NoticeRead(2, NoticeKind.FINAL),
        ev.OwnCount(1, StepCount(4)),
        ev.AllCountsReceived(2, (StepCount(4),)),
        ev.CommitRead(2, CommitKind.EXIT),
        ev.AllGoodbyesReceived(1),
    ):
        assert apply(CHIEF, state, event) == (state, ())


def test_the_flag_is_raised_before_the_counter_is_read():
    _, actions = feed(OTHER, ev.NoticeRead(1, NoticeKind.FINAL))
    assert actions[:2] == (ev.RaiseFlag(), ev.ReadCounter())


def test_a_single_process_saves_at_its_current_boundary():
    state, _ = feed(
        ALONE,
        ev.LocalNotice(NoticeKind.FINAL),
        ev.NoticeRead(1, NoticeKind.FINAL),
        ev.CounterRead(1, 7),
        ev.OwnCount(1, StepCount(7)),
        ev.DecisionRead(1, DecidedStep(7)),
    )
    state, actions = feed(ALONE, ev.Boundary(7), state=state)
    assert actions == (ev.SaveDirective(7, alone=False, repeat=False),)
    state, actions = feed(ALONE, ev.Saved(True), state=state)
    assert actions == (ev.WriteMarker((0,)),)
    state, actions = feed(ALONE, ev.Committed(CommitKind.EXIT), state=state)
    assert actions == (Insert(Key.COMMIT, 1, CommitKind.EXIT),)
    state, actions = feed(ALONE, ev.CommitRead(1, CommitKind.EXIT), state=state)
    assert actions == (ev.ExitDirective(Outcome.COMMITTED),)
    assert state.main is MainThreadState.ENDED


def decided(settings, boundary):
    return ev.WorkerState(
        watch=WatcherState.FOLLOWING,
        notice=NoticeKind.FINAL,
        own=StepCount(5),
        decision=DecidedStep(boundary),
        counts=(StepCount(5), StepCount(5)) if settings.host else (),
    )


@pytest.mark.parametrize(("at", "verdict"), [(4, ev.Proceed), (5, ev.SaveDirective)])
def test_at_the_decision_it_saves_and_before_it_trains(at, verdict):
    _, actions = feed(OTHER, ev.Boundary(at), state=decided(OTHER, 5))
    assert type(actions[0]) is verdict


def test_past_the_decision_it_saves_too():
    _, actions = feed(OTHER, ev.Boundary(6), state=decided(OTHER, 5))
    assert actions == (ev.SaveDirective(6, alone=False, repeat=False),)


def test_the_last_boundary_counts_as_any_decision():
    _, actions = feed(OTHER, ev.Boundary(2, last=True), state=decided(OTHER, 5))
    assert actions == (ev.SaveDirective(2, alone=False, repeat=False),)


def test_the_largest_count_decides():
    state = ev.WorkerState(
        watch=WatcherState.DECIDING, notice=NoticeKind.FINAL, counts=(StepCount(4),)
    )
    _, actions = feed(CHIEF, ev.AllCountsReceived(1, (StepCount(6),)), state=state)
    assert actions == (Insert(Key.DECISION, 1, DecidedStep(6)),)


@pytest.mark.parametrize(("collectives", "boundary"), [(True, None), (False, 4)])
def test_a_tombstone_loses_the_round_if_all_are_needed(collectives, boundary):
    settings = ev.ProtocolConfig(0, 2, collectives=collectives)
    state = ev.WorkerState(
        watch=WatcherState.DECIDING, notice=NoticeKind.FINAL, counts=(StepCount(4),)
    )
    _, actions = feed(settings, ev.AllCountsReceived(1, (Tombstone(),)), state=state)
    assert actions == (Insert(Key.DECISION, 1, DecidedStep(boundary)),)


def test_training_is_over_if_all_counts_are_final_without_a_notice():
    state = ev.WorkerState(main=MainThreadState.FINISHING, counts=(StepCount(4, True),))
    _, actions = feed(
        CHIEF, ev.AllCountsReceived(1, (StepCount(4, True),)), state=state
    )
    assert actions == (Insert(Key.NOTICE, 1, NoticeKind.FINISHED),)


def test_a_worker_with_a_tombstone_never_saves():
    state = ev.WorkerState(watch=WatcherState.PUBLISHING, notice=NoticeKind.FINAL)
    state, _ = feed(OTHER, ev.OwnCount(1, Tombstone()), ev.Boundary(5), state=state)
    assert state.main is MainThreadState.LEAVING
    assert state.outcome is Outcome.LOST


def test_a_shorter_notice_goes_into_the_next_round():
    state = ev.WorkerState(watch=WatcherState.DECIDING, notice=NoticeKind.PERIODIC)
    _, actions = feed(OTHER, ev.LocalNotice(NoticeKind.FINAL), state=state)
    assert actions == (Insert(Key.NOTICE, 2, NoticeKind.FINAL),)


def test_a_boundary_that_is_committed_is_not_written_again():
    state = decided(OTHER, 5)
    state = state_machine.set_(state, round=2, saved_at=5)
    _, actions = feed(OTHER, ev.Boundary(5), state=state)
    assert actions == (ev.SaveDirective(5, alone=False, repeat=True),)


@pytest.mark.parametrize(
    "main",
    [MainThreadState.WAITING, MainThreadState.AWAITING, MainThreadState.COLLECTING],
)
def test_a_lost_store_before_the_commit_was_read_means_lost(main):
    settings = CHIEF if main is MainThreadState.COLLECTING else OTHER
    state = state_machine.set_(decided(settings, 5), main=main)
    _, actions = feed(settings, ev.StoreGone(), state=state)
    assert actions == (ev.ExitDirective(Outcome.LOST),)


@pytest.mark.parametrize(
    "late", [ev.GoodbyeSent(), ev.AllGoodbyesReceived(1), ev.AllStagedReceived(1, (1,))]
)
def test_a_late_event_changes_nothing(late):
    state = ev.WorkerState(main=MainThreadState.ENDED, outcome=Outcome.COMMITTED)
    assert apply(CHIEF, state, late) == (state, ())
