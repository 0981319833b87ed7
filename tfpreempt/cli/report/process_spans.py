"""Divides the time of a run's processes into phases, on a shared clock.

Times of one machine are taken from its monotonic clock, because a wall clock may jump.
The wall clocks are used only to relate the times of different machines.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import operator
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence

from tfpreempt.cli.journals.processes import (
    Records,
    SupervisorJournal,
    SupervisorRun,
    WorkerJournal,
    WorkerRun,
)
from tfpreempt.cli.journals.records import Record
from tfpreempt.core.compat import StrEnum

_JUMP_SECONDS = 1.0
"""If a machine's wall clock and monotonic clock drift apart by more seconds, the wall
clock was set."""

_end = operator.itemgetter(1)


class Phase(StrEnum):
    """An activity of a worker."""

    # From the start of the process until the handler exists, or the fit begins.
    STARTING = "starting"
    RESTORING = "restoring"  # agreement on a checkpoint, download, read
    TRACING = "tracing"  # the first step, and the work of the program before this step
    TRAINING = "training"
    NOTICED = "noticed"  # from a notice until the save begins: the step finishes
    SAVING = "saving"  # training waits for a save
    LOST = "lost"  # steps that were lost and had to be repeated
    EXITING = "exiting"  # from the last commit or step until the process has exited
    DOWN = "down"  # from the end of a process to the next start
    UNKNOWN = "unknown"  # the end of the process was not recorded


TRAINS = (Phase.TRAINING, Phase.NOTICED)
"""Phases in which steps are trained."""

MADE_STEPS = (*TRAINS, Phase.LOST)
"""Phases in which steps were trained, both kept and lost steps."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A period in which a worker is in one phase; times in seconds since the epoch."""

    phase: Phase
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """Duration of the span."""
        return self.end - self.begin


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class ProcessLifetime(WorkerRun):
    """The lifetime of a worker's process: from the start to the end of the process.

    If a process has several trainings in sequence, each training counts as a separate
    process, with a separate lifetime.

    Attributes:
        begin: start of the process, in seconds since the epoch.
        end: end of the process, in seconds since the epoch; if unknown, the time of its
            newest record.
        code: exit code of the process, negative for a signal; None while the process
            runs, or if unknown.
        cause: reason for the end, as recorded by the supervisor; None without a record.
        is_over: whether it is known that the process has ended.
        is_finished: whether it is known that training was complete at the end.
    """

    begin: float
    end: float
    code: int | None
    cause: str | None
    is_over: bool
    is_finished: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLifetimes:
    """The lifetimes of the processes of a run.

    Attributes:
        of_worker: for every worker index, the lifetimes of the worker, in order.
        warnings: warnings about clocks that were wrong.
    """

    of_worker: Mapping[int, tuple[ProcessLifetime, ...]]
    warnings: tuple[str, ...]


def build_lifetimes(
    workers: Mapping[int, WorkerJournal], supervisors: Iterable[SupervisorJournal]
) -> ProcessLifetimes:
    """Computes the lifetimes of the processes of a run, on a shared clock.

    Args:
        workers: journals of the workers, by worker index, with all records.
        supervisors: journals of the supervisors, with all records.
    """
    starts = {start.name: start for each in supervisors for start in each.starts}
    trainings = [training for each in workers.values() for training in each.trainings]
    clocks, warnings = _clocks(trainings, starts)
    processes = {(each.worker, each.start): each for each in trainings}
    for name, start in starts.items():
        # Some workers may have written no records. They are known from the supervisor's
        # records: those contain the end of the worker, or the run has one worker.
        for worker in start.workers if len(start.workers) == 1 else start.ends:
            if (worker, name) not in processes:
                silent = WorkerRun(file="", worker=worker, incarnation=name, records=[])
                trainings.append(silent)
    of_worker: dict[int, list[ProcessLifetime]] = collections.defaultdict(list)
    for training in trainings:
        name = training.start
        is_last = processes.get((training.worker, name), training) is training
        clock = clocks[_machine(training, starts)]
        lifetime = _lifetime(training, starts.get(name), clock, is_last=is_last)
        row = of_worker[training.worker]
        if training.records:
            row.append(lifetime)
        else:
            row.insert(sum(each.begin <= lifetime.begin for each in row), lifetime)
    ordered = {}
    for worker in sorted(of_worker):
        ordered[worker], overlap = _in_a_row(of_worker[worker])
        if overlap > _JUMP_SECONDS:
            warnings.append(
                f"worker {worker}: a process starts {overlap:.1f} s before the end of "
                "the previous process: wall clocks differ, and the process is shown "
                "after the previous process"
            )
    return ProcessLifetimes(of_worker=ordered, warnings=tuple(warnings))


