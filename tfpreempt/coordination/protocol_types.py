"""Types of the agreement: state of a worker, events and actions.

All types are frozen values. `state_machine.py` has the transition table;
`coordinator.py` turns events and actions into reads and writes of the key-value store.

A boundary is the moment before a training step. An interval is the time between two
boundaries. The count of a worker is the number of intervals started so far. A round is
one notice, with the agreement on a boundary and the save there.

A worker has four roles. The roles share the worker's state, and have separate rows in
the table:

  watch   reads the round's keys in order: notice, decision, commit;
  main    the main thread: stops at boundaries, saves and exits;
  gather  collects the keys `count`, `done` and `bye` of the other workers; only on the
          chief, whose process hosts the store;
  notice  inserts the notices of this machine into the store.
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
    """Decorator: turns a class into a frozen dataclass with slots."""
    return dataclasses.dataclass(frozen=True, slots=True)(cls)


class NoticeKind(enum.Enum):
    """Why a round (agreement and save) was opened; the value of the key `notice`."""

    FINAL = "final"  # preemption: save, then exit
    TRAIN_ON = "train_on"  # preemption: save, and continue if time is left
    PERIODIC = "periodic"  # no preemption: save, then continue
    FINISHED = "finished"  # training is over on every worker: exit normally


class CommitKind(enum.Enum):
    """Result of a round; the value of the key `commit`."""

    EXIT = "exit"  # committed: exit with the restart code
    TRAIN_ON = "train_on"  # committed: continue training, in the next round
    ALONE = "alone"  # the chief committed alone: other workers exit with outcome LOST
    NONE = "none"  # nothing was committed in this round


class Key(enum.Enum):
    """The insert-once keys of a round.

    COUNT (the worker's count), DONE (its part of the save is written, or failed) and
    BYE (the worker exits) exist once per worker.
    """

    NOTICE = "notice"
    COUNT = "count"
    DECISION = "decision"
    DONE = "done"
    COMMIT = "commit"
    BYE = "bye"


@value
class StepCount:
    """The number of intervals that a worker has started.

    The number is final if the worker starts no further interval.
    """

    count: int
    final: bool = False


@value
class Tombstone:
    """Value of a key for a worker that has crashed, is late, or has exited."""


@value
class DecidedStep:
    """The boundary at which every worker saves.

    `boundary` is the count there. None: a common save is impossible, because a required
    worker is missing.
    """

    boundary: int | None


class WatcherState(enum.Enum):
    """States of the watch role."""

    LISTENING = "listening"  # waits for the key `notice`
    COUNTING = "counting"  # has raised the flag; reads this worker's counter next
    PUBLISHING = "publishing"  # inserts this worker's count into the store
    DECIDING = "deciding"  # waits for the key `decision`
    FOLLOWING = "following"  # waits for the key `commit`
    EXCLUDED = "excluded"  # this worker was given up: key `count` is a tombstone
    OVER = "over"  # has read every key of this round
    GONE = "gone"  # the store cannot be reached


class MainThreadState(enum.Enum):
    """States of the main role."""

    TRAINING = "training"  # runs the user's code
    WAITING = "waiting"  # stopped at a boundary by the flag, until the decision
    FINISHING = "finishing"  # training is over; waits for other workers or a notice
    SAVING = "saving"
    COLLECTING = "collecting"  # chief: own part is saved; reads the `done` keys
    COMMITTING = "committing"  # chief: writes the marker of the commit
    AWAITING = "awaiting"  # own part is saved, or cannot be; waits for key `commit`
    LEAVING = "leaving"  # inserts `bye`; the chief reads the `bye` keys
    ENDED = "ended"
    DETACHED = "detached"  # an error, or a closed handler: the peers were notified


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
    """Constants of a worker, used by the transition table."""

    worker: int
    num_workers: int
    collectives: bool = True  # a step or a save needs every worker
    saves_alone: bool = True  # the chief can save without the peers

    @property
    def host(self) -> bool:
        return self.worker == 0


@value
class WorkerState:
    """Complete state of a worker in the agreement.

    `own` is the value of this worker's key `count`. `notice`, `decision` and `commit`
    are the values of the keys of this round. None: the value is not known yet.
    """

    round: int = 1
    watch: WatcherState = WatcherState.LISTENING
    main: MainThreadState = MainThreadState.TRAINING
    notice: NoticeKind | None = None
    own: StepCount | Tombstone | None = None
    decision: DecidedStep | None = None
    commit: CommitKind | None = None
    at: int = 0  # count at the main thread's newest boundary
    last: bool = False  # training is over at boundary `at`
    saved_at: int | None = None  # count at the newest commit of this process
    outcome: Outcome | None = None
    held: NoticeKind | None = None  # notice for this machine, not handled yet
    counts: tuple[
        StepCount | Tombstone, ...
    ] = ()  # chief: first only the chief's count, then the count of every worker
    staged: tuple[int, ...] = ()  # chief: workers whose parts are in the save


# --- events --------------------------------------------------------------------------


@value
class ProtocolEvent:
    """An input of the transition table."""


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
    """The watch role has inserted this worker's count.

    `value` is the value of the key: a tombstone if the worker was given up before.
    """

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
    """The key-value store can no longer be reached."""


@value
class Boundary(ProtocolEvent):
    """The main thread has stopped at a boundary.

    The reason is the flag, or `last`: training is over.
    """

    count: int
    last: bool = False


@value
class FinalCount(ProtocolEvent):
    """The main thread has inserted this worker's final count.

    `value` is the value of the key: a tombstone if the worker was given up before.
    """

    round: int
    value: StepCount | Tombstone


@value
class Saved(ProtocolEvent):
    ok: bool


@value
class Committed(ProtocolEvent):
    """The chief has written the marker of the commit; kind NONE: the write failed."""

    kind: CommitKind


@value
class StepFailed(ProtocolEvent):
    """A step failed because a peer crashed."""


@value
class Detached(ProtocolEvent):
    """The main thread raises an error, or closes the handler while the peers train."""


@value
class DeadlinePassed(ProtocolEvent):
    """The deadline of the main thread's wait has passed."""


@value
class GoodbyeSent(ProtocolEvent):
    """The worker's own `bye` is in the store."""


@value
class NextRound(ProtocolEvent):
    """The main thread continues training after the end of a round.

    The exit function has returned, or the program has opened another handler.
    """

    served: bool = True  # whether this machine's notice was handled


@value
class AllCountsReceived(ProtocolEvent):
    """The counts of the other workers, in worker order."""

    round: int
    counts: tuple[StepCount | Tombstone, ...]


@value
class AllStagedReceived(ProtocolEvent):
    """Every worker has reported on its part, or was given up.

    `staged`: the workers that have written their part of the save.
    """

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
    """The notice of this machine was not inserted: the round has an older notice."""

    round: int
    kind: NoticeKind


# --- actions -------------------------------------------------------------------------


@value
class Action:
    """An output of the transition table.

    The actions that one row returns must take effect in order.
    """


@value
class RaiseFlag(Action):
    """Stops the main thread at the next boundary, to wait for the agreement."""


@value
class LowerFlag(Action):
    pass


@value
class ReadCounter(Action):
    """Reads the counter of intervals, after RaiseFlag took effect.

    The result arrives as the event CounterRead.
    """


@value
class Get(Action):
    """Waits until any worker has inserted the key, and reads it for the watch role."""

    key: Key
    round: int


@value
class Insert(Action):
    """Inserts a key; `worker` is set for keys that exist once per worker."""

    key: Key
    round: int
    value: Any
    worker: int | None = None


@value
class Gather(Action):
    """Reads the key of every worker in `workers`.

    At the deadline, a tombstone is inserted for every missing key. Once every key has a
    value, the values arrive in one event.
    """

    key: Key
    round: int
    workers: tuple[int, ...]


@value
class Directive(Action):
    """An instruction to the main thread, which waits at a boundary."""


@value
class Proceed(Directive):
    """Continue training up to the decided boundary `until`."""

    until: int


@value
class SaveDirective(Directive):
    """Save at this boundary.

    `alone`: the peers do not save. `repeat`: this boundary is committed already, so no
    files are written.
    """

    boundary: int
    alone: bool
    repeat: bool


@value
class WriteMarker(Directive):
    """Write the marker that commits the parts of these workers; on the chief."""

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
