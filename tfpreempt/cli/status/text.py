"""Formats the state of a run: as a table, as a line, or as values for JSON."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tfpreempt.checkpoint.mirror.mirror_status import MirrorStatus
from tfpreempt.cli.report.goodput import PLAINLY, GoodputBreakdown
from tfpreempt.cli.report.view import sums_to_json
from tfpreempt.cli.sizes import age_text, seconds_text, size_text
from tfpreempt.cli.status.run_status import RESTARTS, ReportedState, RunStatus, Worker
from tfpreempt.core.log_output import plain

_STYLES = {
    ReportedState.TRAINING: "green",
    ReportedState.FINISHED: "green",
    ReportedState.SILENT: "red",
    ReportedState.DOWN: "yellow",
}
_AFTER = {
    "stopped": "after the supervisor was stopped",
    "lost": "after the supervisor was lost",
}
_LONG_STEP = 60.0  # seconds without a step after which the table shows the duration


def one_line(status: RunStatus) -> str:
    """Returns the state of a run as one line; a notice comes first."""
    return " | ".join(_parts(status))


def table(status: RunStatus) -> RenderableType:
    """Returns a table with a row for every worker, followed by lines about the run."""
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    shown.add_column("worker", justify="right", no_wrap=True)
    shown.add_column("state", no_wrap=True)
    shown.add_column("step", justify="right", no_wrap=True)
    shown.add_column("steps/s", justify="right", no_wrap=True)
    shown.add_column("step time", justify="right", no_wrap=True)
    shown.add_column("process", overflow="fold")
    shown.add_column("")
    for each in status.workers:
        process = "" if each.host is None else f"{plain(each.host)}:{each.pid}"
        shown.add_row(
            str(each.worker),
            f"[{_STYLES.get(each.state, 'cyan')}]{each.state}[/]",
            "" if each.step is None else str(each.step),
            _rate(each.steps_per_second),
            _step_time(each),
            escape(process),
            escape(_remark(status, each)),
        )
    below = [line[:1].upper() + line[1:] for line in _below(status)]
    return Group(shown, *(Text(line) for line in below))


def to_json(status: RunStatus) -> dict[str, Any]:
    """Returns the state of a run as values for JSON."""
    values = dataclasses.asdict(dataclasses.replace(status, report=None))
    del values["report"]
    sums = {} if status.report is None else sums_to_json(status.report)
    return {**values, "is_fine": status.is_fine, "slow": list(status.slow), **sums}


def _parts(status: RunStatus) -> Iterable[str]:
    if (noticed := status.noticed) is not None:
        yield f"NOTICE on worker {noticed.worker}: {_time_left(status, noticed)}"
    for worker, factor in status.slow.items():
        measure = status.slow_by[worker]
        yield f"SLOW worker {worker}: {factor:.2g} x the step time, by {measure}"
    states = [each.state for each in status.workers]
    if set(states) == {ReportedState.TRAINING}:
        yield f"step {status.step}"
    else:
        for state in dict.fromkeys(states):
            those = [each for each in status.workers if each.state is state]
            who = ",".join(str(each.worker) for each in those)
            whom = "" if len(those) == len(states) else f" {who}"
            yield f"{state}{whom}{_since_start(status.at, those)}"
        if status.step is not None:
            yield f"step {status.step}"
    rates = [w.steps_per_second for w in status.workers if w.steps_per_second]
    if rates:
        yield f"{_rate(min(rates))} steps/s"
    if still := _still(status.at, status.stepped_at):
        yield still
    yield from _of_all(status)


def _since_start(at: float, workers: Sequence[Worker]) -> str:
    """Returns " for ..." with the time since the start of workers that are starting.

    Returns "" if no worker is starting.
    """
    began = [w.since for w in workers if w.state is ReportedState.STARTING and w.since]
    return f" for {age_text(at - min(began))}" if began else ""


def _below(status: RunStatus) -> Iterable[str]:
    if status.ended:
        yield f"ended: {plain(status.ended)}"
    yield from _of_all(status)


def _of_all(status: RunStatus) -> Iterable[str]:
    if status.committed_at is None:
        yield "no commit yet"
    else:
        age = age_text(status.at - status.committed_at)
        yield f"committed {status.commit_step}, {age} ago"
    if status.restarts:
        yield _restarts(status.restarts)
    if status.bad_steps:
        yield f"bad steps: {status.bad_steps}"
    if status.upload is not None:
        yield _upload(status.upload)
    if status.report is not None and status.report.goodput is not None:
        yield _goodput(status.report.account)


def _goodput(account: GoodputBreakdown) -> str:
    """Returns goodput and badput as text, the largest category of badput first."""
    bad = sorted(account.bad.items(), key=lambda each: -each[1])
    shares = [f"{account.share(s)} {PLAINLY[kind]}" for kind, s in bad]
    shown = [each for each in shares if not each.startswith("0.0%")]
    return "; ".join([f"goodput {account.share(account.good)}", *shown])


def _restarts(restarts: Mapping[str, int]) -> str:
    def named(kind: str, count: int) -> str:
        plural = "s" if count > 1 and kind in RESTARTS else ""
        return f"{count} {_AFTER.get(kind, kind)}{plural}"

    return f"restarts: {', '.join(named(*each) for each in sorted(restarts.items()))}"


def _upload(upload: MirrorStatus) -> str:
    if upload.uploading is not None:
        sent, total = size_text(upload.sent_bytes), size_text(upload.total_bytes)
        text = f"uploading {upload.uploading}: {sent} of {total}"
    elif upload.mirrored_step is not None:
        text = f"uploaded {upload.mirrored_step}"
    else:
        text = "nothing uploaded yet"
    failing = f" (failing: {plain(upload.last_error)})" if upload.last_error else ""
    return text + failing


def _remark(status: RunStatus, worker: Worker) -> str:
    """Returns the text of the last column: why a worker does not train as usual."""
    if worker.why:
        is_shown_below = worker.why == status.ended
        reasons = [] if is_shown_below else [plain(worker.why)]
        reasons += [] if worker.since is None else [f"since {_clock(worker.since)}"]
        return ", ".join(reasons)
    notes = []
    if factor := status.slow.get(worker.worker):
        measure = status.slow_by[worker.worker]
        notes.append(f"slow: {factor:.2g} x the step time, by {measure}")
    if worker.noticed_at is not None:
        notes.append(f"notice: {_time_left(status, worker)}")
    if worker.state is ReportedState.SILENT and worker.since is not None:
        age = age_text(status.at - worker.since)
        notes.append(f"no report for {age}, since {_clock(worker.since)}")
    elif age := _since_start(status.at, [worker]):
        notes.append(age.lstrip())
    elif still := _still(status.at, worker.stepped_at):
        notes.append(still)
    return "; ".join(notes)


def _still(at: float, stepped_at: float | None) -> str:
    """Returns "no step for ..." if the newest step is old; else "".

    Args:
        at: current time in seconds since the epoch.
        stepped_at: time of the newest step; None if unknown.
    """
    seconds = 0.0 if stepped_at is None else at - stepped_at
    return f"no step for {age_text(seconds)}" if seconds > _LONG_STEP else ""


def _time_left(status: RunStatus, worker: Worker) -> str:
    if worker.deadline is None:
        return "time left unknown"
    return f"{age_text(worker.deadline - status.at)} left"


def _clock(wall: float) -> str:
    local = datetime.datetime.fromtimestamp(wall, datetime.timezone.utc).astimezone()
    return local.strftime("%Y-%m-%d %H:%M:%S %Z")


def _step_time(worker: Worker) -> str:
    """Returns the mean and the standard deviation of the step time, as text."""
    if worker.step_seconds is None or worker.step_deviation is None:
        return ""
    return (
        f"{seconds_text(worker.step_seconds)} ± {seconds_text(worker.step_deviation)}"
    )


def _rate(per_second: float | None) -> str:
    return "" if per_second is None else f"{per_second:.3g}"
