"""The words of the agreement: what a worker knows, what it is told, what it does.

Frozen values only. `agreement.py` has the rows that use them, `coordinator.py` turns
events and actions into reads and writes of the store.

Four roles share a worker's state, each with its own rows:
  watch   reads the round's keys in order: notice, decision, commit;
  main    stands at boundaries, saves, leaves; the only role that training waits for;
  gather  (only on the worker whose process hosts the store) collects counts, done
          marks and byes;
  notice  brings this machine's own notices into the store.
An interval lies between two boundaries; a worker's count is how many it has started.
"""

# ruff: noqa: D101 - where the name says it all there is no docstring

from __future__ import annotations

import dataclasses
import enum
from typing import Any, TypeVar

from typing_extensions import dataclass_transform

from tfpreempt.core.events import Outcome

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def value(cls: type[T]) -> type[T]:
    """A frozen, slotted dataclass: what a row is given and what it returns."""
    return dataclasses.dataclass(frozen=True, slots=True)(cls)


class NoticeKind(enum.Enum):
    """What a round is for; the value of the key `notice`."""

    FINAL = "final"  # save, then leave
    TRAIN_ON = "train_on"  # save, and go on if the chief finds that time allows
    PERIODIC = "periodic"  # nobody goes away: save, then go on
    FINISHED = "finished"  # training is over everywhere: leave normally


class CommitKind(enum.Enum):
    """How a round ended; the value of the key `commit`."""

    EXIT = "exit"  # durable: leave with the restart code
    TRAIN_ON = "train_on"  # durable: go on into the next round
    ALONE = "alone"  # the chief saved without its peers: they leave as lost
    NONE = "none"  # nothing was saved in this round


class Key(enum.Enum):
    """The insert-once keys of one round; COUNT, DONE and BYE exist once per worker."""

    NOTICE = "notice"
    COUNT = "count"
    DECISION = "decision"
    DONE = "done"
    COMMIT = "commit"
    BYE = "bye"


@value
class Count:
    """A worker's count; final once its training is over."""

    count: int
    final: bool = False


@value
class Tombstone:
    """Stands where a worker's value will never come: it is dead, late, or has left."""


@value
class Decided:
    """The boundary to save at; None: lost, because a worker that is needed is gone."""

    boundary: int | None


class Watch(enum.Enum):
    """States of the watch role."""

    LISTENING = "listening"  # for the round's notice
    COUNTING = "counting"  # flag raised, own counter not read yet
    PUBLISHING = "publishing"  # own count on its way
    DECIDING = "deciding"  # waits for the decision
    FOLLOWING = "following"  # waits for the commit
    EXCLUDED = "excluded"  # found its own tombstone
    OVER = "over"  # this round has no more to read
    GONE = "gone"  # the store is gone


class Main(enum.Enum):
    """States of the main role."""

    TRAINING = "training"  # in the user's hands
    WAITING = "waiting"  # at a boundary, flag up, decision unknown
    FINISHING = "finishing"  # training over, waits for the others or a notice
    SAVING = "saving"
    COLLECTING = "collecting"  # chief: its part is saved, others' done marks missing
    COMMITTING = "committing"  # chief: writes the marker
    AWAITING = "awaiting"  # saved, or lost: waits for the commit key
    LEAVING = "leaving"  # says bye; the store's host hears everyone's
    ENDED = "ended"
    DETACHED = "detached"  # raised, or gave up its handler; peers were told


PHASES = {
    Main.TRAINING: "a step",
    Main.WAITING: "the agreement on a step",
    Main.FINISHING: "the agreement on a step",
    Main.SAVING: "the save",
    Main.COLLECTING: "the save (the parts of all)",
    Main.COMMITTING: "the save (the marker)",
    Main.AWAITING: "the save (all parts, then the commit)",
    Main.LEAVING: "the exit",
    Main.ENDED: "the exit",
    Main.DETACHED: "the exit",
}
"""What main is in the midst of, for people."""

AWAITED = {
    Key.COUNT: "the agreement on a step",
    Key.DONE: "the save (its part)",
    Key.BYE: "the exit",
}
"""In what a worker is waited for, whose key that is, for people."""


@value
class Settings:
    """What does not change for a worker: the host of the store is also the chief."""

    worker: int
    world: int
    collectives: bool = True  # stepping or saving needs every worker
    saves_alone: bool = True  # the chief can save with no help from a peer

    @property
    def host(self) -> bool:
        return self.worker == 0


