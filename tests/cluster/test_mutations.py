"""The search can fail: it must find the fault of each simplified rule.

A mutation changes one rule of the shipped table, or one line of the training loop, and
names the violations that may be found. `==` in place of "at or past the decision" is
not a mutation here: the decision is the largest count, so no worker can be past the
decision.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.cluster._values import Cluster
from tests.cluster._world import Search
from tests.cluster.explore import explore
from tests.cluster.test_explore import FREE, LOCAL, SKIPPED_SAVE, F, P
from tfpreempt.coordination import protocol_types as ev
from tfpreempt.coordination import state_machine
from tfpreempt.coordination.protocol_types import (
    CommitKind,
    Key,
    MainThreadState,
    NoticeKind,
    WatcherState,
)
from tfpreempt.coordination.state_machine import leave, set_
from tfpreempt.core.events import Outcome


def found(cluster: Cluster) -> set[str]:
    """The kind of the first violation that the search finds."""
    return set(explore(cluster, limit=2_000_000, first_only=True).violations)


@pytest.fixture
def patch(monkeypatch):
    return monkeypatch


def wrap(patch: pytest.MonkeyPatch, table: dict[Any, Any], event: Any, row: Any):
    """Replaces an event's row, in all states, by `row(old, settings, state, event)`."""
    changed = {
        state: lambda *args, old=old: row(old, *args)
        for state, old in table[event].items()
    }
    patch.setitem(table, event, changed)


@pytest.mark.slow
def test_the_rules_as_they_are():
    """The reference for the mutations below."""
    for cluster in (Cluster(), Cluster(lengths=(1, 2), suspicions=1, **FREE)):
        assert not found(cluster)


def test_reading_the_counter_before_raising_the_flag(patch):
    def without_flag(old, settings, state, event):
        state, actions = old(settings, state, event)
        return state, tuple(a for a in actions if not isinstance(a, ev.RaiseFlag))

    def with_flag(old, settings, state, event):
        state, actions = old(settings, state, event)
        return state, (ev.RaiseFlag(), *actions)

    wrap(patch, state_machine.WATCH, ev.NoticeRead, without_flag)
    wrap(patch, state_machine.WATCH, ev.OwnCount, with_flag)
    assert found(Cluster(lengths=(2,))) & {"STUCK", "SPLIT", "CROSSED"}


def test_looking_at_the_flag_before_counting(patch):
    def training(self, world, i, w):
        at_end = w.phase == "boundary" and w.done == self.cluster.length(i)
        if w.phase == "boundary" and not at_end and w.flag:
            new = self.feed(i, w._replace(phase="table"), ev.Boundary(w.done))
            yield f"w{i} sees the flag", self.put(world, i, new), False
        elif w.phase == "boundary" and not at_end:
            looked = w._replace(phase="counted", counter=w.done)
            yield f"w{i} sees no flag", self.put(world, i, looked), False
        elif w.phase == "counted":
            new = self.enter(w._replace(counter=w.done + 1))
            yield f"w{i} counts and starts", self.put(world, i, new), False
        else:
            yield from original(self, world, i, w)

    original = Search.training
    patch.setattr(Search, "training", training)
    assert found(Cluster(lengths=(2,))) & {"STUCK", "SPLIT", "CROSSED"}


