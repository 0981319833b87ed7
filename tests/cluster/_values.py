"""What is explored: a small cluster, and the values that one state of it is made of."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from tfpreempt.coordination import protocol_types as ev
from tfpreempt.coordination.protocol_types import NoticeKind
from tfpreempt.core.events import Outcome


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """What to explore."""

    workers: int = 2
    lengths: tuple[int, ...] = (2,)  # intervals of each worker (last one repeats)
    collectives: bool = True  # each interval holds one collective
    collective_save: bool = True  # so does each save
    notices: tuple[NoticeKind, ...] = (NoticeKind.FINAL,)  # may come anywhere, any time
    notices_to: tuple[int, ...] = ()  # only to these workers; empty: to any
    crashes: int = 0
    suspicions: int = 0
    detaches: int = 0
    detaches_of: tuple[int, ...] = ()  # only of these workers; empty: of any
    save_failures: int = 0
    shares: bool = False  # each worker writes a share of what all hold

    def length(self, worker: int) -> int:
        return self.lengths[min(worker, len(self.lengths) - 1)]


class Worker(NamedTuple):
    state: ev.WorkerState
    # boundary, counted, interval, table, saving, writing, raising (its process is still
    # up), ended, raised, dead
    phase: str
    done: int = 0  # finished intervals
    counter: int = 0
    flag: bool = False
    ops: frozenset[Any] = frozenset()
    collectives: int = 0  # entered so far
    tag: tuple[str, int] | None = None  # the one it is in
    saved: tuple[tuple[int, int], ...] = ()  # (round, boundary) of its saves
    share: tuple[int, int] | None = None  # (round, boundary) of the one it has written
    repeats: bool = False  # its save is a commit already: nothing is written
    marked: bool = False  # the chief's WriteMarker is pending
    timer: bool = False  # a train-on notice will become final
    outcome: Outcome | None = None
    overdue: bool = False  # left because its own deadline passed


class World(NamedTuple):
    workers: tuple[Worker, ...]
    store: frozenset[tuple[Any, Any]]
    notices: tuple[NoticeKind, ...]
    crashes: int
    suspicions: int
    detaches: int
    save_failures: int
    broken: bool  # a crash, a suspicion or a detach happened
    torn: str = ""  # what is wrong with the shares of a commit


GONE = frozenset({"ended", "raised", "dead"})
