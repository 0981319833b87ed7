"""Three coordinators with real threads, on one store in one process."""

from __future__ import annotations

import queue
import threading

import pytest

from tfpreempt.coordination import keys
from tfpreempt.coordination import protocol_types as ev
from tfpreempt.coordination.coordinator import Coordinator
from tfpreempt.coordination.deadlines import Deadlines
from tfpreempt.coordination.in_memory_store import InMemoryStore
from tfpreempt.coordination.protocol_types import (
    CommitKind,
    Key,
    MainThreadState,
    NoticeKind,
)
from tfpreempt.coordination.store_executor import StoreExecutor
from tfpreempt.core.clock import SystemClock
from tfpreempt.core.events import Decision, Notice, Outcome

SOON = 10.0  # seconds until every expected event
CLOCK = SystemClock()
executors: list[StoreExecutor] = []
"""Of the members of a test, whose threads end with the test."""


class Member:
    """A worker: its coordinator, its records, and whether it passed its deadline."""

    def __init__(self, store, worker, world=3, peer_timeout=SOON):
        self.records: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.overran = threading.Event()
        self.coordinator: Coordinator
        executor = StoreExecutor(
            store, CLOCK, lambda error: self.coordinator.store_gone(error), 0.001
        )
        executors.append(executor)
        self.coordinator = Coordinator(
            ev.ProtocolConfig(worker, world),
            "0",
            executor,
            CLOCK,
            peer_timeout=peer_timeout,
            step_seconds=lambda: 0.0,
            record=self.records.put,
            on_overrun=self.overrun,
        )
        self.step_flag = self.coordinator.step_flag
        self.coordinator.start()

    def overrun(self, why):
        self.why = why
        self.overran.set()

    def notice(self, grace=None, ago=0.0):
        self.coordinator.notice(
            Notice(
                source="test",
                worker=self.coordinator.settings.worker,
                grace_seconds=grace,
                received_at=CLOCK.monotonic() - ago,
            )
        )

    def boundary(self, count, last=False):
        self.step_flag.started = count
        self.coordinator.dispatch(ev.Boundary(count, last))

    def decision(self):
        while not isinstance(found := self.records.get(timeout=SOON), Decision):
            pass  # a fault, on the way to the decision
        return found.boundary

    def save(self):
        """Saves as directed, the marker on the chief; returns the last directive."""
        c = self.coordinator
        verdict = c.wait(SOON)
        assert isinstance(verdict, ev.SaveDirective)
        c.dispatch(ev.Saved(True))
        verdict = c.wait(SOON)
        if isinstance(verdict, ev.WriteMarker):
            assert verdict.workers == (0, 1, 2)
            c.dispatch(ev.Committed(c.commit_kind()))
            verdict = c.wait(SOON)
        return verdict


@pytest.fixture
def store():
    store = InMemoryStore()
    yield store
    store.close()
    while executors:
        executors.pop().stop()


@pytest.fixture
def members(store):
    return [Member(store, i) for i in range(3)]


def together(call, members):
    """Calls a function for every worker, each in a thread."""
    results = [None] * len(members)

    def one(i):
        results[i] = call(members[i])

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SOON)
    return results


def stand(members, *counts):
    """Starts the workers' intervals, during which the notice comes."""
    for member, count in zip(members, counts, strict=True):
        member.step_flag.started = count


def test_a_notice_leads_to_one_decision(members):
    stand(members, 4, 5, 5)
    members[1].notice()
    assert together(Member.decision, members) == [5, 5, 5]
    assert all(member.step_flag.flag for member in members)


def test_all_save_commit_and_leave(members, store):
    stand(members, 4, 5, 5)
    members[1].notice()
    together(Member.decision, members)
    members[0].boundary(4)
    assert members[0].coordinator.wait(SOON) == ev.Proceed(5)
    for member in members:
        member.boundary(5)
    assert together(Member.save, members) == [ev.ExitDirective(Outcome.COMMITTED)] * 3
    text = store.get("tfpreempt/0/1/commit")
    assert keys.decode(Key.COMMIT, text)[0] is CommitKind.EXIT


