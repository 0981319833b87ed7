"""Types of the agreement: state of a worker, events and actions.

All types are frozen values. `state_machine.py` has the transition table;
`coordinator.py` turns events and actions into reads and writes of the key-value store.

A boundary is the moment between two training steps. An interval is the time between two
boundaries, usually a step. The count of a worker is the number of intervals that the
worker has started so far. A round is one notice, with the agreement on a boundary and
the save at this boundary.

A worker has four roles, which share the worker's state. Each role has separate rows in
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
    """The reason for a round (agreement and save): the value of the key `notice`."""

    FINAL = "final"  # preemption: save, then exit
    TRAIN_ON = "train_on"  # preemption: save, and continue if time is left
    PERIODIC = "periodic"  # no preemption: save, then continue
    FINISHED = "finished"  # training is over on every worker: exit normally


class CommitKind(enum.Enum):
    """The result of a round: the value of the key `commit`."""

    EXIT = "exit"  # committed: exit with the restart code
    TRAIN_ON = "train_on"  # committed: continue training, in the next round
    ALONE = "alone"  # the chief committed alone: other workers exit with outcome LOST
    NONE = "none"  # nothing was committed in this round


class Key(enum.Enum):
    """The insert-once keys of a round.

    Three keys exist once per worker: COUNT (the count of the worker), DONE (the worker
    has written its part of the save, or has failed to) and BYE (the worker exits).
    """

    NOTICE = "notice"
    COUNT = "count"
    DECISION = "decision"
    DONE = "done"
    COMMIT = "commit"
    BYE = "bye"


@value
class StepCount:
    """The count: the number of intervals that a worker has started.

    `final`: True if the worker will start no further interval.
    """

    count: int
    final: bool = False


@value
class Tombstone:
    """Value that a peer inserts for a worker that has crashed, is late, or has
    exited."""


@value
class DecidedStep:
    """The decision: the boundary at which every worker saves.

    `boundary` is the count at this boundary. None: a common save is impossible, because
    a required worker is missing.
    """

    boundary: int | None


class WatcherState(enum.Enum):
    """States of the watch role."""

    LISTENING = "listening"  # waits for the key `notice`
    COUNTING = "counting"  # has raised the flag; reads this worker's counter next
    PUBLISHING = "publishing"  # inserts this worker's count into the store
    DECIDING = "deciding"  # waits for the key `decision`
    FOLLOWING = "following"  # waits for the key `commit`
    EXCLUDED = "excluded"  # this worker was given up: its `count` is a tombstone
    OVER = "over"  # has read every key of this round
    GONE = "gone"  # the store cannot be reached


class MainThreadState(enum.Enum):
    """States of the main role."""

    TRAINING = "training"  # runs the user's code
    WAITING = "waiting"  # stopped at a boundary by the flag, until the decision
    FINISHING = "finishing"  # training is over; waits for other workers or a notice
    SAVING = "saving"
    COLLECTING = "collecting"  # chief: has saved its part; reads the `done` keys
    COMMITTING = "committing"  # chief: writes the marker of the commit
    AWAITING = "awaiting"  # has saved its part, or cannot; waits for the key `commit`
    LEAVING = "leaving"  # inserts `bye`; the chief reads the `bye` keys
    ENDED = "ended"
    DETACHED = "detached"  # error or closed handler; the other workers were notified


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
"""For each key of a worker: the phase in which the chief waits for the key, as text."""


@value
class ProtocolConfig:
    """Constants of a worker, used by the transition table."""

    worker: int
    num_workers: int
    collectives: bool = True  # whether a step or a save needs every worker
    saves_alone: bool = True  # whether the chief can save without the other workers

    @property
    def host(self) -> bool:
        return self.worker == 0


@value
class WorkerState:
    """Complete state of a worker in the agreement.

    `notice`, `decision` and `commit` are the values of these keys in the current round,
    and `own` is the value of this worker's key `count`. None: the worker has not read
    the key yet.
    """

    round: int = 1
    watch: WatcherState = WatcherState.LISTENING
    main: MainThreadState = MainThreadState.TRAINING
    notice: NoticeKind | None = None
    own: StepCount | Tombstone | None = None
    decision: DecidedStep | None = None
    commit: CommitKind | None = None
    at: int = 0  # count at the main thread's newest boundary
    last: bool = False  # whether training is over at boundary `at`
    saved_at: int | None = None  # count at the newest commit of this process
    outcome: Outcome | None = None
    held: NoticeKind | None = None  # notice for this machine that is not handled yet
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

    The reason for the stop is the flag, or the end of training if `last` is True.
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
    """The chief has written the marker of the commit, or the commit failed.

    Attributes:
        kind: kind of the commit; NONE after a failure.
    """

    kind: CommitKind


@value
class StepFailed(ProtocolEvent):
    """A step failed because a peer crashed."""


@value
class Detached(ProtocolEvent):
    """The main thread raises an error, or closes the handler before other workers."""


@value
class DeadlinePassed(ProtocolEvent):
    """The deadline of the main thread's wait has passed."""


@value
class GoodbyeSent(ProtocolEvent):
    """This worker's key `bye` is in the store."""


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
    """Every worker has reported on its part of the save, or was given up.

    `staged`: indices of the workers that have written their part.
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
    """This machine's notice was not inserted, because the round has an older notice."""

    round: int
    kind: NoticeKind


# --- actions -------------------------------------------------------------------------


@value
class Action:
    """An output of the transition table.

    If a row returns several actions, they must take effect in order.
    """


@value
class RaiseFlag(Action):
    """Stops the main thread at the next boundary, to wait for the agreement."""


@value
class LowerFlag(Action):
    pass


@value
class ReadCounter(Action):
    """Reads the counter of intervals, after RaiseFlag has taken effect.

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

    At the deadline, a tombstone is inserted for every missing key. When all keys have
    a value, the values arrive in one event.
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

    `alone`: whether only this worker saves. `repeat`: whether this boundary was already
    committed; if so, no files are written.
    """

    boundary: int
    alone: bool
    repeat: bool


@value
class WriteMarker(Directive):
    """On the chief: write the marker that commits the parts of `workers`."""

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
    """Raise the error of the failed step, because no worker has to exit."""
