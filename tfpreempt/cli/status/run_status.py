"""Computes the current state of a run from its journals and status files.

This module reads no file and no clock. Times are in seconds since the epoch. A worker
and its supervisor run on the same machine, so their times can be compared. Times of
different machines are compared only for display.
"""

from __future__ import annotations

import bisect
import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfpreempt.checkpoint.mirror.mirror_status import MirrorStatus
from tfpreempt.cli.journals.processes import (
    Records,
    SupervisorJournal,
    SupervisorRun,
    WorkerJournal,
    WorkerRun,
    describe_bad_step,
)
from tfpreempt.cli.journals.records import Record
from tfpreempt.cli.journals.tail import LastReport
from tfpreempt.cli.report.run_report import RunReport
from tfpreempt.cli.run.restart_policy import OUTCOMES, Cause, ReturnCode, describe_end
from tfpreempt.core.compat import StrEnum
from tfpreempt.core.events import Outcome
from tfpreempt.handler.status_file import REPORT_INTERVAL, WorkerActivity

SILENT_AFTER = 6 * REPORT_INTERVAL
"""Seconds without a new status file after which a worker counts as silent."""

# Smallest slowdown of a worker that counts as slow. The measurements have errors of
# some percent, and a worker that needs 1.3 times as long for a step must count.
_SLOW_FROM = 1.2
_MEASURES = ("step time", "own time", "CPU time")
_LARGEST = 10.0  # larger slowdowns are shown as this value
_SHORTEST = 1e-6  # seconds; a shorter step is not compared

# Seconds without a new status file after which a worker with an exit record counts as
# ended.
_LEFT_AFTER = 2 * REPORT_INTERVAL
_LONGEST_DELAY = 60.0  # delay of a restart, if the supervisor recorded none
_STARTS_WITHIN = 60.0  # longest time from the end of the delay to the restart
RESTARTS = (Cause.PREEMPTION.value, Cause.FAILURE.value, Cause.HANG.value)
"""Reasons for which a supervisor restarts its workers."""