def test_after_a_commit_each_worker_knows_that_another_worker_is_lost(store):
    """Otherwise this worker would wait for the lost worker at the end of its process,
    while the chief, which hosts the store, ends."""
    chief, other = members = [Member(store, i, peer_timeout=1.0) for i in range(2)]
    stand(members, 4, 4)
    store.insert("tfpreempt/0/1/count/2", keys.encode(ev.StepCount(4)))
    other.notice()
    assert together(Member.decision, members) == [4, 4]
    for member in members:
        member.boundary(4)
        assert isinstance(member.coordinator.wait(SOON), ev.SaveDirective)
        member.coordinator.dispatch(ev.Saved(True))
    assert chief.coordinator.wait(SOON) == ev.WriteMarker((0, 1))  # not worker 2
    chief.coordinator.dispatch(ev.Committed(CommitKind.EXIT))
    assert other.coordinator.wait(SOON) == ev.ExitDirective(Outcome.COMMITTED)
    assert "worker 2 is missing" in other.coordinator.notes.lost_because
    store.insert("tfpreempt/0/1/bye/2", keys.encode(True))
    assert chief.coordinator.wait(SOON) == ev.ExitDirective(Outcome.COMMITTED)


def test_notices_everywhere_at_once_are_one_round(members, store):
    stand(members, 2, 2, 2)
    together(Member.notice, members)
    assert together(Member.decision, members) == [2, 2, 2]


def test_all_finish(members):
    for member in members:
        member.boundary(3, last=True)
    verdicts = together(lambda member: member.coordinator.wait(SOON), members)
    assert verdicts == [ev.ExitDirective(Outcome.FINISHED)] * 3


def test_waiting_can_be_given_up(members):
    members[1].boundary(3, last=True)
    assert members[1].coordinator.wait(0.01) is None


def test_without_a_worker_the_chief_commits_alone(store):
    """The chief's state needs no other worker; the remaining worker exits as lost."""
    chief, other = (Member(store, i) for i in range(2))
    store.insert("tfpreempt/0/1/count/2", keys.encode(ev.Tombstone()))
    stand([chief, other], 1, 1)
    chief.notice(grace=60)
    assert together(Member.decision, [chief, other]) == [None, None]
    chief.boundary(1)
    other.boundary(1)
    assert chief.coordinator.wait(SOON) == ev.SaveDirective(1, alone=True, repeat=False)
    chief.coordinator.dispatch(ev.Saved(True))
    assert chief.coordinator.wait(SOON) == ev.WriteMarker((0,))
    assert chief.coordinator.commit_kind() is CommitKind.ALONE
    chief.coordinator.dispatch(ev.Committed(CommitKind.ALONE))
    assert other.coordinator.wait(SOON) == ev.ExitDirective(Outcome.LOST)
    store.insert("tfpreempt/0/1/bye/2", keys.encode(True))
    assert chief.coordinator.wait(SOON) == ev.ExitDirective(Outcome.COMMITTED)


def test_a_worker_reported_as_crashed_is_given_up_at_once(store):
    members = [Member(store, i) for i in range(2)]  # of three; the third never came
    store.dead_workers = lambda: frozenset({2})
    stand(members, 1, 1)
    members[1].notice(grace=600)
    assert together(Member.decision, [members[1]]) == [None]
    assert members[1].coordinator.notes.lost_because
    assert "worker 2" in members[1].coordinator.notes.lost_because


def test_a_wait_ends_at_the_deadline(store):
    alone = Member(store, 1)  # no worker gathers
    alone.notice(grace=0.2)
    while not alone.step_flag.flag:
        threading.Event().wait(0.001)
    alone.boundary(1)
    assert alone.coordinator.wait() == ev.ExitDirective(Outcome.LOST)
    why = alone.coordinator.notes.lost_because
    assert why == "no answer within 0 s from worker 0 in the agreement on a step"


@pytest.mark.slow  # waits in real time
def test_a_worker_without_a_notice_keeps_the_deadline_after_a_first_commit(members):
    """Before, the workers forgot the deadline at the first commit, and waited for ever
    if the noticed worker hung later in its grace period."""
    noticed = members[1]
    stand(members, 1, 1, 1)
    noticed.notice(grace=3.0)
    together(Member.decision, members)
    for member in members:
        member.boundary(1)
    assert together(Member.save, members) == [ev.Resume()] * 3
    noticed.coordinator.deadlines.on_last_call = lambda: None  # the worker hangs
    assert all(member.overran.wait(SOON) for member in members)
    assert {member.why for member in members} == {"no step ended before the deadline"}


