"""How checkpoints look: a table for people, objects for programs."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tfpreempt.checkpoint.inspection.findings import Condition, Row
from tfpreempt.cli.sizes import size_text

_STYLES = {
    Condition.COMMITTED: "green",
    Condition.NOT_COMMITTED: "yellow",
    Condition.DAMAGED: "red",
    Condition.FOREIGN: "cyan",
}
_MAX_LINES = 20
_WIDE = 100


def show_table(console: Console, found: Sequence[Row], place: str) -> None:
    """Prints a line for each, and below what is to be said of them."""
    if not found:
        console.print(
            f"no checkpoints in {_plain(place)}", highlight=False, markup=False
        )
        return
    zones = {_zone(row) for row in found if row.shown.time is not None}
    zone = f" ({zones.pop()})" if len(zones) == 1 else ""
    gap = 2 if console.width >= _WIDE else 1
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("checkpoint", overflow="fold", min_width=12)
    table.add_column(f"saved{zone}", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("world", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("checked")
    table.add_column("where", no_wrap=True)
    for row in found:
        table.add_row(*_cells(row, with_zone=not zone))
    console.print(table)
    for row in found:
        _show_lines(console, row, "damaged", row.problems)
        _show_lines(console, row, "note", row.remarks)


def show_states(console: Console, found: Sequence[Row]) -> None:
    """Prints the named States of each checkpoint that has a manifest."""
    for row in found:
        shown = row.shown
        if shown.manifest is None:
            continue
        console.print(f"\nStates of {_plain(shown.name)}:", markup=False)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("State", overflow="fold")
        table.add_column("of")
        table.add_column("size", justify="right")
        for state in shown.states:
            owner = "all workers" if state.worker is None else f"worker {state.worker}"
            table.add_row(escape(_plain(state.name)), owner, size_text(state.bytes))
        if shown.states:
            console.print(table)
        else:
            console.print("  none")


def to_json(row: Row) -> dict[str, Any]:
    """A row as values that JSON has; the keys are always the same."""
    shown = row.shown
    manifest = shown.manifest
    return {
        "name": shown.name,
        "state": row.condition.value,
        "checked": shown.checked.value,
        "where": row.where,
        "path": None if row.local is None else row.local.location,
        "uri": None if row.remote is None else row.remote.location,
        "form": shown.form.value,
        "step": shown.step,
        "sequence": shown.sequence,
        "token": shown.token,
        "saved_at": None if shown.time is None else _moment(shown.time).isoformat(),
        "bytes": shown.size,
        "world_size": None if manifest is None else manifest.world_size,
        "workers": None if manifest is None else list(manifest.workers),
        "because": None if manifest is None else manifest.because,
        "states": [
            {"name": state.name, "worker": state.worker, "bytes": state.bytes}
            for state in shown.states
        ],
        "problems": list(row.problems),
        "remarks": list(row.remarks),
    }


def _cells(row: Row, with_zone: bool) -> tuple[str, ...]:
    shown = row.shown
    style = _STYLES[row.condition]
    return (
        "-" if shown.step is None else str(shown.step),
        escape(_plain(shown.name)),
        "-" if shown.time is None else _local_time(shown.time, with_zone),
        "-" if shown.size is None else size_text(shown.size),
        "-" if shown.manifest is None else str(shown.manifest.world_size),
        f"[{style}]{row.condition.value}[/]",
        "-" if shown.checked.value == "nothing" else shown.checked.value,
        row.where,
    )


def _show_lines(console: Console, row: Row, word: str, lines: Sequence[str]) -> None:
    name = _plain(row.shown.name)
    for line in lines[:_MAX_LINES]:
        text = f"{word}: {name}: {_plain(line)}"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    if len(lines) > _MAX_LINES:
        console.print(f"{word}: {name}: and {len(lines) - _MAX_LINES} more")


def _moment(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


def _local_time(seconds: float, with_zone: bool) -> str:
    pattern = "%Y-%m-%d %H:%M %Z" if with_zone else "%Y-%m-%d %H:%M"
    return _moment(seconds).astimezone().strftime(pattern)


def _zone(row: Row) -> str | None:
    """The local zone at its time; summer and winter differ."""
    return _moment(row.shown.time or 0.0).astimezone().tzname()


def _plain(text: str) -> str:
    """Text from a directory or a manifest, unable to move a terminal's cursor."""
    return text if text.isprintable() else ascii(text)[1:-1]
