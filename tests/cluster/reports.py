"""What a simulated run says when it is over: frozen values, times in milliseconds."""

from __future__ import annotations

import dataclasses
import enum

from tfpreempt.coordination.protocol_types import CommitKind
from tfpreempt.core.events import Outcome


class Ending(enum.Enum):
    """How a simulated process ended."""

    LEFT = "left"  # by its main thread: `outcome` says with which code
    OVERRUN = "overrun"  # by the alarm just before its deadline
    RAISED = "raised"  # by an error of the user's program
    KILLED = "killed"
    HUNG = "hung"  # not at all


@dataclasses.dataclass(frozen=True, slots=True)
class Save:
    """A worker was told to save. repeat: the boundary was committed already."""

    round: int
    boundary: int
    alone: bool
    repeat: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Marker:
    """The chief made a round's save durable, with the shards of these workers.

    shares: where workers write a share each of what all hold, the boundary that the
    share of each is of, by worker; -1: there was none.
    """

    round: int
    boundary: int
    kind: CommitKind
    workers: tuple[int, ...]
    shares: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """What became of one worker.

    Attributes:
        worker: its index.
        ending: how its process ended.
        outcome: what it left as; None if it was killed, raised or hangs.
        ended_at_ms: when its process was gone; None if it hangs.
        machine_gone_at_ms: when its own machine goes, by the notices it received;
            None if none said when.
        saves: what it was told to save, in order.
        is_overdue: a wait of its main thread reached its deadline.
        was_frozen: it was frozen at some time.
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
        """Whether it ended before its machine goes, if that goes."""
        if self.ended_at_ms is None:
            return False
        gone = self.machine_gone_at_ms
        return gone is None or self.ended_at_ms <= gone


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What became of a simulated cluster.

    Attributes:
        workers: one report for each, by index.
        markers: what became durable, in order.
        store: the keys and their text when the run was over.
        torn: the collectives that workers entered out of step, if any.
        lasted_ms: virtual time that passed.
    """

    workers: tuple[WorkerReport, ...]
    markers: tuple[Marker, ...]
    store: dict[str, str]
    torn: tuple[str, ...]
    lasted_ms: int