@value
class State:
    """Everything that one worker knows."""

    round: int = 1
    watch: Watch = Watch.LISTENING
    main: Main = Main.TRAINING
    notice: NoticeKind | None = None
    own: Count | Tombstone | None = None
    decision: Decided | None = None
    commit: CommitKind | None = None
    at: int = 0  # the boundary where main stands, or stood last
    last: bool = False  # training is over at that boundary
    saved_at: int | None = None  # boundary of the newest commit of this process
    outcome: Outcome | None = None
    held: NoticeKind | None = None  # this machine's own notice
    counts: tuple[Count | Tombstone, ...] = ()  # host: its own; once all are read, all
    staged: tuple[int, ...] = ()  # chief: whose parts its save has, once all are read


# --- events --------------------------------------------------------------------------


@value
class Event:
    """What a worker is told."""


@value
class NoticeRead(Event):
    round: int
    kind: NoticeKind


@value
class CounterRead(Event):
    round: int
    count: int


@value
class OwnCount(Event):
    """The watch's insert of the own count is done; value is what the key holds."""

    round: int
    value: Count | Tombstone


@value
class DecisionRead(Event):
    round: int
    decided: Decided


@value
class CommitRead(Event):
    round: int
    kind: CommitKind


@value
class StoreGone(Event):
    """The store cannot be reached any more."""


@value
class Boundary(Event):
    """Main stands at a boundary with the flag up, or at its last one."""

    count: int
    last: bool = False


@value
class FinalCount(Event):
    """Main's insert of the final count is done; value is what the key holds."""

    round: int
    value: Count | Tombstone


@value
class Saved(Event):
    ok: bool


@value
class Committed(Event):
    """The chief wrote the marker (or NONE: it could not)."""

    kind: CommitKind


@value
class StepFailed(Event):
    """A step failed because a peer is gone."""


@value
class Detached(Event):
    """Main raises, or gives up its handler while training goes on."""


@value
class DeadlinePassed(Event):
    """Main has waited as long as it may."""


@value
class ByeSaid(Event):
    """The own bye is in the store."""


@value
class NextRound(Event):
    """Main goes on after leaving: the exit function returned, or a handler opens."""

    served: bool = True  # the held notice is dealt with


@value
class CountsRead(Event):
    """All others' counts, in the order of the workers."""

    round: int
    counts: tuple[Count | Tombstone, ...]


@value
class DonesRead(Event):
    """All who were asked have answered; the workers whose part is staged."""

    round: int
    staged: tuple[int, ...]


@value
class ByesRead(Event):
    """All others have said bye, or are given up."""

    round: int


@value
class LocalNotice(Event):
    kind: NoticeKind


@value
class NoticeExists(Event):
    """The own notice met an older one in that round."""

    round: int
    kind: NoticeKind


# --- actions -------------------------------------------------------------------------


@value
class Action:
    """What a worker is to do, in the order in which it must take effect."""


@value
class RaiseFlag(Action):
    """Main must look before it starts another interval."""


@value
class LowerFlag(Action):
    pass


@value
class ReadCounter(Action):
    """Answer with CounterRead; strictly after RaiseFlag took effect."""


@value
class Get(Action):
    """Wait for a key of the watch role."""

    key: Key
    round: int


@value
class Insert(Action):
    """Insert a key; worker names whose it is, for keys that exist once per worker."""

    key: Key
    round: int
    value: Any
    worker: int | None = None


@value
class Gather(Action):
    """Read the key of every worker in `workers`, tombstones at the deadline.

    Answered by one event once all are there: nothing follows from some of them.
    """

    key: Key
    round: int
    workers: tuple[int, ...]


@value
class Verdict(Action):
    """What main is to do, which waits for it."""


@value
class Proceed(Verdict):
    """Train on; the decision lies ahead."""

    until: int


@value
class Save(Verdict):
    """Save now. repeat: this boundary is committed already, write nothing."""

    boundary: int
    alone: bool
    repeat: bool


@value
class WriteMarker(Verdict):
    """For the chief: commit what these workers staged."""

    workers: tuple[int, ...]


@value
class Resume(Verdict):
    """Committed, train on."""


@value
class Leave(Verdict):
    """Leave with this outcome."""

    outcome: Outcome


@value
class Raise(Verdict):
    """The failed step is an ordinary error."""
