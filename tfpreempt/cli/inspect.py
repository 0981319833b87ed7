"""`tfpreempt inspect`: which checkpoints lie here, there, or in both places?"""

from __future__ import annotations

import json

import click
from rich.console import Console

from tfpreempt.cli.checking import CheckpointPlace, Row, check_rows, find_rows
from tfpreempt.cli.findings_view import show_states, show_table, to_json


@click.command()
@click.argument("place", metavar="DIR|URI", type=CheckpointPlace())
@click.option(
    "--remote", type=CheckpointPlace(), metavar="URI",
    help="Show for each commit of DIR whether this mirror has it too.",
)  # fmt: skip
@click.option("--states", is_flag=True, help="List the named States of each commit.")
@click.option(
    "--verify", "every_byte", is_flag=True,
    help="Read every byte, as `tfpreempt verify` does; otherwise sizes only.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list only.")
def inspect(
    place: str, remote: str | None, states: bool, every_byte: bool, as_json: bool
) -> None:
    """List the checkpoints in a run's directory or mirror, whole or not.

    Name the directory or URI of a run, or one checkpoint: run/5, run/ckpt-5,
    gs://bucket/run/5.3-1a2b3c4d. Newest first, as a restart would try them; a restart
    takes the first one that is committed and whole, or not ours and complete. Nothing
    is changed.

    \b
    state    committed      has a marker, and a manifest that agrees with it
             not committed  a save or upload that is under way, or died; why is said
             damaged        something is missing or wrong; what is said
             not ours       written without tfpreempt, so without checksums
    checked  sizes, every byte, "index and lengths" (not ours), or nothing

    Exit status 0 also where something is damaged (`tfpreempt verify` is for that), 2 if
    DIR or URI cannot be read or is none.

    --json: a list, newest first, of objects with name, state, checked, where ("local",
    "remote", "both"), path, uri, form, step, sequence, token, saved_at (ISO 8601, UTC),
    bytes, world_size, workers, because, states (name, worker or null, bytes), problems
    and remarks; null where unknown.
    """
    found = _look(place, remote, every_byte)
    if remote is not None and not any(row.remote for row in found):
        click.echo(f"note: --remote {remote!r} has no checkpoints", err=True)
    if as_json:
        click.echo(json.dumps([to_json(row) for row in found], indent=1))
        return
    console = Console()
    show_table(console, found, place)
    if states:
        show_states(console, found)


def _look(place: str, remote: str | None, every_byte: bool) -> list[Row]:
    return check_rows(find_rows(place, remote), every_byte=every_byte)
