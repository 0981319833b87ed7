"""Each process's life as spans of time, made of what it and its supervisor recorded.

Times of one machine are put in order, and measured, by its monotonic clock; where that
stands among other machines is a matter of wall clocks.
"""

from __future__ import annotations

import dataclasses
import enum
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from tfpreempt.cli.report.records import Record

_JUMP_SECONDS = 1.0
"""A wall clock that differs so much from the monotonic one was set meanwhile."""


class Phase(enum.Enum):
    """What a worker does at a time."""

    STARTING = "starting"  # from the start of the process until its handler is made
    RESTORING = "restoring"  # what the start takes: to agree, to fetch, to read
    TRACING = "tracing"  # the first step, with what the program does before it
    TRAINING = "training"
    NOTICED = "noticed"  # from a notice to the save: the step goes on to its end
    SAVING = "saving"  # training stands still for a save
    LOST = "lost"  # training, of which the run has kept nothing
    LEAVING = "leaving"  # from the commit or the last step to the end
    DOWN = "down"  # no process, until the next one is started
    UNKNOWN = "unknown"  # no record says when the process ended


TRAINS = (Phase.TRAINING, Phase.NOTICED)
"""In which steps are made."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A worker's time from one moment to another; seconds since the epoch."""

    phase: Phase
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end - self.begin


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A record with its time on the line that all share, seconds since the epoch."""

    at: float
    record: Record


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One process of a worker, or one training of several in it.

    Attributes:
        worker: whose.
        start: what its supervisor, or else its journal, calls this start.
        begin: of the process.
        end: of the process; of its newest record, where nothing says more.
        code: of its exit; None where it is not known, or it still runs.
        cause: why it ended, as its supervisor saw it; None where none did.
        is_over: whether it has ended, as far as is known.
        is_finished: whether training was over, as far as is known.
        events: what it recorded.
    """

    worker: int
    start: str
    begin: float
    end: float
    code: int | None
    cause: str | None
    is_over: bool
    is_finished: bool
    events: tuple[Event, ...]

    def of(self, *names: str) -> list[Event]:
        """Its events of these names."""
        return [each for each in self.events if each.record.event in names]

    @property
    def restored(self) -> Event | None:
        """Its start, if it came so far."""
        return next(iter(self.of("restored")), None)

    @property
    def exit(self) -> Event | None:
        """Its end as it told it itself, the last time; a kill leaves none."""
        return next(reversed(self.of("exit")), None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lives:
    """All lives.

    Attributes:
        of_worker: those of each worker, in their order.
        warnings: what is wrong with the clocks.
    """

    of_worker: Mapping[int, tuple[Life, ...]]
    warnings: tuple[str, ...]


@dataclasses.dataclass(slots=True, kw_only=True)
class _Start:
    """One start of its workers by a supervisor, as its records tell of it."""

    file: str
    begin: float
    workers: int
    ends: dict[int, Event] = dataclasses.field(default_factory=dict)  # by worker
    cause: str | None = None


def make_lives(records: Sequence[Record]) -> Lives:
    """Puts the records of a run in order.

    Args:
        records: those of each file in the order in which they were written.
    """
    names = {
        (each["worker"], each["incarnation"]): each["start"]
        for each in records
        if each.event == "restored" and each["start"] is not None
    }
    events, warnings = _on_one_line(records, names)
    starts = _starts(event for event in events if event.record.supervisor)
    # As they stand in the files: wall clocks may say otherwise.
    processes: dict[tuple[int, str], list[Event]] = {
        _process(each, names): [] for each in records if each.supervisor is None
    }
    for event in events:
        if event.record.supervisor is None:
            processes[_process(event.record, names)].append(event)
    of_worker: dict[int, list[Life]] = defaultdict(list)
    for (worker, name), mine in processes.items():
        of_worker[worker] += _lives(worker, name, mine, starts.get(name))
    for worker, name in _without_records(starts, processes):
        [life] = _lives(worker, name, [], starts[name])
        before = sum(each.begin <= life.begin for each in of_worker[worker])
        of_worker[worker].insert(before, life)
    ordered = {}
    for worker in sorted(of_worker):
        ordered[worker], overlap = _in_a_row(of_worker[worker])
        if overlap > _JUMP_SECONDS:
            warnings.append(
                f"worker {worker}: a process begins {overlap:.1f} s before the end of "
                "the one before it: wall clocks differ, and it is moved behind that"
            )
    return Lives(of_worker=ordered, warnings=tuple(warnings))


def _process(record: Record, names: Mapping[tuple[int, str], str]) -> tuple[int, str]:
    """A worker's process: who, and which start of it."""
    who = record["worker"], record["incarnation"]
    return who[0], names.get(who, who[1])


# --- clocks --------------------------------------------------------------------------


def _on_one_line(
    records: Sequence[Record], names: Mapping[tuple[int, str], str]
) -> tuple[list[Event], list[str]]:
    """The records in their order, each machine's by its monotonic clock.

    A supervisor and the workers that it starts are on one machine. Where that clock
    stands is the median of what the wall clock said.
    """
    supervisors = {
        record["incarnation"]: record["supervisor"]
        for record in records
        if record.event in ("started", "restarted")
    }
    machines: dict[object, list[Record]] = defaultdict(list)
    for record in records:
        machine: object = record.supervisor
        if machine is None:
            process = _process(record, names)
            machine = supervisors.get(process[1], process)
        machines[machine].append(record)
    events, warnings = [], []
    for mine in machines.values():
        offset = statistics.median(each.wall - each.monotonic for each in mine)
        jump = max(abs(each.wall - each.monotonic - offset) for each in mine)
        if jump > _JUMP_SECONDS:
            files = ", ".join(sorted({each.file for each in mine}))
            warnings.append(
                f"{files}: the wall clock was off by {jump:.1f} s for a time; "
                "durations are those of the monotonic clock"
            )
        events += [Event(at=offset + each.monotonic, record=each) for each in mine]
    return sorted(events, key=lambda event: event.at), warnings


# --- processes -----------------------------------------------------------------------


def _starts(events: Iterable[Event]) -> dict[str, _Start]:
    """What supervisors tell of their starts, by name."""
    starts: dict[str, _Start] = {}
    newest: dict[str | None, str] = {}  # by supervisor
    for event in events:
        record = event.record
        match record.event:
            case "started" | "restarted":
                name = newest[record.supervisor] = record["incarnation"]
                starts[name] = _Start(
                    file=record.file, begin=event.at, workers=record["workers"]
                )
            case "worker_ended" if record["incarnation"] in starts:
                starts[record["incarnation"]].ends[record["worker"]] = event
            case "hang" if record["incarnation"] in starts:
                starts[record["incarnation"]].cause = "hang"
            case "budget" | "left" if record.supervisor in newest:
                starts[newest[record.supervisor]].cause = record["cause"]
            case "supervisor_died" if record.supervisor in newest:
                starts[newest[record.supervisor]].cause = "supervisor died"
    return starts


def _without_records(
    starts: Mapping[str, _Start], processes: Iterable[tuple[int, str]]
) -> list[tuple[int, str]]:
    """The processes that ended before they had a journal.

    A supervisor of one task does not know which worker that is; its other starts do.
    """
    known: dict[str, list[int]] = defaultdict(list)
    for worker, name in processes:
        known[name].append(worker)
    of_file: dict[str, Counter[int]] = defaultdict(Counter)
    for name, workers in known.items():
        if name in starts and starts[name].workers == 1:
            of_file[starts[name].file].update(workers)
    silent = []
    for name, start in starts.items():
        if start.workers == 1:
            seen = of_file[start.file].most_common(1)
            workers = [seen[0][0] if seen else 0]
        else:
            workers = list(start.ends)
        silent += [(each, name) for each in workers if each not in known[name]]
    return silent


_BOUNDS = ("restored", "exit")  # a start that failed has the second alone


def _lives(
    worker: int, name: str, events: Sequence[Event], start: _Start | None
) -> list[Life]:
    """The trainings of one process: one handler, or fit, may follow another."""
    parts: list[list[Event]] = [[]]
    for event in events:
        is_next = event.record.event == "restored"
        if is_next and any(each.record.event in _BOUNDS for each in parts[-1]):
            parts.append([])
        parts[-1].append(event)
    begin = _begin(events, start)
    end = None
    if start is not None:
        end = start.ends.get(
            worker if start.workers > 1 else min(start.ends, default=0)
        )
    lives = []
    for number, part in enumerate(parts):
        is_last = number == len(parts) - 1
        last = max((each.at for each in part), default=begin)
        has_exit = any(each.record.event == "exit" for each in part)
        ended = max(last, end.at) if is_last and end is not None else last
        code = end.record["code"] if is_last and end is not None else None
        cause = start.cause if is_last and start is not None else None
        has_end = code is not None or cause is not None or (has_exit and start is None)
        lives.append(
            Life(
                worker=worker,
                start=name,
                begin=min(begin, ended),
                end=ended,
                code=code,
                cause=cause,
                is_over=not is_last or has_end,
                is_finished=_is_finished(part, code, cause),
                events=tuple(part),
            )
        )
        begin = ended
    return lives


def _is_finished(events: Sequence[Event], code: int | None, cause: str | None) -> bool:
    """Whether training was over at the end of a process.

    It says so itself. Where its last line is missing its supervisor does, or the code
    of its exit: a program that was interrupted leaves with another one than 0.
    """
    told = [each.record["outcome"] for each in events if each.record.event == "exit"]
    if told:
        return "finished" in told
    return cause == "finished" if cause is not None else code == 0


def _begin(events: Sequence[Event], start: _Start | None) -> float:
    """When a process began: as its supervisor says, or the process itself."""
    if start is not None:
        return start.begin
    first = events[0]
    record = first.record
    if record.event != "restored":
        return first.at
    return first.at - (record["process_seconds"] or record["seconds"] or 0.0)


def _in_a_row(lives: Iterable[Life]) -> tuple[tuple[Life, ...], float]:
    """A worker's lives one after another, and by how much two of them overlapped.

    The second training of a process knows when the process began. Where the clocks of
    two machines differ, what a process tells may come before the end of the one before.
    """
    row: list[Life] = []
    largest = 0.0
    for life in lives:
        if row:
            row[-1] = dataclasses.replace(row[-1], is_over=True)
            before = row[-1].end
            overlap = before - (life.events[0].at if life.events else life.begin)
            if overlap > 0:
                largest = max(largest, overlap)
                life = dataclasses.replace(
                    life,
                    end=life.end + overlap,
                    events=tuple(
                        dataclasses.replace(each, at=each.at + overlap)
                        for each in life.events
                    ),
                )
            life = dataclasses.replace(life, begin=max(before, life.begin))
        row.append(life)
    return tuple(row), largest
