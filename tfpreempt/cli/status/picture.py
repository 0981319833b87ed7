"""What a run is at: from its journals, and from what its workers say of themselves.

Nothing here reads a file or a clock. Times are wall seconds. Those of a worker and of
its supervisor are of one machine; between machines they are compared for people only.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tfpreempt.checkpoint.remote.status import MirrorStatus
from tfpreempt.cli.run.policy import Cause, ReturnCode, describe_end
from tfpreempt.core.events import Outcome
from tfpreempt.core.fields import are_kinds
from tfpreempt.core.python import StrEnum
from tfpreempt.handler.now import TOLD_EVERY, Now

SILENT_AFTER = 6 * TOLD_EVERY
"""Seconds without a word after which a worker is called silent."""

_LEFT_AFTER = 2 * TOLD_EVERY  # without a word from who said that it leaves
_RESTARTS = (Cause.PREEMPTION, Cause.FAILURE, Cause.HANG)
_LONGEST_DELAY = 60.0  # before a start, where the supervisor has not said it
_STARTS_WITHIN = 60.0  # after that

Record = Mapping[str, Any]

_OF_WORKERS: Mapping[str, Mapping[str, str]] = {
    "restored": {"incarnation": "text", "step": "count"},
    "notice": {"grace_seconds": "number?"},
    "commit": {"step": "count"},
    "exit": {"outcome": "text", "step": "count", "code": "number?", "detail": "text?"},
}
_START = {"workers": "workers", "first_worker": "count?"}
_OF_SUPERVISORS: Mapping[str, Mapping[str, str]] = {
    "started": _START,
    "restarted": _START,
    "worker_ended": {"worker": "count", "returncode": "number"},
    "budget": {"cause": "text", "is_used_up": "flag", "delay": "seconds?"},
    "left": {"cause": "text", "code": "number"},
    "supervisor_died": {},
}


class State(StrEnum):
    """What a worker is at; the first three are its own words."""

    TRAINING = "training"
    SAVING = "saving"
    WAITING = "waiting"
    STARTING = "starting"  # it has not come to its first step
    SILENT = "silent"  # nothing is heard of it any more
    DOWN = "down"  # it has ended, or left
    FINISHED = "finished"  # its training is over


@dataclasses.dataclass(frozen=True, slots=True)
class Heard:
    """A worker's newest word, and when it came by the clock here."""

    now: Now
    at: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One worker.

    Attributes:
        worker: its index.
        state: what it is at.
        since: when that was heard of last, or when it ended; None where nothing was.
        why: how it ended; empty while it goes on.
        step: that it has made; None while it has not said.
        steps_per_second: of the last minute, while it trains.
        stepped_at: when it came to that step; None where it has not said.
        noticed_at: when the notice came that it serves.
        deadline: when its machine goes.
        host: its machine.
        pid: its process.
        upload: of the copy of the commits, where it makes one.
    """

    worker: int
    state: State
    since: float | None = None
    why: str = ""
    step: int | None = None
    steps_per_second: float | None = None
    stepped_at: float | None = None
    noticed_at: float | None = None
    deadline: float | None = None
    host: str | None = None
    pid: int | None = None
    upload: MirrorStatus | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A run at one moment.

    Attributes:
        at: when.
        workers: by their indices.
        commits: how many there were.
        commit_step: of the newest; None before the first.
        committed_at: when that was.
        restarts: how many of each kind, see docs/live.md.
        restarts_by: when the workers, which have ended, are to be started again; None
            where they are not.
        ended: how the run ended, in words; empty while it goes on.
    """

    at: float
    workers: Sequence[Worker]
    commits: int = 0
    commit_step: int | None = None
    committed_at: float | None = None
    restarts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    restarts_by: float | None = None
    ended: str = ""

    @property
    def is_fine(self) -> bool:
        """Whether it goes on, as far as is known, or its training is over."""
        states = {each.state for each in self.workers}
        if states <= {State.FINISHED}:
            return True
        if states <= {State.DOWN, State.FINISHED}:
            return self.restarts_by is not None and self.at < self.restarts_by
        return State.SILENT not in states

    @property
    def step(self) -> int | None:
        """That all workers have made, of those that say it."""
        return min((w.step for w in self.workers if w.step is not None), default=None)

    @property
    def stepped_at(self) -> float | None:
        """When the last of them came to it, of those that train."""
        told = [w.stepped_at for w in self.workers if w.stepped_at is not None]
        return max(told, default=None)

    @property
    def noticed(self) -> Worker | None:
        """Who serves a notice, and has the least time; None where nobody does."""
        told = [each for each in self.workers if each.noticed_at is not None]
        return min(told, key=lambda each: each.deadline or float("inf"), default=None)

    @property
    def upload(self) -> MirrorStatus | None:
        """Of the copy of the commits, where one is made."""
        return next((each.upload for each in self.workers if each.upload), None)


