"""Types of the agreement: state of a worker, events and actions.

Frozen values only. `state_machine.py` has the rows of the table, and `coordinator.py`
turns events and actions into reads and writes of the store.

Four roles share a worker's state, each with its own rows:

  watch   reads the round's keys in order: notice, decision, commit;
  main    stops at boundaries, saves, exits; training waits only for this role;
  gather  (only on the chief, whose process hosts the store) collects counts, done
          marks and byes;
  notice  inserts this machine's own notices into the store.

An interval is the time between two boundaries; a worker's count is the number of
intervals started so far.
"""

# ruff: noqa: D101 - a class with a self-explanatory name has no docstring

from __future__ import annotations

import dataclasses
import enum
from typing import Any, TypeVar

from typing_extensions import dataclass_transform

from tfpreempt.core.events import Outcome

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def value(cls: type[T]) -> type[T]:
    """Makes a class a frozen, slotted dataclass, for arguments and results of rows."""
    return dataclasses.dataclass(frozen=True, slots=True)(cls)


class NoticeKind(enum.Enum):
    """Purpose of a round; the value of the key `notice`."""

    FINAL = "final"  # save, then exit
    TRAIN_ON = "train_on"  # save, and continue if the chief finds enough time
    PERIODIC = "periodic"  # no preemption: save, then continue
    FINISHED = "finished"  # training is over on every worker: exit normally


class CommitKind(enum.Enum):
    """Result of a round; the value of the key `commit`."""

    EXIT = "exit"  # durable: exit with the restart code
    TRAIN_ON = "train_on"  # durable: continue with the next round
    ALONE = "alone"  # the chief saved without its peers: the peers exit as lost
    NONE = "none"  # nothing was saved in this round


class Key(enum.Enum):
    """The insert-once keys of a round; COUNT, DONE and BYE exist once per worker."""

    NOTICE = "notice"
    COUNT = "count"
    DECISION = "decision"
    DONE = "done"
    COMMIT = "commit"
    BYE = "bye"


@value
class StepCount:
    """A worker's count; final once the worker's training is over."""

    count: int
    final: bool = False


@value
class Tombstone:
    """Replaces a missing value: the worker has crashed, is late, or has exited."""


@value
class DecidedStep:
    """The boundary of the save; None: lost, because a required worker is missing."""

    boundary: int | None


class WatcherState(enum.Enum):
    """States of the watch role."""

    LISTENING = "listening"  # for the round's notice
    COUNTING = "counting"  # flag raised, own counter not read yet
    PUBLISHING = "publishing"  # own count being inserted
    DECIDING = "deciding"  # waits for the decision
    FOLLOWING = "following"  # waits for the commit
    EXCLUDED = "excluded"  # found its own tombstone
    OVER = "over"  # no key of this round left to read
    GONE = "gone"  # the store is gone


class MainThreadState(enum.Enum):
    """States of the main role."""

    TRAINING = "training"  # in the user's code
    WAITING = "waiting"  # at a boundary, flag up, decision unknown
    FINISHING = "finishing"  # training over, waits for other workers or a notice
    SAVING = "saving"
    COLLECTING = "collecting"  # chief: own part is saved, done marks are missing
    COMMITTING = "committing"  # chief: writes the marker
    AWAITING = "awaiting"  # saved, or lost: waits for the commit key
    LEAVING = "leaving"  # inserts bye; the chief reads the byes
    ENDED = "ended"
    DETACHED = "detached"  # raised, or closed the handler; peers were informed


PHASES = {
    MainThreadState.TRAINING: "a step",
    MainThreadState.WAITING: "the agreement on a step",
    MainThreadState.FINISHING: "the agreement on a step",
    MainThreadState.SAVING: "the save",
    MainThreadState.COLLECTING: "the save (the parts of all)",
    MainThreadState.COMMITTING: "the save (the marker)",
    MainThreadState.AWAITING: "the save (all parts, then the commit)",
    MainThreadState.LEAVING: "the exit",
    MainThreadState.ENDED: "the exit",
    MainThreadState.DETACHED: "the exit",
}
"""Description of the main thread's state, for messages."""

AWAITED = {
    Key.COUNT: "the agreement on a step",
    Key.DONE: "the save (its part)",
    Key.BYE: "the exit",
}
"""Description of the phase in which a worker's key is awaited, for messages."""


@value
class ProtocolConfig:
    """Constants of a worker. The chief also hosts the store."""

    worker: int
    num_workers: int
    collectives: bool = True  # stepping or saving needs every worker
    saves_alone: bool = True  # the chief can save with no help from a peer

    @property
    def host(self) -> bool:
        return self.worker == 0


