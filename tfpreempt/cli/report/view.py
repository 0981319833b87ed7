"""Formats a report: tables for people, an object for programs."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from tfpreempt.cli.journals.processes import describe_bad_step
from tfpreempt.cli.journals.records import Record
from tfpreempt.cli.report.goodput import PLAINLY
from tfpreempt.cli.report.run_report import Interruption, RunReport
from tfpreempt.cli.sizes import seconds_text, size_text
from tfpreempt.cli.tables import Console
from tfpreempt.core.events import BAD_STEP
from tfpreempt.core.log_output import plain

IDLE = "idle after completion"
"""Name of the time between a complete training and a later start."""

LEAST_IDLE = 0.05
"""Seconds; less idle time is not shown."""

SHOWN = 20
"""Number of interruptions on the terminal; the page and --json have no limit."""


def show(console: Console, report: RunReport) -> None:
    """Prints the report to the console."""
    console.print(headline(report), markup=False, soft_wrap=True)
    _show_account(console, report)
    if report.interruptions:
        _show_interruptions(console, report)
    _show_durations(console, report)
    console.print(f"\n{written(report)}", markup=False)
    for text, count in list(report.faults.items())[:SHOWN]:
        console.print(f"{count} x {plain(text)}", markup=False, soft_wrap=True)


def headline(report: RunReport) -> str:
    """Returns a summary of the run in one line."""
    share = "" if report.step is None else ", goodput not known before the first commit"
    if report.goodput is not None:
        share = f", goodput {report.goodput:.1%}"
    return (
        f"{report.outcome} at {_step(report)}, {seconds_text(report.seconds)}, "
        f"{len(report.workers)} worker(s), {len(report.interruptions)} "
        f"interruption(s), {report.steps_lost} step(s) lost{share}"
    )


def _step(report: RunReport) -> str:
    return "an unknown step" if report.step is None else f"step {report.step}"


def written(report: RunReport) -> str:
    """Returns a line with the number and size of the commits, and the restores.

    Restores are counted by the storage from which they read.
    """
    if report.step is None:
        return "commits and restores: not recorded"
    size = size_text(report.bytes_written)
    tiers = Counter(plain(each["tier"] or "unknown") for each in report.restores)
    found = ", ".join(f"{count} from {tier}" for tier, count in tiers.items())
    return f"{len(report.commits)} commit(s), {size}; restores: {found or 'none'}"


COLUMNS = (
    *("after", "why", "step", "commit in", "restored", "lost", "down", "resumed in"),
)


def cells(each: Interruption, begin: float) -> list[str]:
    """Returns the table cells of an interruption, in the order of `COLUMNS`.

    Args:
        each: the interruption.
        begin: start of the run, in seconds since the epoch.
    """
    why = [
        f"{source.removeprefix('signal:')} ({', '.join(map(str, workers))})"
        for source, workers in each.sources.items()
        if source != BAD_STEP  # shown as the cause
    ]
    if each.bad_step is not None:
        why.insert(0, describe_bad_step(each.bad_step))
    elif each.cause != "preemption" or not why:
        why.insert(0, each.cause)
    about = "~" if each.is_estimated else ""
    restored = "-" if each.restored_step is None else str(each.restored_step)
    row = [
        seconds_text(each.at - begin),
        ", ".join(why),
        "-" if each.step is None else f"{about}{each.step}",
        _time(each.notice_to_commit_seconds),
        f"{restored} {each.tier or ''}".strip(),
        "-" if each.steps_lost is None else f"{about}{each.steps_lost}",
        _time(each.down_seconds),
        _time(each.resumed_seconds),
    ]
    return [plain(cell) for cell in row]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Statistics of some durations: their number, and quantiles in seconds."""

    count: int
    least: float
    median: float
    p95: float
    most: float


def distribution(values: Sequence[float]) -> Distribution | None:
    """Returns the statistics of some durations; None for an empty sequence."""
    if not values:
        return None
    row = sorted(values)
    rank = max(0, -(-95 * len(row) // 100) - 1)
    return Distribution(
        count=len(row),
        least=row[0],
        median=statistics.median(row),
        p95=row[rank],
        most=row[-1],
    )


_SECONDS = ("save_seconds", "blocked_seconds", "notice_to_commit_seconds")
_COMMIT = ("step", "because", "bytes", *_SECONDS)
_RESTORE = ("worker", "step", "tier", "seconds")


def _row(record: Record, fields: Sequence[str]) -> dict[str, Any]:
    return {"at": record.at, **{name: record[name] for name in fields}}


def to_json(report: RunReport) -> dict[str, Any]:
    """Returns a report as values for JSON; every key is present."""
    fields = dataclasses.asdict(report)
    del fields["account"], fields["own_metrics"]
    return {
        **fields,
        "commits": [_row(each, _COMMIT) for each in report.commits],
        "restores": [_row(each, _RESTORE) for each in report.restores],
        "seconds": report.seconds,
        "steps_lost": report.steps_lost,
        "bytes_written": report.bytes_written,
        "idle_seconds": report.idle_seconds,
        **sums_to_json(report),
    }


def sums_to_json(report: RunReport) -> dict[str, Any]:
    """Returns goodput, badput and durations as values for JSON."""
    return {
        "goodput": report.goodput,
        "good_seconds": report.account.good,
        "badput_seconds": {k.value: s for k, s in report.account.bad.items()},
        "durations": {
            name: found and dataclasses.asdict(found)
            for name, values in report.durations.items()
            for found in [distribution(values)]
        },
    }


def _show_account(console: Console, report: RunReport) -> None:
    account = report.account
    table = _table("time of all workers", "", "seconds", "share", "category")
    table.columns[-1].justify = "left"
    share = "-" if report.goodput is None else account.share(account.good)
    table.add_row("kept steps", f"{account.good:.1f}", share, "goodput")
    for kind, seconds in account.bad.items():
        if seconds:
            shown = f"{seconds:.1f}", account.share(seconds)
            table.add_row(PLAINLY[kind], *shown, kind.value)
    if (idle := report.idle_seconds) > LEAST_IDLE:
        table.add_row(IDLE, f"{idle:.1f}", "-", "not counted")
    console.print(table)


def _show_interruptions(console: Console, report: RunReport) -> None:
    found = report.interruptions
    title = "interruptions (why: notice, and the workers that received the notice)"
    table = _table(title, "#", *COLUMNS)
    before = max(0, len(found) - SHOWN)
    if before:
        console.print(f"the newest {SHOWN} interruptions; --html and --json have all")
    for number, each in enumerate(found[before:], start=before + 1):
        row = cells(each, report.begin)
        table.add_row(str(number), *(escape(cell) for cell in row))
    console.print(table)


def _show_durations(console: Console, report: RunReport) -> None:
    table = _table("durations", "", "count", "median", "95th percentile", "maximum")
    for name, values in report.durations.items():
        if found := distribution(values):
            times = found.median, found.p95, found.most
            table.add_row(name, str(found.count), *map(seconds_text, times))
    if table.row_count:
        console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=title)
    table.title_justify, table.title_style = "left", "bold"
    for number, name in enumerate(columns):
        table.add_column(name, overflow="fold", justify="right" if number else "left")
    return table


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else seconds_text(seconds)
