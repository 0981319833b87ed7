"""Groups the records of a run into trainings of the workers and starts of supervisors.

A training is a handler or a `fit`; one process may have several trainings in sequence.
A start is one start of all workers by a supervisor. The journal of a worker contains
the worker's trainings in sequence, the journal of a supervisor contains its starts in
sequence. A command that shows only the current state keeps only the newest trainings
and starts, so the memory that it uses does not grow with the run. This module reads no
file and no clock: it receives the lines one by one.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from tfpreempt.cli.journals.records import (
    OF_SUPERVISORS,
    OF_WORKERS,
    Events,
    Record,
    read_record,
)
from tfpreempt.cli.run.restart_policy import Cause
from tfpreempt.core.events import Outcome, name_steps

# Causes of restarts that are counted separately; another cause counts as "other".
_CAUSES = {"lost", *(cause.value for cause in Cause)}
# Number of trainings or starts to keep: a late record may belong to an earlier one.
_NEWEST = 4


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class Records:
    """The journal records of one training, or of one start of the workers.

    Attributes:
        file: name of the journal file.
        records: the records, oldest first.
    """

    file: str
    records: list[Record]

    def of(self, *events: str) -> list[Record]:
        """Returns the records of the given events, oldest first."""
        return [each for each in self.records if each.event in events]

    def newest(self, *events: str) -> Record | None:
        """Returns the newest record of the given events; None if there is none."""
        found = (each for each in reversed(self.records) if each.event in events)
        return next(found, None)


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class WorkerRun(Records):
    """A training of a worker: the records of one handler or `fit`.

    Attributes:
        worker: index of the worker.
        incarnation: recorded name of the incarnation (one start of all workers).
    """

    worker: int
    incarnation: str

    @property
    def start(self) -> str:
        """Name of the start of all workers, by a supervisor, in which the training ran.

        If the training has recorded no such name: the incarnation.
        """
        restored = self.restored
        named = None if restored is None else restored["start"]
        return self.incarnation if named is None else str(named)

    @property
    def restored(self) -> Record | None:
        """Record `restored`, the first record of a training; None if it is missing."""
        return self.newest("restored")

    @property
    def exit(self) -> Record | None:
        """The newest `exit` record; None if the process runs, or was killed."""
        return self.newest("exit")

    @property
    def bad_step(self) -> Mapping[str, Any] | None:
        """The bad step because of which the training ended; None if there is none.

        Only the chief records bad steps. A record with `found_at` is a copy of a record
        of another machine.
        """
        found, left = self.newest("badstep"), self.exit
        if found is None or left is None or left["outcome"] != Outcome.LOST:
            return None
        if found["is_crash"] or found["found_at"] is not None:
            return None
        names = ("fit", "epoch", "batch", "reason")
        values = {name: found[name] for name in names}
        return {**values, "is_sought": bool(found["is_sought"])}


def describe_bad_step(found: Mapping[str, Any]) -> str:
    """Returns a bad step as text.

    Args:
        found: the bad step, from `WorkerRun.bad_step`.
    """
    step = name_steps([(found["fit"], found["epoch"], found["batch"])])
    return (
        f"bad step at or before {step}" if found["is_sought"] else f"bad step: {step}"
    )


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class SupervisorRun(Records):
    """A start of all workers by a supervisor. The first record describes the start.

    Attributes:
        name: name of the start.
        supervisor: id of the supervisor.
        ends: for every worker that has ended, the record of its end, by worker index.
    """

    name: str
    supervisor: str
    ends: dict[int, Record] = dataclasses.field(default_factory=dict)

    @property
    def workers(self) -> range:
        """Indices of the workers on this machine; empty if no worker runs here."""
        first = self.records[0].values.get("first_worker", 0)
        count = 0 if first is None else self.records[0]["workers"]
        return range(first or 0, (first or 0) + count)

    @property
    def cause(self) -> str | None:
        """Reason why the workers ended, as the supervisor recorded; None if unknown."""
        match self.newest("hang", "budget", "exited", "supervisor_terminated"):
            case None:
                return None
            case Record(event="hang"):
                return "hang"
            case Record(event="supervisor_terminated"):
                return "supervisor terminated"
            case decided:
                return str(decided["cause"])

    def add(self, record: Record) -> None:
        """Adds a record of this start of the workers, which follows the earlier
        records."""
        self.records.append(record)
        if record.event == "worker_ended":
            self.ends[self.workers.start + record["worker"]] = record


class _Journal(abc.ABC):
    """A journal file, which several processes have written in sequence.

    Args:
        file: name of the file.
        keeps_all: whether to keep all records. If False, only the newest records are
            kept.

    Attributes:
        corrupt: number of corrupt lines.
        restarts: number of restarts for every reason (see docs/live.md).
    """

    _events: ClassVar[Events]

    def __init__(self, file: str, *, keeps_all: bool) -> None:
        self.file = file
        self._keeps_all = keeps_all
        self.corrupt = 0
        self.restarts: collections.Counter[str] = collections.Counter()

    def add_line(self, line: bytes) -> None:
        """Parses the next line of the file; a corrupt line is counted and skipped."""
        if not line.strip():
            return
        try:
            record = read_record(line, self._events)
            if record is not None:
                self._add(record)
        except ValueError:
            self.corrupt += 1

    @abc.abstractmethod
    def _add(self, record: Record) -> None:
        """Adds the next record; raises ValueError if the record is corrupt."""


class WorkerJournal(_Journal):
    """The journal of a worker.

    Args:
        worker: index of the worker.
        keeps_all: whether to keep all records. If False, only the newest records are
            kept.

    Attributes:
        trainings: trainings of the worker, oldest first.
        commits: number of commits.
        commit: record of the newest commit; None before the first commit.
        bad_steps: number of bad steps that were found.
    """

    _events = OF_WORKERS

    def __init__(self, worker: int, *, keeps_all: bool = False) -> None:
        super().__init__(f"worker-{worker}.jsonl", keeps_all=keeps_all)
        self.worker = worker
        self.trainings: list[WorkerRun] = []
        self.commits = 0
        self.commit: Record | None = None
        self.bad_steps = 0

    @property
    def training(self) -> WorkerRun | None:
        """The newest training (a handler or `fit`); None before the first training."""
        return self.trainings[-1] if self.trainings else None

    def _add(self, record: Record) -> None:
        if record["worker"] != self.worker:
            raise ValueError("the record is of another worker")
        training = self._training(record)
        if not self._keeps_all:
            others = [each for each in training.records if each.event != record.event]
            training.records = others
        training.records.append(record)
        if record.event == "commit":
            self.commits += 1
            self.commit = record
        elif record.event == "badstep" and record["replaces"] is None:
            self.bad_steps += not (record["is_crash"] or record["is_sought"])

    def _training(self, record: Record) -> WorkerRun:
        """Returns the training (a handler or `fit`) to which a record belongs.

        If there is no such training, adds a training.
        """
        incarnation = record["incarnation"]
        for training in self.trainings[: -_NEWEST - 1 : -1]:
            if training.incarnation == incarnation:
                if record.event == "restored" and training.of("restored", "exit"):
                    break
                return training
        if self.trainings and self.trainings[-1].incarnation != incarnation:
            self._count_restart(self.trainings[-1].exit)
        training = WorkerRun(
            file=self.file, worker=self.worker, incarnation=incarnation, records=[]
        )
        self.trainings.append(training)
        if not self._keeps_all:
            del self.trainings[:-_NEWEST]
        return training

    def _count_restart(self, last: Record | None) -> None:
        """Counts a restart, with a reason derived from the worker's last `exit` record.

        The worker's record is used because a run may have no supervisor.

        Args:
            last: the last `exit` record; None if the worker has recorded no exit.
        """
        outcome = Outcome.FAILED if last is None else last["outcome"]
        if outcome == Outcome.FAILED:
            self.restarts["failure"] += 1
        elif outcome != Outcome.FINISHED:
            self.restarts["preemption"] += 1


class SupervisorJournal(_Journal):
    """The journal file of a supervisor; later supervisors append to the same file.

    Args:
        file: name of the file.
        keeps_all: whether to keep all records. If False, only the newest records are
            kept.

    Attributes:
        starts: starts of the workers, oldest first.
    """

    _events = OF_SUPERVISORS

    def __init__(self, file: str, *, keeps_all: bool = False) -> None:
        super().__init__(file, keeps_all=keeps_all)
        self.starts: list[SupervisorRun] = []

    @property
    def start(self) -> SupervisorRun | None:
        """The newest start of the workers; None before the first start."""
        return self.starts[-1] if self.starts else None

    def _add(self, record: Record) -> None:
        name, supervisor = record["incarnation"], record["supervisor"]
        if record.event in ("started", "restarted"):
            self._count_restart(is_restart=record.event == "restarted")
            start = SupervisorRun(
                file=self.file, name=name, supervisor=supervisor, records=[record]
            )
            self.starts.append(start)
            if not self._keeps_all:
                del self.starts[:-_NEWEST]
            return
        for start in self.starts[: -_NEWEST - 1 : -1]:
            if name == start.name or (name is None and supervisor == start.supervisor):
                first, *others = start.records
                is_end = record.event == "worker_ended"
                if is_end and record["worker"] >= first["workers"]:
                    raise ValueError("the record is of a worker that was not started")
                if not self._keeps_all:
                    others = [each for each in others if each.event != record.event]
                    start.records = [first, *others]
                start.add(record)
                return

    def _count_restart(self, *, is_restart: bool) -> None:
        """Counts a restart, by the reason why the workers of the last start ended.

        Args:
            is_restart: whether a supervisor has restarted its workers. If False, a new
                supervisor has started, and the reason may be unknown.
        """
        if (before := self.start) is None:
            return
        is_known = is_restart or before.newest("exited") is not None
        cause = before.cause if is_known else "lost"
        if cause not in (None, Cause.FINISHED.value):
            self.restarts[cause if cause in _CAUSES else "other"] += 1
