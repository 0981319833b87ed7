"""How a story looks: tables for people, an object for programs."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from tfpreempt.cli.report.goodput import PLAINLY
from tfpreempt.cli.report.story import Interruption, Story
from tfpreempt.cli.sizes import seconds_text, size_text
from tfpreempt.cli.tables import Console
from tfpreempt.cli.terminal import plain

SHOWN = 20
"""Interruptions that the terminal shows; the page and --json have all."""


def show(console: Console, story: Story) -> None:
    """Prints the story."""
    console.print(headline(story), markup=False, soft_wrap=True)
    _show_account(console, story)
    if story.interruptions:
        _show_interruptions(console, story)
    _show_durations(console, story)
    console.print(f"\n{written(story)}", markup=False)
    for text, count in list(story.faults.items())[:SHOWN]:
        console.print(f"{count} x {plain(text)}", markup=False, soft_wrap=True)


def headline(story: Story) -> str:
    """The run in a line."""
    share = "" if story.goodput is None else f", goodput {story.goodput:.1%}"
    return (
        f"{story.outcome} at {_step(story)}, {seconds_text(story.seconds)}, "
        f"{len(story.workers)} worker(s), {len(story.interruptions)} interruption(s), "
        f"{story.steps_lost} step(s) lost{share}"
    )


def _step(story: Story) -> str:
    return "an unknown step" if story.step is None else f"step {story.step}"


def written(story: Story) -> str:
    """What was written, and from where it was read."""
    size = size_text(story.bytes_written)
    tiers = Counter(plain(each.tier or "unknown") for each in story.restores)
    found = ", ".join(f"{count} from {tier}" for tier, count in tiers.items())
    return f"{len(story.commits)} commit(s), {size}; restores: {found or 'none'}"


COLUMNS = (*("after", "why", "step", "commit in", "restored", "lost", "down", "away"),)


def cells(each: Interruption, begin: float) -> list[str]:
    """An interruption as a row of `COLUMNS`."""
    why = [
        f"{source.removeprefix('signal:')} ({', '.join(map(str, workers))})"
        for source, workers in each.sources.items()
    ]
    if each.cause != "preemption" or not why:
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
        _time(each.away_seconds),
    ]
    return [plain(cell) for cell in row]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A distribution, in seconds."""

    count: int
    least: float
    median: float
    p95: float
    most: float


def spread(values: Sequence[float]) -> Spread | None:
    """Of some values; None of none."""
    if not values:
        return None
    row = sorted(values)
    rank = max(0, -(-95 * len(row) // 100) - 1)
    return Spread(
        count=len(row),
        least=row[0],
        median=statistics.median(row),
        p95=row[rank],
        most=row[-1],
    )


def to_json(story: Story) -> dict[str, Any]:
    """A story as values that JSON has; the keys are always the same."""
    told = {
        field.name: getattr(story, field.name)
        for field in dataclasses.fields(story)
        if field.name not in ("account", "workers", "metrics", "own_metrics", "faults")
    }
    rows = ("interruptions", "commits", "restores")
    return {
        **told,
        **{name: [dataclasses.asdict(each) for each in told[name]] for name in rows},
        "seconds": story.seconds,
        "steps_lost": story.steps_lost,
        "bytes_written": story.bytes_written,
        "goodput": story.goodput,
        "good_seconds": story.account.good,
        "badput_seconds": {k.value: s for k, s in story.account.bad.items()},
        "durations": {
            name: found and dataclasses.asdict(found)
            for name, values in story.durations.items()
            for found in [spread(values)]
        },
        "workers": [
            {
                "index": worker.index,
                "spans": [
                    {"phase": s.phase.value, "begin": s.begin, "end": s.end}
                    for s in worker.spans
                ],
            }
            for worker in story.workers
        ],
        "metrics": {name: list(points) for name, points in story.metrics.items()},
        "faults": dict(story.faults),
    }


def _show_account(console: Console, story: Story) -> None:
    account = story.account
    table = _table("where the time of all workers went", "", "seconds", "share", "")
    table.columns[-1].justify = "left"
    rows = [("steps that were kept", account.good, "goodput")]
    rows += [(PLAINLY[k], s, k.value) for k, s in account.bad.items() if s]
    for text, seconds, word in rows:
        table.add_row(text, f"{seconds:.1f}", account.share(seconds), word)
    console.print(table)


def _show_interruptions(console: Console, story: Story) -> None:
    found = story.interruptions
    title = "interruptions (why: who heard it; away: until training went on)"
    table = _table(title, "#", *COLUMNS)
    before = max(0, len(found) - SHOWN)
    if before:
        console.print(f"the newest {SHOWN} interruptions; --html and --json have all")
    for number, each in enumerate(found[before:], start=before + 1):
        row = cells(each, story.begin)
        table.add_row(str(number), *(escape(cell) for cell in row))
    console.print(table)


def _show_durations(console: Console, story: Story) -> None:
    table = _table("how long it took", "", "times", "median", "95th percentile", "most")
    for name, values in story.durations.items():
        if found := spread(values):
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
