"""How checkpoints look: a table for people, objects for programs."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tfpreempt.checkpoint import layout
from tfpreempt.checkpoint.catalog import Condition, Entry, Kind
from tfpreempt.cli.checking import Row
from tfpreempt.cli.sizes import size_text

_STYLES = {
    Condition.COMMITTED: "green",
    Condition.NOT_COMMITTED: "yellow",
    Condition.DAMAGED: "red",
    Condition.FOREIGN: "cyan",
}
_MAX_LINES = 20
_WIDE = 100
_WORKER = layout.worker_name(0).rstrip("0")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateFile:
    """A named State in a commit.

    Attributes:
        name: of the State.
        worker: whose it is; None for the one that is equal on all workers.
        bytes: size of its file.
    """

    name: str
    worker: int | None
    bytes: int


def show_table(console: Console, found: Sequence[Row], place: str) -> None:
    """Prints a line for each, and below what is to be said of them."""
    if not found:
        console.print(
            f"no checkpoints in {_plain(place)}", highlight=False, markup=False
        )
        return
    zones = {_zone(row) for row in found if _time(row.shown) is not None}
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
        console.print(f"\nStates of {_plain(shown.label)}:", markup=False)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("State", overflow="fold")
        table.add_column("of")
        table.add_column("size", justify="right")
        states = _states(shown)
        for state in states:
            owner = "all workers" if state.worker is None else f"worker {state.worker}"
            table.add_row(escape(_plain(state.name)), owner, size_text(state.bytes))
        if states:
            console.print(table)
        else:
            console.print("  none")


def to_json(row: Row) -> dict[str, Any]:
    """A row as values that JSON has; the keys are always the same."""
    shown = row.shown
    manifest, time = shown.manifest, _time(shown)
    return {
        "name": shown.label,
        "state": row.condition.value,
        "checked": shown.checked.value,
        "where": row.where,
        "path": None if row.local is None else row.local.path,
        "uri": None if row.remote is None else row.remote.path,
        "form": shown.kind.value,
        "step": shown.step,
        "sequence": shown.sequence,
        "token": shown.token or None,
        "saved_at": None if time is None else _moment(time).isoformat(),
        "bytes": shown.size,
        "world_size": None if manifest is None else manifest.world_size,
        "workers": None if manifest is None else list(manifest.workers),
        "because": None if manifest is None else manifest.because,
        "states": [
            {"name": state.name, "worker": state.worker, "bytes": state.bytes}
            for state in _states(shown)
        ],
        "problems": list(row.problems),
        "remarks": list(row.remarks),
    }


def _time(entry: Entry) -> float | None:
    """When it was saved, as it says itself; else when it was written."""
    return entry.time if entry.saved_at is None else entry.saved_at


def _states(entry: Entry) -> list[StateFile]:
    """The named States in it, those of all workers first."""
    inside = f"{entry.holder}/" if entry.kind is Kind.FLAT else ""
    files = entry.manifest.files if entry.manifest else ()
    found = [
        state
        for file in files
        if file.name.startswith(inside)
        and (state := _state(file.name[len(inside) :], file.size)) is not None
    ]
    return sorted(found, key=lambda each: -1 if each.worker is None else each.worker)


def _state(name: str, size: int) -> StateFile | None:
    folder, _, file = name.partition("/")
    suffix = layout.state_file("")
    if not file.endswith(suffix) or "/" in file:
        return None
    worker = None
    if folder != layout.STATES:
        number = folder.removeprefix(_WORKER)
        if number == folder or not number.isdecimal() or len(number) > 9:
            return None
        worker = int(number)
    return StateFile(name=file.removesuffix(suffix), worker=worker, bytes=size)


def _cells(row: Row, with_zone: bool) -> tuple[str, ...]:
    shown, time = row.shown, _time(row.shown)
    style = _STYLES[row.condition]
    return (
        "-" if shown.step is None else str(shown.step),
        escape(_plain(shown.label)),
        "-" if time is None else _local_time(time, with_zone),
        "-" if shown.size is None else size_text(shown.size),
        "-" if shown.manifest is None else str(shown.manifest.world_size),
        f"[{style}]{row.condition.value}[/]",
        "-" if shown.checked.value == "nothing" else shown.checked.value,
        row.where,
    )


def _show_lines(console: Console, row: Row, word: str, lines: Sequence[str]) -> None:
    name = _plain(row.shown.label)
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
    return _moment(_time(row.shown) or 0.0).astimezone().tzname()


def _plain(text: str) -> str:
    """Text from a directory or a manifest, unable to move a terminal's cursor."""
    return text if text.isprintable() else ascii(text)[1:-1]
