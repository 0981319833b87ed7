"""The explored cluster, and the values that a state of the cluster consists of."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from tfpreempt.coordination import protocol_types as ev
from tfpreempt.coordination.protocol_types import NoticeKind
from tfpreempt.core.events import Outcome


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Parameters of an exploration."""

    workers: int = 2
    lengths: tuple[int, ...] = (2,)  # intervals of each worker (the last repeats)
    collectives: bool = True  # every interval has a collective
    collective_save: bool = True  # every save has a collective
    notices: tuple[NoticeKind, ...] = (NoticeKind.FINAL,)  # to any worker, at any time
    notices_to: tuple[int, ...] = ()  # only to these workers; empty: to any
    crashes: int = 0
    suspicions: int = 0
    detaches: int = 0
    detaches_of: tuple[int, ...] = ()  # only of these workers; empty: of any
    save_failures: int = 0
    shares: bool = False  # workers write shares of the common state

    def length(self, worker: int) -> int:
        return self.lengths[min(worker, len(self.lengths) - 1)]


class Worker(NamedTuple):
    state: ev.WorkerState
    # boundary, counted, interval, table, saving, writing, raising (the process still
    # runs), ended, raised, dead (crashed)
    phase: str
    done: int = 0  # finished intervals
    counter: int = 0
    flag: bool = False
    ops: frozenset[Any] = frozenset()
    collectives: int = 0  # entered so far
    tag: tuple[str, int] | None = None  # the current collective
    saved: tuple[tuple[int, int], ...] = ()  # (round, boundary) of its saves
    share: tuple[int, int] | None = None  # (round, boundary) of the written share
    repeats: bool = False  # the save is already a commit: nothing is written
    marked: bool = False  # the chief's WriteMarker is pending
    timer: bool = False  # a train-on notice will become final
    outcome: Outcome | None = None
    overdue: bool = False  # ended because its own deadline passed


class World(NamedTuple):
    workers: tuple[Worker, ...]
    store: frozenset[tuple[Any, Any]]
    notices: tuple[NoticeKind, ...]
    crashes: int
    suspicions: int
    detaches: int
    save_failures: int
    broken: bool  # a crash, a suspicion or a detach happened
    torn: str = ""  # error in the shares of a commit


GONE = frozenset({"ended", "raised", "dead"})