@pytest.mark.slow  # waits in real time
def test_a_timed_out_wait_names_workers_seconds_and_phase(store):
    """The part of one is missing; the other two wait in different phases."""
    members = [Member(store, i) for i in range(3)]
    stand(members, 1, 1, 1)
    members[0].notice(grace=1.5)
    together(Member.decision, members)
    for member in members:
        member.boundary(1)
        assert isinstance(member.coordinator.wait(SOON), ev.SaveDirective)
    for member in members[1:]:
        member.coordinator.dispatch(ev.Saved(True))
    assert members[1].coordinator.wait(SOON) == ev.ExitDirective(Outcome.LOST)
    why = members[1].coordinator.notes.lost_because
    assert "from worker 0 in the save (all parts, then the commit)" in why


def test_a_crashed_worker_is_named_with_the_phase(store):
    members = [Member(store, i) for i in range(2)]  # of three; the third never came
    store.dead_workers = lambda: frozenset({2})
    stand(members, 1, 1)
    members[1].notice(grace=600)
    together(Member.decision, members)
    for member in members:
        why = member.coordinator.notes.lost_because
        assert why.startswith("worker 2 is missing in the agreement on a step: ")


def test_a_save_with_others_that_the_chief_has_given_up_is_ended(store, monkeypatch):
    """Before, the save hung in a collective that the chief had left."""
    alarms = []
    monkeypatch.setattr(
        StoreExecutor, "call_at", lambda self, when, call: alarms.append(call)
    )
    member = Member(store, 1)
    member.notice()
    store.insert("tfpreempt/0/1/decision", keys.encode(ev.DecidedStep(1)))
    assert member.decision() == 1
    member.boundary(1)
    assert isinstance(member.coordinator.wait(SOON), ev.SaveDirective)
    said = keys.encode(CommitKind.NONE, {"reason": "worker 0: no memory"})
    store.insert("tfpreempt/0/1/commit", said)
    while member.coordinator.state.commit is None:
        threading.Event().wait(0.001)
    for ring in list(alarms):
        ring()
    assert member.overran.is_set()
    assert member.coordinator.notes.lost_because == "worker 0: no memory"


def test_a_main_thread_with_a_directive_is_not_ended(store, monkeypatch):
    """The alarm rang as main had given up its wait, and ended it in the exit."""
    alarms = []
    monkeypatch.setattr(
        StoreExecutor, "call_at", lambda self, when, call: alarms.append(call)
    )
    member = Member(store, 1)
    member.notice()
    while not member.step_flag.flag:
        threading.Event().wait(0.001)
    member.boundary(1)
    member.coordinator.dispatch(ev.DeadlinePassed())
    for ring in list(alarms):
        ring()
    assert member.coordinator.wait(SOON) == ev.ExitDirective(Outcome.LOST)
    assert not member.overran.is_set()


def test_a_wait_is_woken_when_its_deadline_becomes_known(store):
    """The main thread waits for workers that still train; then a notice comes."""
    member = Member(store, 1)
    member.boundary(3, last=True)
    waiting = threading.Thread(target=member.coordinator.wait, daemon=True)
    waiting.start()
    member.notice(grace=0.2)
    waiting.join(SOON)
    assert not waiting.is_alive()
    assert member.coordinator.state.main is MainThreadState.ENDED


def test_an_overrun_is_called_before_the_deadline(store):
    member = Member(store, 1)
    before = CLOCK.monotonic()
    member.notice(grace=0.1)
    assert member.overran.wait(SOON)
    assert CLOCK.monotonic() - before >= 0.08
    assert member.coordinator.deadlines.at == pytest.approx(before + 0.1, abs=0.05)


@pytest.mark.parametrize(
    ("is_saving", "said"), [(True, "the save did not end"), (False, "no step ended")]
)
def test_work_that_outlasts_the_deadline_is_named(store, is_saving, said):
    """A save that no round has asked for is no step."""
    member = Member(store, 1)
    member.coordinator.is_saving = is_saving
    member.notice(grace=0.1)
    assert member.overran.wait(SOON)
    assert member.why == f"{said} before the deadline"


def test_a_later_deadline_changes_nothing(store):
    member = Member(store, 1)
    member.notice(grace=60)
    first = member.coordinator.deadlines.at
    member.notice(grace=600)
    assert member.coordinator.deadlines.at == first
    member.notice(grace=30)
    assert member.coordinator.deadlines.at < first