@value
class WorkerState:
    """Complete state of the agreement on a worker."""

    round: int = 1
    watch: WatcherState = WatcherState.LISTENING
    main: MainThreadState = MainThreadState.TRAINING
    notice: NoticeKind | None = None
    own: StepCount | Tombstone | None = None
    decision: DecidedStep | None = None
    commit: CommitKind | None = None
    at: int = 0  # main's current or last boundary
    last: bool = False  # training is over at that boundary
    saved_at: int | None = None  # boundary of the newest commit of this process
    outcome: Outcome | None = None
    held: NoticeKind | None = None  # this machine's own notice
    counts: tuple[
        StepCount | Tombstone, ...
    ] = ()  # chief: own count, later every count
    staged: tuple[int, ...] = ()  # chief: workers with parts in the save, once known


# --- events --------------------------------------------------------------------------


@value
class ProtocolEvent:
    """An input of the table."""


@value
class NoticeRead(ProtocolEvent):
    round: int
    kind: NoticeKind


@value
class CounterRead(ProtocolEvent):
    round: int
    count: int


@value
class OwnCount(ProtocolEvent):
    """The watch's insert of the own count is done; `value` is the value of the key."""

    round: int
    value: StepCount | Tombstone


@value
class DecisionRead(ProtocolEvent):
    round: int
    decided: DecidedStep


@value
class CommitRead(ProtocolEvent):
    round: int
    kind: CommitKind


@value
class StoreGone(ProtocolEvent):
    """The store cannot be reached any more."""


@value
class Boundary(ProtocolEvent):
    """Main is at a boundary with the flag raised, or at the last boundary."""

    count: int
    last: bool = False


@value
class FinalCount(ProtocolEvent):
    """Main's insert of the final count is done; `value` is the value of the key."""

    round: int
    value: StepCount | Tombstone


@value
class Saved(ProtocolEvent):
    ok: bool


@value
class Committed(ProtocolEvent):
    """The chief wrote the marker; with NONE, the write failed."""

    kind: CommitKind


@value
class StepFailed(ProtocolEvent):
    """A step failed because a peer crashed."""


@value
class Detached(ProtocolEvent):
    """Main raises, or closes its handler while training continues."""


@value
class DeadlinePassed(ProtocolEvent):
    """Main's wait has reached its deadline."""


@value
class GoodbyeSent(ProtocolEvent):
    """The worker's own `bye` is in the store."""


@value
class NextRound(ProtocolEvent):
    """Main continues after an exit: the exit function returned, or a handler opens."""

    served: bool = True  # whether the held notice was handled


@value
class AllCountsReceived(ProtocolEvent):
    """The counts of the other workers, in worker order."""

    round: int
    counts: tuple[StepCount | Tombstone, ...]


@value
class AllStagedReceived(ProtocolEvent):
    """Every gathered worker has answered; `staged` workers have a staged part."""

    round: int
    staged: tuple[int, ...]


@value
class AllGoodbyesReceived(ProtocolEvent):
    """Every other worker has inserted `bye`, or was given up."""

    round: int


@value
class LocalNotice(ProtocolEvent):
    kind: NoticeKind


@value
class NoticeExists(ProtocolEvent):
    """The insert of the own notice found an older notice in that round."""

    round: int
    kind: NoticeKind


# --- actions -------------------------------------------------------------------------


@value
class Action:
    """An output of the table; actions must take effect in order."""


@value
class RaiseFlag(Action):
    """Makes main enter the slow path before the next interval."""


@value
class LowerFlag(Action):
    pass


@value
class ReadCounter(Action):
    """Reads the counter strictly after RaiseFlag; answered by CounterRead."""


@value
class Get(Action):
    """Waits for a key of the watch role."""

    key: Key
    round: int


@value
class Insert(Action):
    """Inserts a key; `worker` is the owner, for keys that exist once per worker."""

    key: Key
    round: int
    value: Any
    worker: int | None = None


@value
class Gather(Action):
    """Reads the key of every worker in `workers`; inserts tombstones at the deadline.

    Answered by one event with the complete result; a partial result has no effect.
    """

    key: Key
    round: int
    workers: tuple[int, ...]


@value
class Directive(Action):
    """An instruction to main, which waits for a verdict."""


@value
class Proceed(Directive):
    """Continue training; the decided boundary is ahead."""

    until: int


@value
class SaveDirective(Directive):
    """Save at this boundary; with `repeat` already committed, so write no files."""

    boundary: int
    alone: bool
    repeat: bool


@value
class WriteMarker(Directive):
    """Commit the parts staged by these workers; on the chief."""

    workers: tuple[int, ...]


@value
class Resume(Directive):
    """Continue training after the round."""


@value
class ExitDirective(Directive):
    """Exit with this outcome."""

    outcome: Outcome


@value
class Raise(Directive):
    """Raise the error of the failed step as an ordinary error."""