@dataclasses.dataclass(eq=False)
class WorkerJournal:
    """What a worker's journal says so far."""

    started_at: float | None = None
    restarts: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    commits: int = 0
    commit_step: int | None = None
    committed_at: float | None = None
    noticed_at: float | None = None
    deadline: float | None = None
    left_at: float | None = None
    left_as: Outcome | None = None
    left_why: str = ""
    step: int | None = None
    _incarnation: str = ""

    def see(self, record: Record) -> None:
        """The next record, which `parse_record` gave.

        Raises:
            ValueError: it is not as workers write them.
        """
        wall = _check(record, _OF_WORKERS)
        match record.get("event"):
            case "restored":
                self._see_start(wall, record["incarnation"])
                self.step = record["step"]
            case "notice":
                grace = record.get("grace_seconds")
                self.noticed_at = wall
                self.deadline = None if grace is None else wall + float(grace)
            case "commit":
                self.commits += 1
                self.commit_step, self.committed_at = record["step"], wall
                self.step = max(self.step or 0, record["step"])
            case "exit":
                self.left_as, self.left_at = Outcome(record["outcome"]), wall
                self.step, code = record["step"], record.get("code")
                told = "" if code is None else f", exit code {int(code)}"
                if self.left_as is Outcome.FAILED and (error := record.get("detail")):
                    told = f": {error}"
                self.left_why = f"{self.left_as} at step {self.step}{told}"
                self.noticed_at = self.deadline = None

    def _see_start(self, wall: float, incarnation: str) -> None:
        is_new = incarnation != self._incarnation
        if self.started_at is not None and is_new:
            if self.left_as in (None, Outcome.FAILED):
                self.restarts["failure"] += 1
            elif self.left_as is not Outcome.FINISHED:
                self.restarts["preemption"] += 1
        self.started_at, self._incarnation = wall, incarnation
        self.left_at = self.left_as = self.noticed_at = self.deadline = None


@dataclasses.dataclass(eq=False)
class SupervisorJournal:
    """What a supervisor's journal says so far.

    Attributes:
        first: index of its first worker; None where it has none that train.
        died_at: time at which a signal or an error ended the supervisor.
    """

    started_at: float | None = None
    died_at: float | None = None
    first: int | None = 0
    count: int = 0
    ends: dict[int, tuple[float, ReturnCode]] = dataclasses.field(default_factory=dict)
    restarts: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    restarts_by: float | None = None
    left_at: float | None = None
    left_as: Cause | None = None
    left_code: int = 0
    _cause: Cause | None = None  # of the restart that is to come

    def see(self, record: Record) -> None:
        """The next record, which `parse_record` gave.

        Raises:
            ValueError: it is not as supervisors write them.
        """
        wall = _check(record, _OF_SUPERVISORS)
        match record.get("event"):
            case "started" | "restarted" as event:
                self._see_start(event == "restarted")
                self.started_at, self.count = wall, record["workers"]
                self.first = record.get("first_worker", 0)
            case "worker_ended":
                code = ReturnCode(int(record["returncode"]))
                self.ends[record["worker"]] = wall, code
            case "budget":
                cause = Cause(record["cause"])
                self._cause = cause if cause in _RESTARTS else None
                if self._cause is not None and not record["is_used_up"]:
                    delay = record.get("delay")
                    delay = _LONGEST_DELAY if delay is None else delay
                    self.restarts_by = wall + delay + _STARTS_WITHIN
            case "left":
                self.left_as, self.left_at = Cause(record["cause"]), wall
                self.left_code, self.restarts_by = int(record["code"]), None
            case "supervisor_died":
                self.died_at, self.restarts_by = wall, None

    def _see_start(self, is_restart: bool) -> None:
        if is_restart and self._cause is not None:
            self.restarts[self._cause.value] += 1
        elif not is_restart and self.started_at is not None:
            if self.left_as is None:
                self.restarts["lost"] += 1
            elif self.left_as is not Cause.FINISHED:
                self.restarts[self.left_as.value] += 1
        self.ends = {}
        self._cause = self.left_as = self.left_at = self.restarts_by = None
        self.died_at = None

    @property
    def workers(self) -> range:
        """Indices of its workers."""
        first = self.first or 0
        return range(first, first + (0 if self.first is None else self.count))


