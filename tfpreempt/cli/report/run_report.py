"""Builds the report of a run from its records, without I/O and without a clock."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfpreempt.cli.journals.processes import SupervisorJournal, WorkerJournal
from tfpreempt.cli.journals.records import Record
from tfpreempt.cli.report.goodput import GoodputBreakdown, break_down
from tfpreempt.cli.report.process_spans import (
    MADE_STEPS,
    Phase,
    ProcessLifetime,
    Span,
    build_lifetimes,
    lose,
    make_spans,
    trained,
)
from tfpreempt.cli.run.restart_policy import Cause
from tfpreempt.core.events import BAD_STEP
from tfpreempt.core.record_validation import is_number
from tfpreempt.handler.status_file import REPORT_INTERVAL

_SKEW_SECONDS = 5.0
"""Largest difference between the times at which workers exit after the same commit."""

_at, _begin = operator.attrgetter("at"), operator.attrgetter("begin")

_INSTANT = 1e-6
"""Seconds by which two computations of the same time may differ."""

Point = tuple[float, float, float]
"""A point of a curve: seconds since the epoch, step, value."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReportedWorker:
    """A worker's timeline.

    Attributes:
        index: index of the worker.
        spans: the worker's phases, in order. If there is a gap between two spans,
            training was complete, and was started again later; the gap is not part of
            the reported times.
    """

    index: int
    spans: tuple[Span, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """An interruption: the first worker's process ended before training was complete.

    Attributes:
        at: time of the notice, in seconds since the epoch; without a notice, the time
            at which the process ended.
        cause: "preemption", "bad step", "failure", "hang", or another cause that a
            supervisor recorded; "killed" if no cause was recorded.
        bad_step: the bad step, see `WorkerRun.bad_step`; None for other causes.
        sources: for each source of a notice, such as "signal:SIGTERM", the workers that
            received the notice.
        step: newest trained step; None if no worker has records.
        is_estimated: whether `step` is an estimate, because the newest step was not
            recorded.
        saved_step: step of the commit made because of the notice; None without such a
            commit.
        notice_to_commit_seconds: seconds from the notice to the commit; None without a
            commit.
        restored_step: step that the next start has restored; None without a next start.
        tier: storage of the restored checkpoint: "memory", "disk" or "mirror"; None if
            unknown.
        steps_lost: number of steps that had to be repeated; if the run was not
            restarted yet, the number of steps after the newest commit. None if the
            commits are unknown.
        down_seconds: seconds from the end of the process to the next start; None
            without a next start.
        resumed_seconds: seconds from `at` until training resumed; None if training did
            not resume.
    """

    at: float
    cause: str
    bad_step: Mapping[str, Any] | None
    sources: Mapping[str, tuple[int, ...]]
    step: int | None
    is_estimated: bool
    saved_step: int | None
    notice_to_commit_seconds: float | None
    restored_step: int | None
    tier: str | None
    steps_lost: int | None
    down_seconds: float | None
    resumed_seconds: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The report of a run.

    Attributes:
        begin: start of the first process, in seconds since the epoch.
        end: end of the last process, or time of the newest record.
        outcome: "finished"; "interrupted"; "running" if no end was recorded; "silent"
            if no end was recorded, but a worker no longer writes its status file.
        step: newest step of the run; None if no worker has records.
        step_seconds: mean step time in seconds; None if unknown.
        workers: timelines of the workers, in the order of their indices.
        interruptions: the interruptions, in order.
        commits: records of the commits, in order.
        restores: records of the starts that restored a commit or a snapshot, in order.
        metrics: points of every curve, by the curve's name.
        own_metrics: names of the curves that come from the journal, and so have the
            step numbers of the run; the other curves come from TensorBoard.
        faults: number of occurrences of every recovered error, by "where: error".
        account: time of all workers, by category.
        warnings: reasons why parts of the report may be wrong or missing.
    """

    begin: float
    end: float
    outcome: str
    step: int | None
    step_seconds: float | None
    workers: tuple[ReportedWorker, ...]
    interruptions: tuple[Interruption, ...]
    commits: tuple[Record, ...]
    restores: tuple[Record, ...]
    metrics: Mapping[str, tuple[Point, ...]]
    own_metrics: frozenset[str]
    faults: Mapping[str, int]
    account: GoodputBreakdown
    warnings: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first process to the end of the last."""
        return self.end - self.begin

    @property
    def durations(self) -> dict[str, list[float]]:
        """For every measured action, such as "save": the durations in seconds."""
        to_commit = [each["notice_to_commit_seconds"] for each in self.commits]
        timed = {
            each["step"]
            for each in self.commits
            if each["notice_to_commit_seconds"] is not None
        }
        # A notice can come while a periodic save is under way.
        to_commit += [
            each.notice_to_commit_seconds
            for each in self.interruptions
            if each.saved_step not in timed
        ]
        resumed = [each.resumed_seconds for each in self.interruptions]
        restores = [each["seconds"] for each in self.restores]
        return {
            "notice to commit": [each for each in to_commit if each is not None],
            "save": [each["save_seconds"] for each in self.commits],
            "training blocked": [each["blocked_seconds"] for each in self.commits],
            "restore": [each for each in restores if each is not None],
            "until resumed": [each for each in resumed if each is not None],
        }

    @property
    def idle_seconds(self) -> float:
        """Seconds between complete training and a later start; sum of all workers."""
        return sum(
            later.begin - earlier.end
            for worker in self.workers
            for earlier, later in itertools.pairwise(worker.spans)
        )

    @property
    def goodput(self) -> float | None:
        """Share of the time spent on kept steps; None if unknown.

        The share is unknown if no worker has records. It is also unknown in a running
        job before the first commit, restore or lost step: the steps so far may be kept
        or lost, and most of them are not recorded yet.
        """
        is_running = self.outcome not in ("finished", "interrupted")
        is_open = is_running and not (self.commits or self.restores or self.steps_lost)
        return None if self.step is None or is_open else self.account.goodput

    @property
    def steps_lost(self) -> int:
        """Number of steps lost in all interruptions."""
        return sum(each.steps_lost or 0 for each in self.interruptions)

    @property
    def bytes_written(self) -> int:
        """Total size of the commits."""
        return sum(each["bytes"] for each in self.commits)


def build_report(
    workers: Mapping[int, WorkerJournal],
    supervisors: Iterable[SupervisorJournal],
    warnings: Sequence[str] = (),
) -> RunReport | None:
    """Builds the report of a run; returns None if no process has records.

    Args:
        workers: journals of the workers, by worker index, with all records.
        supervisors: journals of the supervisors, with all records.
        warnings: warnings about the journals, to be included in the report.
    """
    lifetimes = build_lifetimes(workers, supervisors)
    if not lifetimes.of_worker:
        return None
    found = itertools.chain.from_iterable(lifetimes.of_worker.values())
    events = sorted((e for lifetime in found for e in lifetime.records), key=_at)
    commits = [each for each in events if each.event == "commit"]
    of_worker = {
        index: _completed(mine, events, commits)
        for index, mine in lifetimes.of_worker.items()
    }
    every = [lifetime for mine in of_worker.values() for lifetime in mine]
    first = min(
        of_worker, key=lambda index: (not _has_records(of_worker[index]), index)
    )
    lead = of_worker[first]
    standing = _standing(lead, commits)
    timelines = tuple(
        ReportedWorker(index=index, spans=tuple(_spans(mine, commits, standing)))
        for index, mine in of_worker.items()
    )
    spans = next(worker.spans for worker in timelines if worker.index == first)
    all_warnings = [
        *warnings,
        *lifetimes.warnings,
        *_missing(of_worker, timelines),
        *_skew(every, commits),
    ]
    return RunReport(
        begin=min(lifetime.begin for lifetime in every),
        end=max(lifetime.end for lifetime in every),
        outcome=_outcome(lead),
        step=_reached(lead[-1], commits)[0] if _has_records(lead) else None,
        step_seconds=_step_seconds(commits),
        workers=timelines,
        interruptions=tuple(_interruptions(lead, spans, events, commits, standing)),
        commits=tuple(commits),
        restores=tuple(e for e in events if e.event == "restored" and e["path"]),
        metrics=(metrics := _metrics(events)),
        own_metrics=frozenset(metrics),
        faults=_faults(events),
        account=break_down(span for each in timelines for span in each.spans),
        warnings=tuple(all_warnings),
    )


# --- time ----------------------------------------------------------------------------


def _completed(
    lifetimes: Sequence[ProcessLifetime],
    events: Sequence[Record],
    commits: Sequence[Record],
) -> list[ProcessLifetime]:
    """Completes the lifetimes of processes whose end or exit was not recorded.

    Two rules give a later end. At a commit recorded by the chief, every worker was
    running. For the newest lifetime: while one worker trains, every worker trains.

    Without an exit record, a lifetime is finished if its last commit was the final
    commit of training, which the chief makes for all workers.

    Args:
        lifetimes: lifetimes of a worker, in order.
        events: records of all workers, by time.
        commits: commits recorded by the chief, by time.
    """
    completed = []
    for number, lifetime in enumerate(lifetimes):
        if not _has_end(lifetime):
            is_last = number + 1 == len(lifetimes)
            limit = math.inf if is_last else lifetimes[number + 1].begin
            known = _between(events if is_last else commits, -math.inf, limit)[-1:]
            end = max([lifetime.end, *(each.at for each in known)])
            lifetime = dataclasses.replace(lifetime, end=end)
        last = _during(commits, lifetime)[-1:]
        if lifetime.exit is None and any(e["because"] == "finished" for e in last):
            lifetime = dataclasses.replace(lifetime, is_finished=True)
        completed.append(lifetime)
    return completed


def _has_records(lifetimes: Sequence[ProcessLifetime]) -> bool:
    """Returns whether a worker has written records, so that its steps are known."""
    return any(lifetime.records for lifetime in lifetimes)


def _spans(
    lifetimes: Sequence[ProcessLifetime],
    commits: Sequence[Record],
    standing: int | None,
) -> list[Span]:
    """Returns the spans of a worker: of its processes, and of the times in between.

    Args:
        lifetimes: lifetimes of the worker, in order.
        commits: commits recorded by the chief.
        standing: step from which a next start would resume; None if unknown.
    """
    spans: list[Span] = []
    kept = _kept(lifetimes, standing)
    for number, lifetime in enumerate(lifetimes):
        if _has_records(lifetimes):
            mine = make_spans(lifetime, _during(commits, lifetime))
        else:
            mine = [Span(phase=Phase.UNKNOWN, begin=lifetime.begin, end=lifetime.end)]
        step = kept[number]
        if step is not None and (at := _reached_at(lifetime, mine, step, commits)):
            mine = lose(mine, at)
        spans += mine
        if number + 1 < len(lifetimes) and not lifetime.is_finished:
            end, begin = lifetime.end, lifetimes[number + 1].begin
            phase = Phase.DOWN if _has_end(lifetime) else Phase.UNKNOWN
            if begin > end:
                spans.append(Span(phase=phase, begin=end, end=begin))
    return spans


def _has_end(lifetime: ProcessLifetime) -> bool:
    """Returns whether the end of a lifetime was recorded."""
    return lifetime.code is not None or lifetime.exit is not None


def _during(commits: Sequence[Record], lifetime: ProcessLifetime) -> list[Record]:
    """Returns the chief's commits during a worker's lifetime.

    If the machines' clocks differ, a commit of another lifetime may have a time inside
    this lifetime. Such a commit is recognized by its step.
    """
    first = 0 if lifetime.restored is None else lifetime.restored["step"]
    last = math.inf if lifetime.exit is None else lifetime.exit["step"]
    return [
        each
        for each in _between(commits, lifetime.begin, lifetime.end + _INSTANT)
        if first <= each["step"] <= last
    ]


def _between(events: Sequence[Record], begin: float, end: float) -> Sequence[Record]:
    """Returns the events between two times. `events` must be sorted by time."""
    first = bisect.bisect_left(events, begin, key=_at)
    return events[first : bisect.bisect_right(events, end, key=_at)]


def _kept(
    lifetimes: Sequence[ProcessLifetime], standing: int | None
) -> list[int | None]:
    """Returns, for every lifetime, the step up to which its training was not lost.

    The step is the lowest step from which a later lifetime resumed; for the last
    lifetime, the step of the newest commit. None: no step was lost, for example because
    training was complete.

    Args:
        lifetimes: lifetimes of a worker, in order.
        standing: step from which a next start would resume; None if unknown.
    """
    kept: list[int | None] = []
    limit = standing if lifetimes[-1].is_over else None
    for lifetime in reversed(lifetimes):
        if lifetime.is_finished:
            limit = None
        kept.append(limit)
        if lifetime.restored is not None:
            step = lifetime.restored["step"]
            limit = step if limit is None else min(limit, step)
    return kept[::-1]


def _standing(lead: Sequence[ProcessLifetime], commits: Sequence[Record]) -> int | None:
    """Returns the step from which a next start would resume; None if unknown.

    The step is unknown if worker 0 has no records, because only worker 0 records
    commits. It is also unknown if a save_fn makes the commits, because they are not
    recorded.

    Args:
        lead: lifetimes of the first worker with records.
        commits: recorded commits.
    """
    last = lead[-1]
    for commit in _between(commits, -math.inf, last.end + _INSTANT)[-1:]:
        return int(commit["step"])
    ends = {each.exit["outcome"] for each in lead if each.exit is not None}
    is_known = last.worker == 0 and _has_records(lead)
    if not is_known or ends & {"committed", "finished"}:
        return None
    return 0 if last.restored is None else int(last.restored["step"])


def _milestones(
    lifetime: ProcessLifetime, commits: Sequence[Record]
) -> list[tuple[float, int]]:
    """Returns pairs (time, step): the steps that a process has reached, by its records.

    The pairs are in order. Pairs whose step is lower than an earlier step are left out.
    """
    found: list[tuple[float, int]] = []
    if lifetime.restored is not None:
        found.append((lifetime.restored.at, lifetime.restored["step"]))
    found += [(e.at, e["step"]) for e in lifetime.of("firststep", "metrics", "exit")]
    for each in _during(commits, lifetime):
        found.append((each.at - each["save_seconds"], each["step"]))
    row: list[tuple[float, int]] = []
    for at, step in sorted(found):
        if not row or step >= row[-1][1]:
            row.append((at, step))
    return row


def _reached_at(
    lifetime: ProcessLifetime,
    spans: Sequence[Span],
    step: int,
    commits: Sequence[Record],
) -> float | None:
    """Estimates the time at which a process reached a step.

    Returns None if no time can be estimated, or if the process did not train beyond the
    step.

    Args:
        lifetime: lifetime of the process.
        spans: spans of the lifetime.
        step: the step, up to which the training was not lost.
        commits: commits of the run.
    """
    row = _milestones(lifetime, commits)
    if not row:
        return None
    if step < row[0][1]:
        # A later start resumed from an older step, so all steps of this lifetime are
        # lost.
        return lifetime.begin
    at, known = [each for each in row if each[1] <= step][-1]
    later = [each for each in row if each[1] > step]
    if later:
        until, more = later[0]
        share = (step - known) / (more - known)
        return _after(spans, at, share * (trained(spans, until) - trained(spans, at)))
    if lifetime.exit is not None:
        return None
    if step == known:
        return at  # the process was killed: all steps after the newest commit are lost
    seconds = _step_seconds(commits, lifetime)
    return _after(spans, at, (step - known) * seconds) if seconds else None


def _after(spans: Sequence[Span], begin: float, seconds: float) -> float:
    """Returns the time at which a worker had trained for `seconds` since `begin`.

    Returns infinity if the worker has trained for less.
    """
    for span in spans:
        inside = trained([span]) - trained([span], begin)
        if inside and inside >= seconds:
            return max(begin, span.begin) + seconds
        seconds -= inside
    return math.inf


def _step_seconds(
    commits: Sequence[Record], lifetime: ProcessLifetime | None = None
) -> float | None:
    """Returns the newest mean step time of a process; if unknown, that of the run.

    Args:
        commits: commits of the run, which contain the mean step time.
        lifetime: lifetime of the process; None: the step time of the run.
    """
    own = [] if lifetime is None else _during(commits, lifetime)
    newest_first = itertools.chain(reversed(own), reversed(commits))
    known = (each["step_seconds"] for each in newest_first)
    return next((seconds for seconds in known if seconds), None)


def _reached(lifetime: ProcessLifetime, commits: Sequence[Record]) -> tuple[int, bool]:
    """Returns the newest known step, and whether later steps may be unrecorded.

    A killed process may have trained further steps, which it has not recorded.
    """
    row = _milestones(lifetime, commits)
    if row:
        step = row[-1][1]
    else:  # no records yet: the process resumes from the newest commit
        step = next(
            (e["step"] for e in _between(commits, -math.inf, lifetime.end)[-1:]), 0
        )
    is_known = (
        lifetime.exit is not None
        or not lifetime.is_over
        or not lifetime.of("firststep")
    )
    return step, not (is_known or lifetime.is_finished)


# --- what happened -------------------------------------------------------------------


def _interruptions(
    lead: Sequence[ProcessLifetime],
    spans: Sequence[Span],
    events: Sequence[Record],
    commits: Sequence[Record],
    standing: int | None,
) -> list[Interruption]:
    """Returns the interruptions of a run.

    Args:
        lead: lifetimes of the first worker with records; an interruption is the end of
            such a lifetime before training was complete.
        spans: spans of this worker.
        events: records of all workers, by time.
        commits: commits of the run.
        standing: step from which a next start would resume; None if unknown.
    """
    found = []
    all_notices = [each for each in events if each.event == "notice"]
    trains = [each.begin for each in spans if each.phase in MADE_STEPS]
    for number, lifetime in enumerate(lead):
        if lifetime.is_finished or not lifetime.is_over:
            continue
        later = lead[number + 1 :]
        notices = _between(all_notices, lifetime.begin, lifetime.end)
        at = min((each.at for each in notices), default=lifetime.end)
        saved = _served_by(lifetime, commits)
        took = None if saved is None else saved["notice_to_commit_seconds"]
        if saved is not None and took is None and notices:
            took = max(0.0, saved.at - at)
        restored = next((each.restored for each in later if each.restored), None)
        end = bisect.bisect_left(spans, lifetime.end, key=_begin)
        mine = spans[bisect.bisect_left(spans, lifetime.begin, key=_begin) : end]
        step, is_estimated = _reached(lifetime, commits)
        back, reached = standing, None
        if restored is not None:
            back, reached = int(restored["step"]), restored["reached"]
            step = max(step, back) if lifetime.records else back
        if is_estimated:
            step = _estimated_step(lifetime, mine, commits, step, reached)
        lost = None if back is None else max(0, step - back)
        if lifetime.restored is None and lifetime.records:
            # The process failed before it restored a checkpoint; the lost steps are
            # counted for an earlier lifetime.
            lost = 0
        down = later[0].begin - lifetime.end if later and _has_end(lifetime) else None
        at_step = bisect.bisect_left(trains, lifetime.end)
        again = trains[at_step] if at_step < len(trains) else None
        found.append(
            Interruption(
                at=at,
                cause=_cause(lifetime),
                bad_step=lifetime.bad_step,
                sources=_sources(notices),
                step=step if _has_records(lead) else None,
                is_estimated=is_estimated,
                saved_step=None if saved is None else saved["step"],
                notice_to_commit_seconds=took,
                restored_step=None if restored is None else restored["step"],
                tier=None if restored is None else restored["tier"],
                steps_lost=lost,
                down_seconds=down,
                resumed_seconds=None if again is None else again - at,
            )
        )
    return found


def _served_by(lifetime: ProcessLifetime, commits: Sequence[Record]) -> Record | None:
    """Returns the commit after which a process exited because of a notice.

    This may be a periodic commit, if the notice arrived during the periodic save.
    Returns None if there was no such commit.
    """
    step = None
    if lifetime.exit is not None and lifetime.exit["outcome"] == "committed":
        step = lifetime.exit["step"]
    for commit in reversed(_during(commits, lifetime)):
        if commit["because"] == "preemption" or commit["step"] == step:
            return commit
    return None


def _estimated_step(
    lifetime: ProcessLifetime,
    spans: Sequence[Span],
    commits: Sequence[Record],
    step: int,
    reported: int | None,
) -> int:
    """Estimates the newest step of a killed process, by the mean step time. After a
    notice, the process saves, or waits for other workers, and makes no steps.

    Args:
        lifetime: lifetime of the process.
        spans: spans of the lifetime.
        commits: commits of the run.
        step: newest known step.
        reported: step in the last status file, written at most `REPORT_INTERVAL`
            seconds before the end of the process; None if unknown.
    """
    seconds, row = _step_seconds(commits, lifetime), _milestones(lifetime, commits)
    guess, more = step, 0
    if seconds:
        more = round(REPORT_INTERVAL / seconds)
        notices = (each.at for each in lifetime.records if each.event == "notice")
        end = min(notices, default=lifetime.end)
        at, known = row[-1] if row else (end, 0)
        made = max(0.0, trained(spans, end) - trained(spans, at))
        guess = max(step, known + round(made / seconds))
    if reported is None:
        return guess
    least = max(reported, step)
    return min(max(guess, least), least + more)


def _sources(notices: Sequence[Record]) -> dict[str, tuple[int, ...]]:
    found: dict[str, set[int]] = {}
    for each in notices:
        found.setdefault(each["source"], set()).add(each["worker"])
    return {source: tuple(sorted(workers)) for source, workers in found.items()}


def _cause(lifetime: ProcessLifetime) -> str:
    if lifetime.bad_step is not None:
        return BAD_STEP  # for the supervisor, the exit code means a preemption
    if lifetime.cause is not None and lifetime.cause != "finished":
        # Trust the supervisor: on a preemption a program may exit with code 0.
        return lifetime.cause
    if lifetime.exit is None:
        return "killed"
    return "failure" if lifetime.exit["outcome"] == "failed" else "preemption"


def _outcome(lifetimes: Sequence[ProcessLifetime]) -> str:
    # Ignore processes that ended before a restore: they did not train.
    begun = [each for each in lifetimes if each.restored or not each.is_over]
    last = begun[-1] if begun else lifetimes[-1]
    if last.is_finished:
        return "finished"
    return "interrupted" if last.is_over else "running"


def _metrics(events: Sequence[Record]) -> dict[str, tuple[Point, ...]]:
    curves: dict[str, list[Point]] = {}
    for event in events:
        if event.event == "metrics":
            for name, value in event["values"].items():
                if is_number(value):
                    point = (event.at, float(event["step"]), float(value))
                    curves.setdefault(name, []).append(point)
    return {name: tuple(points) for name, points in curves.items()}


def _faults(events: Sequence[Record]) -> dict[str, int]:
    faults = (each for each in events if each.event == "fault")
    return dict(collections.Counter(f"{e['where']}: {e['error']}" for e in faults))


# --- what may be wrong ---------------------------------------------------------------


_ELSEWHERE = (
    "Possible causes: the file was lost; the program saves States without a handler, "
    "and so without a journal; or the commits and the journal are in another directory "
    "than --checkpoint-dir (then name this directory)"
)


def _missing(
    lifetimes: Mapping[int, Sequence[ProcessLifetime]],
    workers: Sequence[ReportedWorker],
) -> list[str]:
    found = []
    silent = [index for index, mine in lifetimes.items() if not _has_records(mine)]
    causes = {lifetime.cause for mine in lifetimes.values() for lifetime in mine}
    if len(silent) == len(lifetimes) and causes == {Cause.FAILURE.value}:
        found.append(
            "every start of the program failed, and no worker has records: probably "
            "the program failed before it created a handler or began a fit. The logs "
            "of the workers show the error (by default in logs/ of the checkpoint "
            "directory)"
        )
    elif len(silent) == len(lifetimes):
        found.append(
            "only a supervisor has records, and no worker: steps, commits and the use "
            f"of time are unknown. {_ELSEWHERE}"
        )
    elif 0 in silent or 0 not in lifetimes:
        found.append(
            "no records of worker 0, which records the commits: saves and lost steps "
            f"are unknown. {_ELSEWHERE}"
        )
    for worker in workers:
        gaps = [s.seconds for s in worker.spans if s.phase is Phase.UNKNOWN]
        if worker.index in silent:
            if worker.index and len(silent) < len(lifetimes):
                found.append(
                    f"worker {worker.index} has no records: its time is counted as "
                    "OTHER"
                )
        elif gaps:
            found.append(
                f"worker {worker.index}: no record of the end of {len(gaps)} "
                f"process(es); {sum(gaps):.1f} s are counted as OTHER"
            )
    return found


def _skew(lifetimes: Sequence[ProcessLifetime], commits: Sequence[Record]) -> list[str]:
    """Returns a warning for every worker whose clock differs from the chief's clock.

    After a preemption all workers exit at about the same time, so a large difference
    between the times of the exit and of the commit means that the clocks differ.
    """
    made: dict[int, list[float]] = {}
    for each in commits:
        if each["because"] == "preemption":
            made.setdefault(each["step"], []).append(each.at)
    largest: dict[int, float] = {}
    for lifetime in lifetimes:
        if lifetime.exit is None or lifetime.exit["outcome"] != "committed":
            continue
        exit_at, step = lifetime.exit.at, lifetime.exit["step"]
        apart = [exit_at - at for at in made.get(step, ())]
        if apart:
            least = min(apart, key=abs)
            if abs(least) > max(_SKEW_SECONDS, abs(largest.get(lifetime.worker, 0.0))):
                largest[lifetime.worker] = least
    return [
        f"worker {worker} exited {seconds:+.1f} s after its last commit: its clock "
        "differs from the clock of worker 0, and its timeline is shifted"
        for worker, seconds in largest.items()
    ]