# --- clocks --------------------------------------------------------------------------


def _machine(training: WorkerRun, starts: Mapping[str, SupervisorRun]) -> object:
    """Returns a value that identifies the machine of a training (a handler or `fit`).

    The value is the supervisor's id. Without a supervisor, every process counts as a
    separate machine.
    """
    start = starts.get(training.start)
    return (training.worker, training.start) if start is None else start.supervisor


def _clocks(
    trainings: Iterable[WorkerRun], starts: Mapping[str, SupervisorRun]
) -> tuple[dict[object, float], list[str]]:
    """Computes the offset of every machine: the shared clock minus its monotonic clock.

    The offset is the median of wall clock minus monotonic clock, over all records of
    the machine. A supervisor and its workers run on one machine.

    Args:
        trainings: trainings of all workers.
        starts: starts of the workers by supervisors, by name.

    Returns:
        The offsets in seconds, by machine (see `_machine`), and warnings about wall
        clocks that were changed.
    """
    machines: dict[object, list[Record]] = collections.defaultdict(list)
    files: dict[object, set[str]] = collections.defaultdict(set)
    of_machine: list[tuple[object, Records]] = [
        *((start.supervisor, start) for start in starts.values()),
        *((_machine(each, starts), each) for each in trainings),
    ]
    for machine, each in of_machine:
        machines[machine] += each.records
        files[machine].add(each.file)
    clocks, warnings = {}, []
    for machine, records in machines.items():
        offsets = [each.wall - each.monotonic for each in records]
        clocks[machine] = offset = statistics.median(offsets)
        jump = max(abs(each - offset) for each in offsets)
        if jump > _JUMP_SECONDS:
            warnings.append(
                f"{', '.join(sorted(files[machine]))}: the wall clock was wrong by "
                f"{jump:.1f} s for a time; durations use the monotonic clock"
            )
    return clocks, warnings


# --- lifetimes -----------------------------------------------------------------------


def _lifetime(
    training: WorkerRun, start: SupervisorRun | None, clock: float, *, is_last: bool
) -> ProcessLifetime:
    """Computes the lifetime of a training (a handler or a `fit` of a process).

    Args:
        training: training to convert.
        start: start of the process by a supervisor; None without a supervisor.
        clock: seconds to add to the machine's monotonic clock to get the shared clock.
        is_last: whether the training is the last training of its process.
    """
    records = [
        dataclasses.replace(each, at=clock + each.monotonic)
        for each in training.records
    ]
    records.sort(key=operator.attrgetter("at"))
    begin = _begin(records) if start is None else clock + start.records[0].monotonic
    end = max((each.at for each in records), default=begin)
    code = cause = None
    if is_last and start is not None:
        cause = start.cause
        if (seen := start.ends.get(training.worker)) is not None:
            end = max(end, clock + seen.monotonic)
            code = int(seen["returncode"])
    has_exit = start is None and training.exit is not None
    return ProcessLifetime(
        file=training.file,
        worker=training.worker,
        incarnation=training.incarnation,
        records=records,
        begin=min(begin, end),
        end=end,
        code=code,
        cause=cause,
        is_over=not is_last or has_exit or code is not None or cause is not None,
        is_finished=_is_finished(training, code, cause),
    )


def _is_finished(training: WorkerRun, code: int | None, cause: str | None) -> bool:
    """Returns whether training was complete at the end of a process.

    The exit record of the process decides. If it is missing, the cause recorded by the
    supervisor decides. If the cause is missing, too, the exit code decides: an
    interrupted program does not exit with 0.

    Args:
        training: training of the process.
        code: exit code of the process; None if unknown.
        cause: cause recorded by the supervisor; None if missing.
    """
    if exits := training.of("exit"):
        return "finished" in [each["outcome"] for each in exits]
    return cause == "finished" if cause is not None else code == 0