def _check(record: Record, events: Mapping[str, Mapping[str, str]]) -> float:
    """When it was written; its fields are of their kinds, if it is of these events."""
    name = record.get("event")
    kinds = events.get(name, {}) if isinstance(name, str) else {}
    if not are_kinds(record, {**kinds, "wall": "time"}):
        raise ValueError(f"the record {name!r} is not as it is written here")
    return float(record["wall"])


def paint(
    at: float,
    supervisors: Sequence[SupervisorJournal],
    journals: Mapping[int, WorkerJournal],
    heard: Mapping[int, Heard],
) -> Picture:
    """What the run is at.

    Args:
        at: now.
        supervisors: what those of the run's machines wrote.
        journals: what each worker wrote.
        heard: what each said of itself last.
    """
    over = _supervisors_by_worker(supervisors, journals)
    if newest_word := max(heard.values(), key=lambda each: each.at, default=None):
        now = newest_word.now
        over = {
            worker: each
            for worker, each in over.items()
            if worker < now.world or (each.started_at or 0.0) > now.at
        }
    world = newest_word.now.world if newest_word else 1 << 31
    indices = set(over) or {w for w in {*journals, *heard} if w < world}
    workers = [
        _worker(at, each, over.get(each), journals.get(each), heard.get(each))
        for each in sorted(indices)
    ]
    here = list({id(each): each for each in over.values()}.values())
    known = [each for each in journals.values() if each.committed_at is not None]
    newest = max(known, key=lambda each: each.committed_at or 0.0, default=None)
    if newest is not None:
        workers = [_at_commit(each, newest) for each in workers]
    counts = [each.restarts for each in here or journals.values()]
    pauses = [each.restarts_by for each in here if each.restarts_by is not None]
    return Picture(
        at=at,
        workers=workers,
        commits=sum(each.commits for each in journals.values()),
        commit_step=newest.commit_step if newest else None,
        committed_at=newest.committed_at if newest else None,
        # One of the whole cluster is written by the supervisor of each machine.
        restarts=dict(max(counts, key=lambda each: each.total(), default={})),
        restarts_by=max(pauses, default=None),
        ended=_ended(here, workers),
    )


def _supervisors_by_worker(
    supervisors: Sequence[SupervisorJournal], journals: Mapping[int, WorkerJournal]
) -> dict[int, SupervisorJournal]:
    """Whose each worker is; none of who left before the worker was started anew."""
    found = {}
    for each in sorted(supervisors, key=lambda each: each.started_at or 0.0):
        for worker in each.workers:
            begun = journals[worker].started_at if worker in journals else None
            if each.left_at is None or begun is None or begun < each.left_at:
                found[worker] = each
    return found


def _worker(
    at: float,
    worker: int,
    supervisor: SupervisorJournal | None,
    journal: WorkerJournal | None,
    heard: Heard | None,
) -> Worker:
    of = supervisor or journal
    began = (of.started_at if of else None) or 0.0
    if heard is not None and heard.now.at < began:
        heard = None  # of the process before
    if journal is not None and (journal.started_at or 0.0) < began:
        journal = None
    known = Worker(worker=worker, state=State.STARTING, since=began or None)
    if journal is not None:
        known = dataclasses.replace(
            known,
            step=journal.step,
            noticed_at=journal.noticed_at,
            deadline=journal.deadline,
        )
    if heard is not None:
        known = _with_word(known, heard)
    if (end := _end(at, worker, supervisor, journal, heard)) is not None:
        state, since, why = end
        return dataclasses.replace(
            known, state=state, since=since, why=why, noticed_at=None, deadline=None
        )
    if heard is None:
        return known
    if at - heard.at > SILENT_AFTER:
        return dataclasses.replace(known, state=State.SILENT)
    return dataclasses.replace(
        known,
        state=State(heard.now.doing),
        steps_per_second=heard.now.steps_per_second,
        stepped_at=heard.now.stepped_at,
    )


