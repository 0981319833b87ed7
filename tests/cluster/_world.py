"""A small cluster as one value, and every single step that the cluster can take.

Each worker is the real `state_machine.apply` plus the few lines of a training loop.
Reads and writes of the insert-once store, the raising of the flag, the reading of the
counter, crashes, false suspicion, notices, timers and timeouts are single steps in any
order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.cluster._values import GONE, Cluster, Worker, World
from tfpreempt.coordination import protocol_types as ev
from tfpreempt.coordination import state_machine
from tfpreempt.coordination.protocol_types import (
    CommitKind,
    Key,
    MainThreadState,
    NoticeKind,
    WatcherState,
)
from tfpreempt.core.events import Outcome


class Search:
    """An exhaustive exploration."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.settings = [
            ev.ProtocolConfig(
                i, cluster.workers, cluster.collectives, not cluster.collective_save
            )
            for i in range(cluster.workers)
        ]
        self._moves: dict[Any, Any] = {}
        self._interned: dict[Any, Any] = {}
        self._steps: dict[Any, Any] = {}

    # --- one worker ------------------------------------------------------------------

    def move(
        self, i: int, state: ev.WorkerState, event: ev.ProtocolEvent
    ) -> state_machine.Moved:
        key = (i, id(state), event)
        moved = self._moves.get(key)
        if moved is None:
            after, actions = state_machine.apply(self.settings[i], state, event)
            moved = self._moves[key] = (self.intern(after), actions)
            self._interned.setdefault(("keep", id(state)), state)
        return moved

    def intern(self, thing: Any) -> Any:
        return self._interned.setdefault(thing, thing)

    def feed(self, i: int, w: Worker, event: ev.ProtocolEvent) -> Worker:
        state, actions = self.move(i, w.state, event)
        w = w._replace(state=state)
        ops = set(w.ops)
        for action in actions:
            match action:
                case ev.RaiseFlag():
                    w = w._replace(flag=True)
                case ev.LowerFlag():
                    w = w._replace(flag=False)
                case ev.Gather(key, round, workers):
                    ops |= {("gather", key, round, j) for j in workers}
                case ev.ReadCounter() | ev.Get() | ev.Insert():
                    ops.add(self.intern(action))
                case _:
                    w = self.verdict(i, w, action)
        if w.phase in GONE:
            return self.gone(w)
        return w._replace(ops=frozenset(ops))

    def gone(self, w: Worker) -> Worker:
        """Removes values that no longer matter, so that equal ends are one state."""
        return Worker(
            self.intern(ev.WorkerState(round=w.state.round)),
            w.phase,
            collectives=w.collectives,
            tag=w.tag,
            saved=w.saved,
            share=w.share,
            outcome=w.outcome,
            overdue=w.overdue,
        )

    def verdict(self, i: int, w: Worker, verdict: ev.Directive) -> Worker:
        match verdict:
            case ev.Proceed():
                return self.enter(w._replace(counter=w.done + 1))
            case ev.SaveDirective(boundary, alone, repeat):
                if not alone:
                    w = w._replace(saved=(*w.saved, (w.state.round, boundary)))
                if self.cluster.shares:
                    w = w._replace(repeats=repeat)
                if self.cluster.collective_save and not (alone or repeat):
                    return w._replace(
                        phase="saving",
                        collectives=w.collectives + 1,
                        tag=("save", w.state.round),
                    )
                return w._replace(phase="writing")
            case ev.WriteMarker():
                return w._replace(marked=True)
            case ev.Resume():
                return w._replace(phase="boundary")
            case ev.ExitDirective(outcome):
                return w._replace(phase="ended", outcome=outcome)
            case ev.Raise():
                return w._replace(phase=self.raising(i))
        raise AssertionError(verdict)

    def raising(self, i: int) -> str:
        """Returns the phase of a worker with an error; the chief first tells the
        others.

        A worker other than the chief ends at once: the others then find their own way,
        and the search is much smaller.
        """
        return "raised" if i else "raising"

    def enter(self, w: Worker) -> Worker:
        if not self.cluster.collectives:
            return w._replace(phase="interval")
        return w._replace(
            phase="interval", collectives=w.collectives + 1, tag=("step", w.done)
        )

    # --- the world's steps -----------------------------------------------------------

    def initial(self) -> World:
        c = self.cluster
        state, actions = state_machine.INITIAL
        first = Worker(self.intern(state), "boundary", ops=frozenset(actions))
        worker = self.intern(first)
        return World(
            (worker,) * len(self.settings),
            frozenset(),
            c.notices,
            c.crashes,
            c.suspicions,
            c.detaches,
            c.save_failures,
            False,
        )

    def steps(self, world: World) -> list[tuple[str, World, bool]]:
        """Returns all next steps: label, next world, whether the environment chose it.

        The steps of a worker are computed once for all worlds that are equal for this
        worker.
        """
        workers, rest = world.workers, world[1:]
        seen = tuple((w.phase in GONE, w.collectives, w.tag, w.share) for w in workers)
        found: list[tuple[str, World, bool]] = []
        for i, w in enumerate(workers):
            if w.phase in GONE:
                continue
            key = (i, id(w), seen, rest)
            known = self._steps.get(key)
            if known is None:
                steps, commutes = self.steps_of(world, i, w)
                after = [
                    (label, self.intern(new.workers[i]), new[1:], chosen)
                    for label, new, chosen in steps
                ]
                known = self._steps[key] = after, commutes
            after, commutes = known
            before, behind = workers[:i], workers[i + 1 :]
            steps = [
                (label, World((*before, new, *behind), *changed), chosen)
                for label, new, changed, chosen in after
            ]
            if commutes:
                return steps
            found += steps
        return found

    def steps_of(
        self, world: World, i: int, w: Worker
    ) -> tuple[list[tuple[str, World, bool]], bool]:
        """Returns the steps of a worker, and whether a single step commutes with all
        others.

        A commuting step is explored alone.
        """
        store = dict(world.store)
        host_up = world.workers[0].phase not in GONE
        found: list[tuple[str, World, bool]] = []
        for op in w.ops:
            step = self.io(world, store, host_up, i, w, op)
            if step is None:
                continue
            if isinstance(op, tuple) and step[2] is False:
                return [step], True
            found.append(step)
        found += self.training(world, i, w)
        found += self.environment(world, store, i, w)
        return found, False

    def identity(self, world: World) -> tuple[Any, ...]:
        """Returns a value that is equal for equal worlds, and fast to compare."""
        return (*map(id, world.workers), world[1:])

    def put(self, world: World, i: int, w: Worker, **changes: Any) -> World:
        workers = (*world.workers[:i], w, *world.workers[i + 1 :])
        return world._replace(workers=workers, **changes)

    def io(
        self, world: World, store: Any, host_up: bool, i: int, w: Worker, op: Any
    ) -> tuple[str, World, bool] | None:
        rest = w._replace(ops=w.ops - {op})
        if isinstance(op, ev.ReadCounter):
            event: ev.ProtocolEvent = ev.CounterRead(w.state.round, w.counter)
            return (
                f"w{i} reads its counter {w.counter}",
                self.put(world, i, self.feed(i, rest, event)),
                False,
            )
        if not host_up:
            if w.state.watch is WatcherState.GONE:
                return None
            gone = self.feed(i, w._replace(ops=frozenset()), ev.StoreGone())
            return f"w{i} finds the store gone", self.put(world, i, gone), False
        if isinstance(op, ev.Insert):
            key = (op.key, op.round, op.worker)
            known = store.get(key)
            after = world.store
            if known is None:
                known = op.value
                after = self.intern(world.store | {(key, op.value)})
            new = self.inserted(i, rest, op, known)
            label = f"w{i} inserts {op.key.value}/{op.round}/{op.worker}={op.value}"
            return (
                f"{label}, holds {known}",
                self.put(world, i, new, store=after),
                False,
            )
        if isinstance(op, ev.Get):
            known = store.get((op.key, op.round, None))
            if known is None:
                return None
            new = self.feed(i, rest, self.read(op, known))
            return (
                f"w{i} reads {op.key.value}/{op.round}={known}",
                self.put(world, i, new),
                False,
            )
        return self.gather(world, store, i, w, op)

    def gather(
        self, world: World, store: Any, i: int, w: Worker, op: Any
    ) -> tuple[str, World, bool] | None:
        if op[0] == "gathered":
            return None
        _, key, round, j = op
        known = store.get((key, round, j))
        if known is not None:
            new = self.gathered(i, w, op, known)
            return (
                f"w{i} gathers {key.value}/{j}={known}",
                self.put(world, i, new),
                False,
            )
        gone = world.workers[j].phase in GONE
        noticed = w.state.notice in state_machine.REAL
        suspects = world.suspicions > 0 and noticed and not gone
        tired = key is Key.BYE and w.state.outcome is Outcome.LOST
        if not ((gone or tired) and world.broken) and not suspects:
            return None
        after = self.intern(world.store | {((key, round, j), ev.Tombstone())})
        return (
            f"w{i} gives up on w{j}: tombstone {key.value}/{j}",
            world._replace(
                store=after,
                broken=True,
                suspicions=world.suspicions - (not gone and not tired),
            ),
            not gone and not tired,
        )

    def gathered(self, i: int, w: Worker, op: Any, value: Any) -> Worker:
        """Reads one key of a gather; after the last key the table gets an event."""
        _, key, round, j = op
        ops = w.ops - {op} | {("gathered", key, round, j, value)}
        mine = [x for x in ops if isinstance(x, tuple) and x[1:3] == (key, round)]
        if any(x[0] == "gather" for x in mine):
            return w._replace(ops=ops)
        values = {x[3]: x[4] for x in sorted(mine, key=lambda x: x[3])}
        event: ev.ProtocolEvent = ev.AllGoodbyesReceived(round)
        if key is Key.COUNT:
            event = ev.AllCountsReceived(round, tuple(values.values()))
        elif key is Key.DONE:
            staged = tuple(j for j, value in values.items() if value is True)
            event = ev.AllStagedReceived(round, staged)
        return self.feed(i, w._replace(ops=ops.difference(mine)), event)

    def read(self, op: ev.Get, known: Any) -> ev.ProtocolEvent:
        if op.key is Key.NOTICE:
            return ev.NoticeRead(op.round, known)
        if op.key is Key.DECISION:
            return ev.DecisionRead(op.round, known)
        return ev.CommitRead(op.round, known)

    def inserted(self, i: int, w: Worker, op: ev.Insert, known: Any) -> Worker:
        """Reports the result of an insert to the table, as the coordinator does."""
        if op.key is Key.COUNT and op.worker == i:
            if isinstance(op.value, ev.StepCount) and op.value.final:
                return self.feed(i, w, ev.FinalCount(op.round, known))
            if (
                isinstance(op.value, ev.StepCount)
                and w.state.watch is WatcherState.PUBLISHING
            ):
                return self.feed(i, w, ev.OwnCount(op.round, known))
        elif op.key is Key.NOTICE and known is not op.value:
            return self.feed(i, w, ev.NoticeExists(op.round, known))
        elif op.key is Key.BYE:
            return self.feed(i, w, ev.GoodbyeSent())
        return w

    def training(
        self, world: World, i: int, w: Worker
    ) -> Iterator[tuple[str, World, bool]]:
        def to(label: str, new: Worker, **changes: Any) -> tuple[str, World, bool]:
            return f"w{i} {label}", self.put(world, i, new, **changes), False

        c = self.cluster
        if w.phase == "boundary":
            if w.done == c.length(i):
                event = ev.Boundary(w.done, last=True)
                new = w._replace(phase="table", counter=w.done)
                yield to(f"is through at {w.done}", self.feed(i, new, event))
            else:
                new = w._replace(phase="counted", counter=w.done + 1)
                yield to(f"counts {w.done + 1}", new)
        elif w.phase == "counted":
            if w.flag:
                new = w._replace(phase="table", counter=w.done)
                yield to(
                    f"sees the flag, takes the count back to {w.done}",
                    self.feed(i, new, ev.Boundary(w.done)),
                )
            else:
                yield to(f"starts interval {w.done + 1}", self.enter(w))
        elif w.phase in ("interval", "saving", "writing"):
            yield from self.collective(world, i, w, to)
        elif w.phase == "raising":
            yield to("ends with the error", self.gone(w._replace(phase="raised")))
        if w.marked:
            yield from self.write_marker(world, i, w, to)

    def collective(self, world: World, i: int, w: Worker, to: Any) -> Any:
        c = self.cluster
        complete, dead = True, False
        together = w.phase == "saving" or (w.phase == "interval" and c.collectives)
        for x in world.workers if together else ():
            same = x.collectives == w.collectives and x.tag == w.tag
            if x.collectives <= w.collectives and not same:
                complete = False
                dead = dead or x.phase in GONE
            elif x.collectives == w.collectives and x.phase in GONE:
                dead = True
        if complete:
            if w.phase == "interval":
                new = w._replace(phase="boundary", done=w.done + 1, counter=w.done + 1)
                yield to(f"ends interval {w.done + 1}", new)
            else:
                new = w._replace(phase="table")
                if c.shares and not w.repeats:
                    new = new._replace(share=(w.state.round, w.state.at))
                yield to("has saved", self.feed(i, new, ev.Saved(True)))
        if dead and world.broken:
            new = w._replace(phase="table")
            if w.phase == "interval":
                yield to("step fails", self.feed(i, new, ev.StepFailed()))
            else:
                yield to("save fails", self.feed(i, new, ev.Saved(False)))
        if w.phase != "interval" and complete and world.save_failures:
            new = self.feed(i, w._replace(phase="table"), ev.Saved(False))
            yield to(
                "cannot write", new, save_failures=world.save_failures - 1, broken=True
            )

    def write_marker(self, world: World, i: int, w: Worker, to: Any) -> Any:
        torn = self.torn(world, w) if self.cluster.shares and not w.repeats else ""
        w = w._replace(marked=False)
        kinds = {
            NoticeKind.FINAL: (CommitKind.EXIT,),
            NoticeKind.PERIODIC: (CommitKind.TRAIN_ON,),
            NoticeKind.TRAIN_ON: (CommitKind.EXIT, CommitKind.TRAIN_ON),
        }[w.state.notice]  # type: ignore[index]
        assert w.state.decision is not None
        if w.state.decision.boundary is None:
            kinds = (CommitKind.ALONE,)
        for kind in kinds:
            new = self.feed(i, w, ev.Committed(kind))
            yield to(f"writes the marker: {kind.value}", new, torn=torn)

    def torn(self, world: World, w: Worker) -> str:
        """Returns the error in the shares that the chief takes, if any."""
        wanted = (w.state.round, w.state.at)
        for j in w.state.staged[1:]:
            share = world.workers[j].share
            if self.takes(w, share) and share != wanted:
                return f"the share of w{j} is of {share}, the commit of {wanted}"
        return ""

    def takes(self, w: Worker, share: tuple[int, int] | None) -> bool:
        """Returns whether the chief takes the share of a worker that reports `staged`.

        A worker that has saved this boundary before also reports `staged`, without a
        new share. A worker that ended earlier has a share of another step. The share's
        description tells.
        """
        return share == (w.state.round, w.state.at)

    def environment(
        self, world: World, store: Any, i: int, w: Worker
    ) -> Iterator[tuple[str, World, bool]]:
        c = self.cluster
        if world.notices and w.state.main is not MainThreadState.ENDED:
            for n, kind in enumerate(world.notices):
                if kind in world.notices[:n] or (
                    c.notices_to and i not in c.notices_to
                ):
                    continue
                left = world.notices[:n] + world.notices[n + 1 :]
                new = self.feed(i, w, ev.LocalNotice(kind))
                new = new._replace(timer=new.timer or kind is NoticeKind.TRAIN_ON)
                yield (
                    f"NOTICE {kind.value} at w{i}",
                    self.put(world, i, new, notices=left),
                    True,
                )
        if w.timer:
            new = self.feed(i, w, ev.LocalNotice(NoticeKind.FINAL))
            new = new._replace(timer=False)
            yield f"w{i} timer: final notice", self.put(world, i, new), False
        if world.crashes:
            dead = self.gone(w._replace(phase="dead"))
            yield (
                f"CRASH w{i}",
                self.put(world, i, dead, crashes=world.crashes - 1, broken=True),
                True,
            )
        may_raise = i in (c.detaches_of or range(c.workers))
        if world.detaches and may_raise and w.phase in ("boundary", "interval"):
            new = self.feed(i, w._replace(phase=self.raising(i)), ev.Detached())
            yield (
                f"w{i} RAISES",
                self.put(world, i, new, detaches=world.detaches - 1, broken=True),
                True,
            )
        if world.broken and self.waits_in_vain(store, w):
            new = self.feed(i, w._replace(overdue=True), ev.DeadlinePassed())
            yield f"w{i} gives up at its deadline", self.put(world, i, new), False

    def waits_in_vain(self, store: Any, w: Worker) -> bool:
        """Returns whether the main thread may reach its deadline.

        Deadlines are long compared with one read of an existing key, so not while the
        worker has such a read to make.
        """
        main, noticed = w.state.main, w.state.notice in state_machine.REAL
        waits = {
            MainThreadState.WAITING,
            MainThreadState.COLLECTING,
            MainThreadState.AWAITING,
        }
        if main not in waits and not (main is MainThreadState.FINISHING and noticed):
            return False
        return not any(
            isinstance(op, (ev.Insert, ev.ReadCounter))
            or (isinstance(op, ev.Get) and (op.key, op.round, None) in store)
            for op in w.ops
        )