def _begin(records: Sequence[Record]) -> float:
    """Returns the start time of a process, computed from the records of the process."""
    first = records[0]
    if first.event != "restored":
        return first.at
    seconds = first["process_seconds"] or first["seconds"] or 0.0
    return first.at - float(seconds)


def _in_a_row(
    lifetimes: Iterable[ProcessLifetime],
) -> tuple[tuple[ProcessLifetime, ...], float]:
    """Shifts a worker's lifetimes that overlap, so that each follows the previous one.

    Lifetimes can overlap for two reasons. If a process has two trainings, both record
    the start of the process as their beginning. If a worker moves to a machine with
    another wall clock, the records of the new process may have earlier times than the
    end of the previous process.

    Args:
        lifetimes: lifetimes of a worker, in order.

    Returns:
        The lifetimes without overlaps, and the largest overlap in seconds.
    """
    row: list[ProcessLifetime] = []
    largest = 0.0
    for lifetime in lifetimes:
        if row:
            row[-1] = dataclasses.replace(row[-1], is_over=True)
            before = row[-1].end
            overlap = before - (
                lifetime.records[0].at if lifetime.records else lifetime.begin
            )
            if overlap > 0:
                largest = max(largest, overlap)
                lifetime = dataclasses.replace(
                    lifetime,
                    end=lifetime.end + overlap,
                    records=[
                        dataclasses.replace(each, at=each.at + overlap)
                        for each in lifetime.records
                    ],
                )
            lifetime = dataclasses.replace(lifetime, begin=max(before, lifetime.begin))
        row.append(lifetime)
    return tuple(row), largest


# --- phases of a lifetime ------------------------------------------------------------


def make_spans(lifetime: ProcessLifetime, commits: Sequence[Record]) -> list[Span]:
    """Divides a lifetime into spans: the phases, in order.

    Args:
        lifetime: lifetime of any worker.
        commits: commits recorded by the chief. A commit tells how long the chief waited
            for the save; the other workers wait equally long.
    """
    ended = lifetime.exit
    windows = []
    for commit in commits:
        window = _blocked(commit)
        is_own = commit["worker"] == lifetime.worker
        if not is_own and ended is not None and _is_last(commit, ended):
            # A save ends on all workers at the same time. So the exit of this worker,
            # as a time on the clock of its machine, is the end of the save.
            took = window[1] - window[0]
            window = ended.at - took, ended.at
        windows.append(window)
    return _paint(_phases(lifetime, commits), windows, Phase.SAVING, over=TRAINS)


def trained(spans: Iterable[Span], until: float | None = None) -> float:
    """Returns the seconds that a worker spent on steps, including lost steps.

    Args:
        spans: spans of the worker.
        until: end of the period that counts, in seconds since the epoch; None: no end.
    """
    return sum(
        max(0.0, (each.end if until is None else min(each.end, until)) - each.begin)
        for each in spans
        if each.phase in MADE_STEPS
    )


def lose(spans: Sequence[Span], begin: float) -> list[Span]:
    """Returns the spans, with the phase LOST for the training after `begin`."""
    end = max((each.end for each in spans), default=begin)
    return _paint(spans, [(begin, end)], Phase.LOST, over=TRAINS)


