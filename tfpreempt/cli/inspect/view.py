"""Formats checkpoints: a table for people, objects for programs."""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from tfpreempt.checkpoint.directory import layout, retention
from tfpreempt.checkpoint.directory.catalog import (
    CommitStatus,
    Entry,
    Kind,
    VerificationLevel,
)
from tfpreempt.cli.inspect.rows import Row
from tfpreempt.cli.journals.locate import hint
from tfpreempt.cli.sizes import size_text
from tfpreempt.cli.tables import Console
from tfpreempt.core.log_output import plain

_STYLES = {
    CommitStatus.COMMITTED: "green",
    CommitStatus.NOT_COMMITTED: "yellow",
    CommitStatus.CORRUPT: "red",
    CommitStatus.EXTERNAL: "cyan",
}
_MAX_LINES = 20
_WIDE = 100
_STATE = re.compile(rf"(?:{layout.STATES}|worker-(\d{{1,9}}))/([^/]+)\.state")


def show_table(console: Console, found: Sequence[Row], location: str) -> None:
    """Prints a table with a line for each checkpoint, then reasons, problems, remarks.

    The reasons are those for which a commit stays besides `max_to_keep`.
    """
    if not found:
        below = hint(location)
        text = f"no checkpoints in {location!r}{'.' if below else ''}{below}"
        console.print(plain(text), markup=False, soft_wrap=True)
        return
    times = [_saved(row.entry) for row in found]
    zones = {time.tzname() for time in times if time}
    zone = f" ({zones.pop()})" if len(zones) == 1 else ""
    pattern = "%Y-%m-%d %H:%M" if zone else "%Y-%m-%d %H:%M %Z"
    gap = 2 if console.width >= _WIDE else 1
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("checkpoint", overflow="fold", min_width=12)
    table.add_column(f"saved{zone}", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("workers", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("checked")
    table.add_column("where", no_wrap=True)
    for row, time in zip(found, times, strict=True):
        shown, state = row.entry, row.entry.condition
        table.add_row(
            "-" if shown.step is None else str(shown.step),
            escape(plain(shown.label)),
            "-" if time is None else time.strftime(pattern),
            "-" if shown.size is None else size_text(shown.size),
            "-" if shown.manifest is None else str(shown.manifest.world_size),
            f"[{_STYLES[state]}]{state.value}[/]",
            "-" if shown.checked is VerificationLevel.NOTHING else shown.checked.value,
            row.where,
        )
    console.print(table)
    for row in found:  # lines, because a narrow column would cut the names of metrics
        if row.kept not in ("", retention.NEWEST):
            _show_lines(console, f"kept: {row.entry.label}", [row.kept])
    for row in found:
        _show_lines(console, f"corrupt: {row.entry.label}", row.entry.problems)
        named = layout.name_remark(row.entry.label)
        remarks = (*filter(None, [named]), *row.entry.remarks)
        _show_lines(console, f"note: {row.entry.label}", remarks)


def show_states(console: Console, found: Sequence[Row]) -> None:
    """Prints a table of the saved `State`s, for every checkpoint with a manifest."""
    for row in found:
        shown = row.entry
        if shown.manifest is None:
            continue
        console.print(f"\nStates of {plain(shown.label)}:", markup=False)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("State", overflow="fold")
        table.add_column("of")
        table.add_column("size", justify="right")
        states = _states(shown)
        for each in states:
            worker = each["worker"]
            owner = "all workers" if worker is None else f"worker {worker}"
            table.add_row(escape(plain(each["name"])), owner, size_text(each["bytes"]))
        console.print(table if states else "  none")


def to_json(row: Row) -> dict[str, Any]:
    """Returns a row as a dict for JSON. Every key exists; unknown values are None."""
    shown = row.entry
    manifest, time = shown.manifest, _saved(shown)
    utc = time and time.astimezone(datetime.timezone.utc)
    return {
        "name": shown.label,
        "state": shown.condition.value,
        "checked": shown.checked.value,
        "where": row.where,
        "path": row.path,
        "uri": row.uri,
        "form": shown.kind.value,
        "step": shown.step,
        "sequence": shown.sequence,
        "token": shown.token or None,
        "saved_at": utc and utc.isoformat(),
        "bytes": shown.size,
        "world_size": None if manifest is None else manifest.world_size,
        "workers": None if manifest is None else list(manifest.workers),
        "because": None if manifest is None else manifest.because,
        "kept_because": row.kept or None,
        "states": _states(shown),
        "problems": list(shown.problems),
        "remarks": list(shown.remarks),
    }


def _saved(entry: Entry) -> datetime.datetime | None:
    """Returns the time of the save in local time; None if unknown or impossible.

    If the time of the save was not recorded, the time of the files is used. Another
    user can set the time of a file to a year that Python cannot represent.
    """
    seconds = entry.time if entry.saved_at is None else entry.saved_at
    if seconds is None:
        return None
    with contextlib.suppress(ValueError, OverflowError, OSError):
        utc = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
        return utc.astimezone()
    return None


def _states(entry: Entry) -> list[dict[str, Any]]:
    """Returns the named States of a checkpoint.

    States that all workers share come first, then the States of worker 0, and so on.
    """
    inside = f"{entry.holder}/" if entry.kind is Kind.FLAT else ""
    found = []
    for file in entry.files:
        match = _STATE.fullmatch(file.name.removeprefix(inside))
        if match and file.name.startswith(inside):
            worker = None if match[1] is None else int(match[1])
            found.append({"name": match[2], "worker": worker, "bytes": file.size})
    return sorted(
        found, key=lambda each: -1 if each["worker"] is None else each["worker"]
    )


def _show_lines(console: Console, about: str, lines: Sequence[str]) -> None:
    more = [f"and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
    for line in (*lines[:_MAX_LINES], *more):
        text = f"{plain(about)}: {plain(line)}"
        console.print(text, markup=False, soft_wrap=True)
