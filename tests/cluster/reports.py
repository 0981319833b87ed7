"""Results of a simulated run: frozen values, with times in milliseconds."""

from __future__ import annotations

import dataclasses
import enum

from tfpreempt.coordination.protocol_types import CommitKind
from tfpreempt.core.events import Outcome


class Ending(enum.Enum):
    """The end of a simulated process."""

    LEFT = "left"  # by its main thread, with the exit code of `outcome`
    OVERRUN = "overrun"  # by the alarm just before its deadline
    RAISED = "raised"  # by an error of the user's program
    KILLED = "killed"
    HUNG = "hung"  # not at all


@dataclasses.dataclass(frozen=True, slots=True)
class Save:
    """A worker's directive to save. repeat: the boundary was already committed."""

    round: int
    boundary: int
    alone: bool
    repeat: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Marker:
    """A marker by which the chief made a round's save durable.

    Attributes:
        workers: workers whose shards are in the commit.
        shares: if workers write shares, the boundary of each worker's share; -1: no
            share.
    """

    round: int
    boundary: int
    kind: CommitKind
    workers: tuple[int, ...]
    shares: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """Result of one worker.

    Attributes:
        worker: index of the worker.
        ending: end of the process.
        outcome: outcome of the exit; None if killed, raised or hung.
        ended_at_ms: time at which the process had ended; None if it hangs.
        machine_gone_at_ms: time at which the worker's machine ends, according to its
            notices; None if unknown.
        saves: directives to save, in order.
        is_overdue: whether a wait of the main thread reached its deadline.
        was_frozen: whether the process was frozen at some time.
    """

    worker: int
    ending: Ending
    outcome: Outcome | None
    ended_at_ms: int | None
    machine_gone_at_ms: int | None
    saves: tuple[Save, ...]
    is_overdue: bool
    was_frozen: bool

    @property
    def in_time(self) -> bool:
        """Whether the process ended before its machine, if the machine ends."""
        if self.ended_at_ms is None:
            return False
        gone = self.machine_gone_at_ms
        return gone is None or self.ended_at_ms <= gone


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Result of a simulated cluster.

    Attributes:
        workers: one report for each worker, by index.
        markers: durable saves, in order.
        store: keys and texts at the end of the run.
        torn: collectives that workers entered out of step, if any.
        lasted_ms: duration in virtual time.
    """

    workers: tuple[WorkerReport, ...]
    markers: tuple[Marker, ...]
    store: dict[str, str]
    torn: tuple[str, ...]
    lasted_ms: int