def test_a_peers_deadline_is_taken_over_with_a_margin(members):
    members[2].notice(grace=60)
    together(Member.decision, members)
    mine = members[0].coordinator.deadlines.at
    assert mine is not None
    assert mine < members[2].coordinator.deadlines.at


def test_a_peers_notice_is_named_once_on_every_other_worker(members, caplog):
    caplog.set_level("INFO")
    members[1].notice()
    together(Member.decision, members)
    line = (
        "worker 1 received a preemption notice from test; all workers save the same "
        "step"
    )
    assert caplog.messages == [line] * 2  # worker 1 has logged its own notice


def test_a_peers_notice_carries_its_age(members):
    """The chief reports the delay of the commit for a notice on any worker."""
    members[2].notice(ago=60.0)
    together(Member.decision, members)
    for member in members:
        assert member.coordinator.deadlines.since_notice >= 60.0


def test_the_commit_at_the_end_of_a_grace_counts_from_its_notice_too(members):
    stand(members, 1, 1, 1)
    members[2].notice(grace=600, ago=60.0)
    together(Member.decision, members)
    for member in members:
        member.boundary(1)
    assert together(Member.save, members) == [ev.Resume()] * 3
    assert members[2].coordinator.deadlines.since_notice >= 60.0


def test_a_notice_of_unknown_grace_ends_the_training_within_a_long_grace(
    members, monkeypatch
):
    """As SIGTERM of a container after the notice of a metadata server."""
    monkeypatch.setattr(Deadlines, "schedule_final_round", lambda self: None)
    stand(members, 1, 1, 1)
    members[2].notice(grace=0.9 * SOON)  # ends before the wait of an unknown grace
    together(Member.decision, members)
    for member in members:
        member.boundary(1)
    assert together(Member.save, members) == [ev.Resume()] * 3
    stand(members, 2, 2, 2)
    members[2].notice(grace=None)
    together(Member.decision, members)
    for member in members:
        member.boundary(2)
    assert together(Member.save, members) == [ev.ExitDirective(Outcome.COMMITTED)] * 3


def test_a_lost_store_ends_every_wait(members, store):
    stand(members, 1, 1, 1)
    members[0].notice()
    together(Member.decision, members)
    for member in members[1:]:
        member.boundary(1)
        assert isinstance(member.coordinator.wait(SOON), ev.SaveDirective)
        member.coordinator.dispatch(ev.Saved(True))
    store.close()
    verdicts = together(lambda member: member.coordinator.wait(SOON), members[1:])
    assert verdicts == [ev.ExitDirective(Outcome.LOST)] * 2
    assert "closed" in members[1].coordinator.notes.lost_because


def test_a_round_that_is_requested_is_requested_once(store):
    """The first request determines the purpose of the round."""
    c = Member(store, 0, world=1).coordinator
    c.executor.insert = lambda *args: None  # nobody has heard of it yet
    assert c.periodic(snapshot=True)
    assert not c.periodic()
    assert c.is_snapshot


@pytest.mark.slow  # waits in real time
def test_a_notice_is_none_for_a_snapshot(store):
    """The last call of a grace in which there were snapshots ends training."""
    member = Member(store, 0, world=1)
    c, told, is_called = member.coordinator, {}, threading.Event()

    def seen(name, text, then):
        kind, extra = keys.decode(Key.NOTICE, text)
        told[kind] = extra
        if kind is NoticeKind.FINAL:
            is_called.set()

    c.executor.insert = seen  # nobody has heard of it yet
    member.notice(grace=3.0)
    c.periodic(snapshot=True)
    assert is_called.wait(SOON)
    assert told[NoticeKind.PERIODIC]["snapshot"] is True
    assert "snapshot" not in told[NoticeKind.TRAIN_ON]
    assert "snapshot" not in told[NoticeKind.FINAL]


def test_training_continues_after_a_periodic_round(members):
    stand(members, 3, 3, 3)
    members[0].coordinator.periodic()
    together(Member.decision, members)
    for member in members:
        member.boundary(3)
    assert together(Member.save, members) == [ev.Resume()] * 3
    assert not any(member.step_flag.flag for member in members)
    assert {member.coordinator.state.round for member in members} == {2}
    assert members[0].coordinator.state.notice is not NoticeKind.PERIODIC