def test_the_smallest_count_decides(patch):
    patch.setattr(state_machine, "max", min, raising=False)
    assert found(Cluster(lengths=(2,))) & {"STUCK", "SPLIT", "CROSSED"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_skipping_a_dropped_save_that_needs_all_workers(patch):
    def ahead(old, settings, state, event):
        return old(dataclasses.replace(settings, saves_alone=True), state, event)

    wrap(patch, state_machine.WATCH, ev.NoticeRead, ahead)
    assert found(SKIPPED_SAVE) == {"CROSSED"}


@pytest.mark.slow
def test_leaving_out_a_late_worker_without_a_tombstone(patch):
    def gather(self, world, store, i, w, op):
        step = original(self, world, store, i, w, op)
        key = op[1]
        if step is None or not step[2] or key is not Key.COUNT:
            return step
        new = self.gathered(i, w, op, ev.Tombstone())
        return step[0], self.put(step[1], i, new, store=world.store), True

    original = Search.gather
    patch.setattr(Search, "gather", gather)
    assert found(Cluster(lengths=(2,), suspicions=1, **FREE)) & {"SPLIT", "STUCK"}


@pytest.mark.slow
def test_a_worker_with_a_tombstone_continues(patch):
    def as_if_counted(old, settings, state, event):
        mine = ev.StepCount(state.at)
        return old(settings, state, ev.OwnCount(event.round, mine))

    wrap(patch, state_machine.WATCH, ev.OwnCount, as_if_counted)
    assert "SPLIT" in found(Cluster(lengths=(3,), suspicions=1, **FREE))


def test_the_host_leaves_before_the_byes(patch):
    def at_once(settings, state, outcome):
        if not settings.host:
            return original(settings, state, outcome)
        return state_machine.ended(
            set_(state, main=MainThreadState.LEAVING, outcome=outcome)
        )

    original = leave
    patch.setattr(state_machine, "leave", at_once)
    assert found(Cluster(lengths=(1,))) & {"HOST LEFT", "LOST"}


def test_a_finished_worker_exits_without_waiting(patch):
    def boundary(old, settings, state, event):
        if event.last and state.notice is None and state.watch is not WatcherState.GONE:
            return state_machine.ended(set_(state, outcome=Outcome.FINISHED))
        return old(settings, state, event)

    wrap(patch, state_machine.MAIN, ev.Boundary, boundary)
    assert found(Cluster(lengths=(1,))) & {"STUCK", "MIXED", "HOST LEFT"}


@pytest.mark.slow
def test_a_finished_worker_does_not_count_as_arrived(patch):
    def act(settings, state):
        target = state.decision.boundary
        if state.last and target is not None and state.at < target:
            return set_(state, main=MainThreadState.WAITING), ()
        return original(settings, state)

    original = state_machine.act
    patch.setattr(state_machine, "act", act)
    assert "STUCK" in found(Cluster(lengths=(2, 1), **FREE))


@pytest.mark.slow
def test_waiting_for_the_commit_without_a_deadline(patch):
    def waits_in_vain(self, store, w):
        return w.state.main is not MainThreadState.AWAITING and original(self, store, w)

    original = Search.waits_in_vain
    patch.setattr(Search, "waits_in_vain", waits_in_vain)
    assert "STUCK" in found(Cluster(workers=3, lengths=(1,), suspicions=1))


def test_leaving_as_committed_after_the_own_save(patch):
    def saved(old, settings, state, event):
        if settings.host:
            return old(settings, state, event)
        state, actions = leave(settings, state, Outcome.COMMITTED)
        done = ev.Insert(Key.DONE, state.round, event.ok, settings.worker)
        return state, (done, *actions)

    wrap(patch, state_machine.MAIN, ev.Saved, saved)
    assert "UNCOMMITTED" in found(Cluster(lengths=(1,)))


def test_a_share_of_another_step_is_taken(patch):
    """Workers of uneven length save together, at different steps."""
    patch.setattr(Search, "takes", lambda self, w, share: share is not None)
    assert found(Cluster(lengths=(1, 2), shares=True, **FREE)) == {"TORN"}


def test_a_share_of_a_worker_that_crashed_during_the_write_is_used(patch):
    def all_of_them(old, settings, state, event):
        return old(settings, state, ev.AllStagedReceived(event.round, (1,)))

    wrap(patch, state_machine.MAIN, ev.AllStagedReceived, all_of_them)
    patch.setattr(Search, "takes", lambda self, w, share: True)
    assert "TORN" in found(Cluster(lengths=(1,), crashes=1, shares=True, **LOCAL))


def test_a_second_notice_is_ignored_because_the_key_exists(patch):
    patch.setattr(state_machine, "behind", lambda state, round, kind: ())
    assert found(Cluster(notices=(P, F), notices_to=(1,))) == {"FORGOTTEN"}


def test_the_end_of_training_as_one_round(patch):
    """A worker that crashes in the chief's final commit restarts, and finds no peer.

    In this mutation the end is a round like that of a notice: the parts, the marker,
    and a commit after which all exit with 0. So the end needs a second exchange, after
    the commit (decision 0029).
    """

    def notice_read(old, settings, state, event):
        state, actions = old(settings, state, event)
        if event.kind is not NoticeKind.FINISHED:
            return state, actions
        state = set_(
            state, watch=WatcherState.FOLLOWING, decision=ev.DecidedStep(state.at)
        )
        state = set_(state, main=MainThreadState.SAVING, outcome=None)
        get = ev.Get(Key.COMMIT, state.round)
        return state, (get, ev.SaveDirective(state.at, alone=False, repeat=False))

    def outcome_known(settings, state):
        if state.notice is NoticeKind.FINISHED and state.commit is CommitKind.EXIT:
            return leave(settings, state, Outcome.FINISHED)
        return original_outcome(settings, state)

    def write_marker(self, world, i, w, to):
        if w.state.notice is not NoticeKind.FINISHED:
            yield from original_marker(self, world, i, w, to)
            return
        dead = [j for j in w.state.staged if world.workers[j].phase == "dead"]
        torn = f"all end with 0, and w{dead[0]} restarts alone" if dead else ""
        new = self.feed(i, w._replace(marked=False), ev.Committed(CommitKind.EXIT))
        yield to("writes the final marker", new, torn=torn)

    original_outcome = state_machine.outcome_known
    original_marker = Search.write_marker
    wrap(patch, state_machine.WATCH, ev.NoticeRead, notice_read)
    patch.setattr(state_machine, "outcome_known", outcome_known)
    patch.setattr(Search, "write_marker", write_marker)
    assert not found(Cluster(lengths=(1,), notices=()))
    assert found(Cluster(lengths=(1,), notices=(), crashes=1)) == {"TORN"}