def _phases(lifetime: ProcessLifetime, commits: Sequence[Record]) -> list[Span]:
    """Divides a lifetime into spans of all phases but SAVING and LOST."""
    changes = [(lifetime.begin, Phase.STARTING)]
    ended, decided = lifetime.exit, None
    for record in lifetime.records:
        now = changes[-1][1]
        match record.event:
            case "restored":
                began = max(lifetime.begin, record.at - (record["seconds"] or 0.0))
                begins = Phase.TRACING if _is_traced(lifetime) else Phase.TRAINING
                changes += [(began, Phase.RESTORING), (record.at, begins)]
            case "firststep":
                changes.append((record.at, Phase.TRAINING))
            case "notice" if now is Phase.TRAINING:
                changes.append((record.at, Phase.NOTICED))
            case "decision":
                decided = record.at
            case "commit" if record["because"] == "preemption":
                # If the grace period is long, training continues after the commit.
                is_last = ended is not None and _is_last(record, ended)
                after = Phase.EXITING if is_last else Phase.TRAINING
                changes.append((record.at, after))
            case "exit":
                is_known = record["outcome"] in ("committed", "lost")
                is_called = is_known and now is Phase.TRAINING
                # Another worker received the notice, so this worker has recorded only
                # the decision: count the time since the decision as NOTICED.
                if is_called and decided is not None:
                    changes.append((max(changes[-1][0], decided), Phase.NOTICED))
                if changes[-1][1] is not Phase.EXITING:
                    changes.append((record.at, Phase.EXITING))
    if ended is None and (left := _left_with(lifetime, commits)) is not None:
        changes.append((max(changes[-1][0], left.at), Phase.EXITING))
    ends = [at for at, _ in changes[1:]] + [lifetime.end]
    return [
        Span(phase=phase, begin=begin, end=end)
        for (begin, phase), end in zip(changes, ends, strict=True)
        if end > begin
    ]


def _is_traced(lifetime: ProcessLifetime) -> bool:
    """Returns whether the time from the restore to the first step counts as TRACING.

    False only for a process that trained a single step, and ended before the boundary
    at which the `firststep` record is written. The end of tracing is then unknown, and
    the time counts as TRAINING.
    """
    base = 0 if lifetime.restored is None else lifetime.restored["step"]
    made = [each["step"] > base for each in lifetime.of("commit", "exit", "metrics")]
    return bool(lifetime.of("firststep")) or not any(made)


def _blocked(commit: Record) -> tuple[float, float]:
    """Returns the times at which the chief's wait for a save began and ended."""
    began = commit.at - commit["save_seconds"]
    return began, began + commit["blocked_seconds"]


def _left_with(lifetime: ProcessLifetime, commits: Sequence[Record]) -> Record | None:
    """Returns the commit after which a process without an exit record has exited.

    Returns None if the process did not exit because of a commit.
    """
    for commit in commits[-1:]:
        because = commit["because"]
        if because == "finished" or because == lifetime.cause == "preemption":
            return commit
    return None


def _is_last(commit: Record, ended: Record) -> bool:
    """Returns whether a worker exited after this commit, because of a preemption.

    Args:
        commit: record of the commit.
        ended: exit record of the worker.
    """
    return bool(
        commit["because"] == "preemption"
        and ended["outcome"] == "committed"
        and ended["step"] == commit["step"]
    )


def _paint(
    spans: Iterable[Span],
    windows: Iterable[tuple[float, float]],
    phase: Phase,
    *,
    over: Collection[Phase],
) -> list[Span]:
    """Changes the phase of spans inside given periods of time (windows).

    The function goes through spans and windows together, because a run may have many
    spans and many windows.

    Args:
        spans: spans in order, without overlaps.
        windows: begin and end of every window, in any order; windows may overlap.
        phase: new phase inside the windows.
        over: phases that are replaced; spans of other phases stay.

    Returns:
        The spans, split at the edges of the windows.
    """
    apart = _apart(windows)
    painted: list[Span] = []
    first = 0
    for span in spans:
        first = bisect.bisect_right(apart, span.begin, first, key=_end)
        if span.phase not in over:
            painted.append(span)
            continue
        cut, at = [], span.begin
        for number in range(first, len(apart)):
            begin, end = apart[number]
            if begin >= span.end:
                break
            inside = max(begin, span.begin), min(end, span.end)
            cut += [(span.phase, at, inside[0]), (phase, *inside)]
            at = inside[1]
        cut.append((span.phase, at, span.end))
        painted += [Span(phase=p, begin=b, end=e) for p, b, e in cut if e > b]
    return painted


def _apart(windows: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns windows in order, with overlapping and touching windows merged."""
    apart: list[tuple[float, float]] = []
    for begin, end in sorted(windows):
        if apart and begin <= apart[-1][1]:
            apart[-1] = apart[-1][0], max(end, apart[-1][1])
        elif end > begin:
            apart.append((begin, end))
    return apart
