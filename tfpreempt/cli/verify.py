"""`tfpreempt verify`: is every byte of the checkpoints what was committed?"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import click
from rich.console import Console

from tfpreempt.checkpoint.catalog import Condition
from tfpreempt.checkpoint.verification import THREADS
from tfpreempt.cli.checking import CheckpointPlace, Row, check_rows, find_rows
from tfpreempt.cli.findings_view import show_table, to_json
from tfpreempt.cli.sizes import size_text


@click.command()
@click.argument("place", metavar="DIR|URI", type=CheckpointPlace())
@click.option(
    "--threads", type=click.IntRange(1, 64), default=THREADS, show_default=True,
    help="How many read at the same time.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list only.")
def verify(place: str, threads: int, as_json: bool) -> None:
    """Read every byte of the checkpoints and compare the checksums.

    Name the directory or URI of a run, or one checkpoint: run/5, run/ckpt-5,
    gs://bucket/run/5.3-1a2b3c4d. What lies in a bucket is read and dropped, nothing is
    stored. Checkpoints that were written without tfpreempt have no checksums: of those
    only index and lengths are checked.

    \b
    Exit status:
      0    all committed checkpoints are whole
      1    something is damaged, or nothing is committed there
      2    DIR or URI cannot be read, or is none
      130  interrupted

    --json: the list of `tfpreempt inspect --json`.
    """
    begin = time.monotonic()
    found = check_rows(find_rows(place), every_byte=True, threads=threads)
    seconds = time.monotonic() - begin
    fault = _fault(found)
    if as_json:
        click.echo(json.dumps([to_json(row) for row in found], indent=1))
    else:
        console = Console()
        show_table(console, found, place)
        console.print(_summary(found, seconds, fault), highlight=False, markup=False)
    if fault is not None:
        raise SystemExit(1)


def _fault(found: Sequence[Row]) -> str | None:
    """Why the exit status is 1; None if it is 0."""
    damaged = sum(row.condition is Condition.DAMAGED for row in found)
    if damaged:
        return f"{damaged} damaged"
    if not any(row.condition is Condition.COMMITTED for row in found):
        return "nothing is committed here"
    return None


def _summary(found: Sequence[Row], seconds: float, fault: str | None) -> str:
    whole = [row for row in found if row.condition is Condition.COMMITTED]
    count = sum(row.shown.size or 0 for row in whole)
    speed = f", {size_text(count / seconds)}/s" if seconds > 0 and count else ""
    text = f"{len(whole)} whole ({size_text(count)} in {seconds:.1f} s{speed})"
    return text if fault is None else f"{text}; {fault}"