def _with_word(known: Worker, heard: Heard) -> Worker:
    """What the journal says of a worker, with what it says itself."""
    now = heard.now
    known = dataclasses.replace(
        known,
        since=heard.at,
        step=max(now.step, known.step or 0),
        host=now.host,
        pid=now.pid,
        upload=now.upload,
    )
    if now.at < (known.noticed_at or 0.0):
        return known  # the notice has come since
    return dataclasses.replace(known, noticed_at=now.noticed_at, deadline=now.deadline)


def _at_commit(worker: Worker, newest: WorkerJournal) -> Worker:
    """Who trained while all made a commit has made its step, in an older word too."""
    is_in_it = worker.state in (State.TRAINING, State.SAVING)
    if not is_in_it or (worker.since or 0.0) >= (newest.committed_at or 0.0):
        return worker
    step = max(worker.step or 0, newest.commit_step or 0)
    return dataclasses.replace(worker, step=step)


def _end(
    at: float,
    worker: int,
    supervisor: SupervisorJournal | None,
    journal: WorkerJournal | None,
    heard: Heard | None,
) -> tuple[State, float, str] | None:
    """How a worker ended, when and why; None while it goes on."""
    said = None
    if journal is not None and journal.left_at is not None:
        is_over = journal.left_as is Outcome.FINISHED
        state = State.FINISHED if is_over else State.DOWN
        said = state, journal.left_at, journal.left_why
    if supervisor is not None:
        seen = supervisor.ends.get(worker - (supervisor.first or 0))
        if seen is not None:
            when, code = seen
            why = said[2] if said is not None else describe_end(code)
            return State.DOWN if code else State.FINISHED, when, why
        if supervisor.left_at is not None:
            return State.DOWN, supervisor.left_at, "its supervisor has left"
        # The guard gives the workers time to commit: a worker may still tell its step.
        died_at = supervisor.died_at
        if said is None and died_at is not None:
            is_quiet = heard is None or heard.at < died_at
            if is_quiet and (heard is None or at - died_at > _LEFT_AFTER):
                said = State.DOWN, died_at, "its supervisor died"
    # Who says that it leaves may have a copy to finish, or train on after all.
    goes_on = (
        said is not None
        and journal is not None
        and journal.left_as is not Outcome.FAILED
        and heard is not None
        and heard.now.at > said[1]
        and at - heard.at < _LEFT_AFTER
    )
    return None if goes_on else said


def _ended(supervisors: Sequence[SupervisorJournal], workers: Sequence[Worker]) -> str:
    """How the run ended; empty while it goes on, or nobody knows."""
    if not supervisors:
        states = {each.state for each in workers}
        if not states <= {State.DOWN, State.FINISHED}:
            return ""
        return "; ".join(dict.fromkeys(each.why for each in workers))
    if any(each.left_at is None and each.died_at is None for each in supervisors):
        return ""
    last = max(supervisors, key=lambda each: each.left_at or each.died_at or 0.0)
    if last.left_as is None:
        return "a signal or an error ended the supervisor"
    return f"{_CAUSES[last.left_as]}, exit code {last.left_code}"


_CAUSES = {
    Cause.FINISHED: "training is finished",
    Cause.PREEMPTION: "gave up: the preemption budget is used up",
    Cause.FAILURE: "gave up: the failure budget is used up",
    Cause.HANG: "gave up: the failure budget is used up by hangs",
    Cause.NO_PROGRESS: "gave up: preempted again and again without progress",
    Cause.FAILURE_RATE: "gave up: too many failures within an hour",
    Cause.MOVED: "gave up: the checkpoint directory was another one",
    Cause.STOPPED: "told to stop, and to be started again",
}
