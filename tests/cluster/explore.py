"""An exhaustive search over the shipped agreement table.

Breadth-first over every interleaving of a small cluster (`_world.py`). The first path
to each kind of violation is kept, and is a shortest one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Iterator
from typing import Any

from tests.cluster._values import GONE, Cluster, Worker, World
from tests.cluster._world import Search
from tfpreempt.coordination import protocol_types as ev
from tfpreempt.coordination.protocol_types import (
    CommitKind,
    Key,
    MainThreadState,
    NoticeKind,
    WatcherState,
)
from tfpreempt.core.events import Outcome

# --- what must never be seen ---------------------------------------------------------


def violation(cluster: Cluster, world: World, stuck: bool) -> str | None:
    """Returns the violated promise of a world, or None."""
    workers, store = world.workers, dict(world.store)
    boundaries: dict[int, set[int]] = {}
    for i, w in enumerate(workers):
        for round, boundary in w.saved:
            if cluster.collectives or boundary < cluster.length(i):
                boundaries.setdefault(round, set()).add(boundary)
    if world.torn:
        return f"TORN: {world.torn}"
    entered: dict[int, tuple[str, int] | None] = {}
    for w in workers:
        if w.phase not in ("interval", "saving") or w.tag is None:
            continue
        if entered.setdefault(w.collectives, w.tag) != w.tag:
            other = entered[w.collectives]
            return (
                f"CROSSED: one worker is in the collective of {other}, one of {w.tag}"
            )
    for round, seen in boundaries.items():
        if len(seen) > 1:
            return f"SPLIT: saves at boundaries {sorted(seen)} in round {round}"
    outcomes = {w.outcome for w in workers if w.phase == "ended"}
    commits = {key[1]: kind for key, kind in store.items() if key[0] is Key.COMMIT}
    for i, w in enumerate(workers):
        kind = commits.get(w.state.round)
        if w.outcome is Outcome.COMMITTED and kind in (None, CommitKind.NONE):
            return f"UNCOMMITTED: w{i} leaves as committed, commit is {kind}"
    in_time = {w.outcome for w in workers if w.phase == "ended" and not w.overdue}
    host_ends = workers[0].phase not in ("dead", "raised")
    if host_ends and Outcome.FINISHED in in_time and len(in_time) > 1:
        return f"MIXED: one leaves normally, another restarts: {outcomes}"
    if not world.broken:
        if Outcome.LOST in outcomes or any(
            w.phase in ("raising", "raised") for w in workers
        ):
            return "LOST: a loss without any failure"
        if workers[0].phase == "ended" and any(w.phase not in GONE for w in workers):
            return "HOST LEFT: while another still needs the store"
    for i, w in enumerate(workers):
        if is_forgotten(w, store):
            return f"FORGOTTEN: w{i} holds a final notice that is in no round"
    if stuck and any(w.phase not in GONE for w in workers):
        where = ", ".join(
            f"w{i} {w.phase}/{w.state.main.name}" for i, w in enumerate(workers)
        )
        return f"STUCK: {where}"
    if stuck and not world.broken:
        noticed = [kind for key, kind in store.items() if key[0] is Key.NOTICE]
        real = [kind for kind in noticed if kind is not NoticeKind.FINISHED]
        done = [kind for kind in commits.values() if kind is not CommitKind.NONE]
        left = commits.get(max(commits, default=0)) is CommitKind.EXIT
        if len(done) < len(real) and NoticeKind.FINISHED not in noticed and not left:
            return f"SILENT LOSS: notices {real}, commits {done}"
    return None


def is_forgotten(w: Worker, store: dict[Any, Any]) -> bool:
    """Whether its own final notice is neither in the store nor on its way there."""
    if w.state.held is not NoticeKind.FINAL or w.state.watch is WatcherState.GONE:
        return False
    if w.phase in GONE or w.state.main is MainThreadState.DETACHED:
        return False
    last = (NoticeKind.FINAL, NoticeKind.FINISHED)
    return not any(
        key[0] is Key.NOTICE and key[1] >= w.state.round and kind in last
        for key, kind in store.items()
    ) and not any(isinstance(op, ev.Insert) and op.key is Key.NOTICE for op in w.ops)


@dataclasses.dataclass
class Result:
    states: int
    transitions: int
    violations: dict[str, tuple[str, list[str]]]
    endings: dict[tuple[str, ...], int]
    seconds: float


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without the collector of cycles: millions of values here, and no cycle."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@uncollected()
def explore(
    cluster: Cluster, limit: int = 5_000_000, first_only: bool = False
) -> Result:
    """Explores all states, or raises if there are more than `limit`.

    Args:
        cluster: parameters of the exploration.
        limit: largest number of states.
        first_only: whether to stop at the first violation.
    """
    started = time.perf_counter()
    search = Search(cluster)
    first = search.initial()
    order = [first]
    parents: list[tuple[int, str]] = [(-1, "")]
    seen = {search.identity(first)}
    result = Result(0, 0, {}, {}, 0.0)
    for n, world in enumerate(order):
        steps = search.steps(world)
        stuck = all(chosen for _, _, chosen in steps)
        wrong = violation(cluster, world, stuck)
        if wrong is not None:
            kind = wrong.split(":")[0]
            result.violations.setdefault(kind, (wrong, trace(parents, n)))
            if first_only:
                break
            continue
        if stuck:
            ending = tuple(sorted(str(w.outcome or w.phase) for w in world.workers))
            result.endings[ending] = result.endings.get(ending, 0) + 1
        for label, after, _ in steps:
            result.transitions += 1
            identity = search.identity(after)
            if identity not in seen:
                seen.add(identity)
                order.append(after)
                parents.append((n, label))
        if len(order) > limit:
            raise AssertionError(f"more than {limit} states in {cluster}")
        order[n] = None  # type: ignore[call-overload]
    result.states = len(order)
    result.seconds = time.perf_counter() - started
    return result


def trace(parents: list[tuple[int, str]], n: int) -> list[str]:
    labels = []
    while n > 0:
        n, label = parents[n]
        labels.append(label)
    return labels[::-1]


def show(name: str, result: Result) -> str:
    lines = [
        f"{name}: {result.states} states, {result.transitions} transitions, "
        f"{result.seconds:.1f} s, endings {result.endings}"
    ]
    for wrong, labels in result.violations.values():
        lines += [f"  {wrong}", *(f"    {label}" for label in labels)]
    return "\n".join(lines)