class ReportedState(StrEnum):
    """State of a worker. A worker's status file has one of the first three states."""

    TRAINING = "training"
    SAVING = "saving"
    WAITING = "waiting"
    STARTING = "starting"  # before the first step
    SILENT = "silent"  # the status file is not updated any more
    DOWN = "down"  # the process has ended, or is about to end
    FINISHED = "finished"  # training is complete


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """The state of a worker. Times are in seconds since the epoch; None means unknown.

    Attributes:
        worker: index of the worker.
        state: state of the worker.
        since: time of the last status file, or of the end of the process.
        why: description of the end of the process; "" while the process runs.
        bad_step: the bad step because of which the process has ended, see
            `WorkerRun.bad_step`.
        step: newest known step.
        steps_per_second: mean over the last minute; None if the worker does not train.
        stepped_at: time of the newest step.
        step_seconds, step_deviation, own_seconds, cpu_seconds: measured times of a
            step, see `WorkerStatus`; None if the worker does not train.
        noticed_at: time of the notice that is being handled; None without a notice.
        deadline: time at which the grace period of the notice ends.
        host: name of the machine.
        pid: id of the process.
        upload: state of the mirror; None without a mirror.
    """

    worker: int
    state: ReportedState
    since: float | None = None
    why: str = ""
    bad_step: Mapping[str, Any] | None = None
    step: int | None = None
    steps_per_second: float | None = None
    stepped_at: float | None = None
    step_seconds: float | None = None
    step_deviation: float | None = None
    own_seconds: float | None = None
    cpu_seconds: float | None = None
    noticed_at: float | None = None
    deadline: float | None = None
    host: str | None = None
    pid: int | None = None
    upload: MirrorStatus | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The state of a run at one moment. Times are in seconds since the epoch.

    Attributes:
        at: time for which the state was computed.
        workers: states of the workers, by index.
        commits: number of commits.
        commit_step: step of the newest commit; None before the first commit.
        committed_at: time of the newest commit; None before the first commit.
        restarts: number of restarts for every reason, see docs/live.md.
        bad_steps: number of bad steps that were found.
        restarts_by: time by which the supervisor should have restarted the ended
            workers; None if no restart is pending.
        ended: description of the end of the run; "" while the run continues.
        report: report of the run, with goodput and durations; None if unknown.
        slowdowns: slowdown of every measured worker: its step time, divided by the
            estimated step time of the worker at the speed of the other workers.
        slow_by: measure that shows the slowdown of every measured worker: "step time",
            "own time" or "CPU time".
    """

    at: float
    workers: Sequence[Worker]
    commits: int = 0
    commit_step: int | None = None
    committed_at: float | None = None
    restarts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    bad_steps: int = 0
    restarts_by: float | None = None
    ended: str = ""
    report: RunReport | None = None
    slowdowns: Mapping[int, float] = dataclasses.field(default_factory=dict)
    slow_by: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @property
    def is_fine(self) -> bool:
        """Whether the run continues, as far as is known, or training is complete."""
        states = {each.state for each in self.workers}
        if states <= {ReportedState.FINISHED}:
            return True
        if states <= {ReportedState.DOWN, ReportedState.FINISHED}:
            return self.restarts_by is not None and self.at < self.restarts_by
        return ReportedState.SILENT not in states

    @property
    def step(self) -> int | None:
        """Lowest known step of all workers; None if no step is known."""
        return min((w.step for w in self.workers if w.step is not None), default=None)

    @property
    def stepped_at(self) -> float | None:
        """Time of the newest step of all workers; None if unknown."""
        known = [w.stepped_at for w in self.workers if w.stepped_at is not None]
        return max(known, default=None)

    @property
    def noticed(self) -> Worker | None:
        """The worker with the earliest deadline of a notice; None without a notice."""
        known = [each for each in self.workers if each.noticed_at is not None]
        return min(known, key=lambda each: each.deadline or float("inf"), default=None)

    @property
    def slow(self) -> dict[int, float]:
        """Workers that are slower than the others, with their slowdowns."""
        return {w: x for w, x in self.slowdowns.items() if x >= _SLOW_FROM}

    @property
    def upload(self) -> MirrorStatus | None:
        """State of the mirror; None without a mirror."""
        return next((each.upload for each in self.workers if each.upload), None)


def build_status(
    at: float,
    workers: Mapping[int, WorkerJournal],
    supervisors: Iterable[SupervisorJournal],
    reports: Mapping[int, LastReport],
) -> RunStatus:
    """Computes the state of a run.

    Args:
        at: current time in seconds since the epoch.
        workers: journals of the workers, by worker index.
        supervisors: journals of the supervisors; every machine of the run has one.
        reports: contents of every worker's status file, by worker index.
    """
    trainings = {index: journal.training for index, journal in workers.items()}
    over = _supervisors_by_worker(supervisors, trainings)
    if last := max(reports.values(), key=lambda each: each.at, default=None):
        over = {
            worker: journal
            for worker, journal in over.items()
            if worker < last.now.num_workers or _began(journal.start) > last.now.at
        }
    num_workers = last.now.num_workers if last else 1 << 31
    indices = set(over) or {w for w in {*workers, *reports} if w < num_workers}
    found = [
        _worker(
            at,
            index,
            over[index].start if index in over else None,
            trainings.get(index),
            reports.get(index),
            trainings.get(0),
        )
        for index in sorted(indices)
    ]
    here = list({id(each): each for each in over.values()}.values())
    commits = [each.commit for each in workers.values() if each.commit is not None]
    commit = max(commits, key=lambda each: each.wall, default=None)
    if commit is not None:
        found = [_at_commit(each, commit) for each in found]
    starts = [each.start for each in here if each.start is not None]
    counts = [each.restarts for each in here or workers.values()]
    slowdowns = _slowdowns(found)
    pauses = [until for start in starts if (until := _restarts_by(start)) is not None]
    return RunStatus(
        at=at,
        workers=found,
        commits=sum(each.commits for each in workers.values()),
        commit_step=commit["step"] if commit else None,
        committed_at=commit.wall if commit else None,
        # Take the maximum, not the sum: each machine's supervisor counts every restart.
        restarts=dict(max(counts, key=lambda each: each.total(), default={})),
        bad_steps=sum(each.bad_steps for each in workers.values()),
        restarts_by=max(pauses, default=None),
        ended=_ended(starts, found),
        slowdowns={w: factor for w, (factor, _) in slowdowns.items()},
        slow_by={w: measure for w, (_, measure) in slowdowns.items()},
    )


def _began(start: Records | None) -> float:
    """Returns the time of the first record; 0 if there are no records (None)."""
    return start.records[0].wall if start is not None else 0.0


def _supervisors_by_worker(
    supervisors: Iterable[SupervisorJournal], trainings: Mapping[int, WorkerRun | None]
) -> dict[int, SupervisorJournal]:
    """Returns, for every worker, the journal of the supervisor that runs the worker.

    A supervisor that exited before the worker's newest start is ignored.

    Args:
        supervisors: journals of the supervisors.
        trainings: newest training of every worker, by worker index.
    """
    found = {}
    for journal in sorted(supervisors, key=lambda each: _began(each.start)):
        start = journal.start
        exited = None if start is None else start.newest("exited")
        for worker in () if start is None else start.workers:
            training = trainings.get(worker)
            if exited is None or training is None or _began(training) < exited.wall:
                found[worker] = journal
    return found


def _worker(
    at: float,
    worker: int,
    start: SupervisorRun | None,
    training: WorkerRun | None,
    report: LastReport | None,
    chief: WorkerRun | None,
) -> Worker:
    began = _began(training if start is None else start)
    if report is not None and report.now.at < began:
        report = None  # written by the previous process
    if _began(training) < began:
        training = None
    known = Worker(worker=worker, state=ReportedState.STARTING, since=began or None)
    if training is not None:
        known = _with_records(known, training)
    if report is not None:
        known = _with_report(known, report)
    if (end := _end(at, worker, start, training, report)) is not None:
        state, since, why = end
        known = dataclasses.replace(
            known, state=state, since=since, why=why, noticed_at=None, deadline=None
        )
        return _with_bad_step(known, training, chief)
    if report is None:
        return known
    if at - report.at > SILENT_AFTER:
        return dataclasses.replace(known, state=ReportedState.SILENT)
    return dataclasses.replace(
        known,
        state=ReportedState(report.now.doing),
        steps_per_second=report.now.steps_per_second,
        stepped_at=report.now.stepped_at,
        step_seconds=report.now.step_seconds,
        step_deviation=report.now.step_deviation,
        own_seconds=report.now.own_seconds,
        cpu_seconds=report.now.cpu_seconds,
    )


def _with_records(known: Worker, training: WorkerRun) -> Worker:
    """Updates the state of a worker from the records of its newest handler or `fit`."""
    reached = training.exit or training.newest("restored", "commit")
    known = dataclasses.replace(
        known, step=None if reached is None else reached["step"]
    )
    last = training.newest("notice", "exit")
    if last is None or last.event == "exit":
        return known
    grace = last["grace_seconds"]
    deadline = None if grace is None else last.wall + float(grace)
    return dataclasses.replace(known, noticed_at=last.wall, deadline=deadline)


def _with_report(known: Worker, report: LastReport) -> Worker:
    """Updates the state of a worker from its last report (its status file)."""
    now = report.now
    known = dataclasses.replace(
        known,
        since=report.at,
        step=max(now.step, known.step or 0),
        host=now.host,
        pid=now.pid,
        upload=now.upload,
    )
    if now.at < (known.noticed_at or 0.0):
        return known  # the notice is newer than the report
    return dataclasses.replace(known, noticed_at=now.noticed_at, deadline=now.deadline)


def _with_bad_step(
    ended: Worker, training: WorkerRun | None, chief: WorkerRun | None
) -> Worker:
    """Updates the state of a worker that has exited because of a bad step.

    Args:
        ended: state of the worker, which has ended.
        training: newest training of the worker.
        chief: newest training of the chief, whose journal has the bad step.
    """
    left = None if training is None else training.exit
    if training is None or chief is None or left is None:
        return ended
    found = chief.bad_step
    is_lost = left["outcome"] == Outcome.LOST and training.start == chief.start
    if found is None or not is_lost:
        return ended
    why = f"{describe_bad_step(found)} ({found['reason']}){_exit_code(left)}"
    return dataclasses.replace(ended, why=why, bad_step=found)


def _at_commit(worker: Worker, commit: Record) -> Worker:
    """Updates the step of a worker from a commit that is newer than its status file.

    At the commit, every training worker had reached the step of the commit.
    """
    has_part = worker.state in (ReportedState.TRAINING, ReportedState.SAVING)
    if not has_part or (worker.since or 0.0) >= commit.wall:
        return worker
    return dataclasses.replace(worker, step=max(worker.step or 0, commit["step"]))


def _end(
    at: float,
    worker: int,
    start: SupervisorRun | None,
    training: WorkerRun | None,
    report: LastReport | None,
) -> tuple[ReportedState, float, str] | None:
    """Returns the end of a worker: (state, time, description); None while the worker
    runs.

    Args:
        at: current time in seconds since the epoch.
        worker: index of the worker.
        start: newest start of the worker by a supervisor; None without a supervisor.
        training: newest training of the worker; None without records.
        report: contents of the worker's status file; None without a file.
    """
    left = None if training is None else training.exit
    if start is not None:
        if (seen := start.ends.get(worker)) is not None:
            code = ReturnCode(int(seen["returncode"]))
            state = ReportedState.DOWN if code else ReportedState.FINISHED
            return state, seen.wall, describe_end(code) if left is None else _why(left)
        if (exited := start.newest("exited")) is not None:
            return ReportedState.DOWN, exited.wall, "supervisor exited"
    if left is not None:
        if _still_runs(at, left, report):
            return None
        is_over = left["outcome"] == Outcome.FINISHED
        state = ReportedState.FINISHED if is_over else ReportedState.DOWN
        return state, left.wall, _why(left)
    terminated = None if start is None else start.newest("supervisor_terminated")
    if terminated is not None:
        # After the end of the supervisor, the supervisor's guard process gives the
        # workers time to commit. So a worker may still run and report.
        is_quiet = report is None or report.at < terminated.wall
        if is_quiet and (report is None or at - terminated.wall > _LEFT_AFTER):
            return ReportedState.DOWN, terminated.wall, "supervisor terminated"
    if report is not None and report.has_ended:
        why = f"process {report.now.pid} ended without a record"
        return ReportedState.DOWN, report.at, why
    return None


def _still_runs(at: float, left: Record, report: LastReport | None) -> bool:
    """Returns whether a worker still runs after its exit record.

    The worker may finish an upload. Or the exit function has returned, and the program
    continues to train. A worker that reports no further step has ended.

    Args:
        at: current time in seconds since the epoch.
        left: exit record of the worker.
        report: contents of the worker's status file; None without a file.
    """
    if report is None or report.has_ended or left["outcome"] == Outcome.FAILED:
        return False
    now = report.now
    is_active = now.doing is not WorkerActivity.TRAINING or now.step > left["step"]
    return is_active and now.at > left.wall and at - report.at < _LEFT_AFTER


def _why(left: Record) -> str:
    """Describes how a worker has exited."""
    outcome, more = left["outcome"], _exit_code(left)
    if outcome == Outcome.FAILED and (error := left["detail"]):
        more = f": {error}"
    return f"{outcome} at step {left['step']}{more}"


def _exit_code(left: Record) -> str:
    return "" if left["code"] is None else f", exit code {int(left['code'])}"


def _restarts_by(start: SupervisorRun) -> float | None:
    """Returns the latest expected time of the workers' restart.

    Returns None if the supervisor does not restart the workers.
    """
    budget = start.newest("budget")
    if budget is None or budget["is_used_up"] or budget["cause"] not in RESTARTS:
        return None
    if start.newest("exited", "supervisor_terminated") is not None:
        return None
    delay = _LONGEST_DELAY if budget["delay"] is None else budget["delay"]
    return float(budget.wall + delay + _STARTS_WITHIN)


def _ended(starts: Sequence[SupervisorRun], workers: Sequence[Worker]) -> str:
    """Describes the end of the run; "" while the run continues, or if unknown."""
    if not starts:
        states = {each.state for each in workers}
        if not states <= {ReportedState.DOWN, ReportedState.FINISHED}:
            return ""
        return "; ".join(dict.fromkeys(each.why for each in workers))
    ends = [each.newest("exited", "supervisor_terminated") for each in starts]
    known = [each for each in ends if each is not None]
    if len(known) < len(ends):
        return ""
    last = max(known, key=lambda each: each.wall)
    if last.event == "supervisor_terminated":
        return "supervisor terminated by a signal or an error"
    outcomes = {cause.value: text for cause, text in OUTCOMES.items()}
    outcome = outcomes.get(last["cause"], last["cause"])
    return f"{outcome}, exit code {int(last['code'])}"


def _slowdowns(workers: Sequence[Worker]) -> dict[int, tuple[float, str]]:
    """Compares every measured worker with the median of the other workers.

    Returns the slowdown and its measure, see `RunStatus`, by worker index.

    In a synchronous step, fast workers wait for the slowest worker, and all step times
    are equal. So the own time and the CPU time are compared, too; see `OwnTime`.
    """
    rows, is_steady = {}, True
    for each in workers:
        step, own, cpu = each.step_seconds or 0.0, each.own_seconds, each.cpu_seconds
        if step > _SHORTEST and own is not None and cpu is not None:
            rows[each.worker] = step, own, cpu
            is_steady &= (each.step_deviation or 0.0) <= step / 2
    if len(rows) < 2:
        return {}
    if not is_steady:
        # The step times vary, for example because of an evaluation. The variation
        # reaches the means of different workers at different times, so do not compare
        # step times. Compare the own time and the CPU time as shares of the step time.
        rows = {
            w: (1.0, own / step, cpu / step) for w, (step, own, cpu) in rows.items()
        }
    columns = [sorted(column) for column in zip(*rows.values(), strict=True)]
    found = {}
    for worker, mine in rows.items():
        excess = []
        for value, column in zip(mine, columns, strict=True):
            at = bisect.bisect_left(column, value)
            excess.append(value - statistics.median(column[:at] + column[at + 1 :]))
        step, _, cpu = mine
        # Threads may run in parallel, so only a part of the excess CPU time is elapsed
        # time.
        excess[2] *= step / max(step, cpu)
        largest = max(excess)
        slowdown = step / max(step - largest, step / _LARGEST)
        found[worker] = slowdown, _MEASURES[excess.index(largest)]
    return found
