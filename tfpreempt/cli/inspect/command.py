"""The commands `tfpreempt inspect` and `tfpreempt verify`."""

from __future__ import annotations

import json
import time

import click

from tfpreempt.checkpoint.directory.catalog import CommitStatus, Entry
from tfpreempt.checkpoint.restore.verification import THREADS
from tfpreempt.cli.inspect.replay import replay
from tfpreempt.cli.inspect.rows import look
from tfpreempt.cli.inspect.view import show_states, show_table, to_json
from tfpreempt.cli.sizes import size_text
from tfpreempt.cli.tables import Console
from tfpreempt.cli.terminal import echo
from tfpreempt.errors import ConfigurationError
from tfpreempt.storage import paths
from tfpreempt.storage.open_store import SCHEMES


def _checked(
    ctx: click.Context, param: click.Parameter, location: str | None
) -> str | None:
    """Checks an argument DIR or URI: refuses unknown schemes and empty values."""
    try:
        paths.check_no_user_info(location or "")
    except ConfigurationError as error:
        raise click.BadParameter(str(error)) from error
    scheme, is_uri, _ = (location or "").partition("://")
    if location == "" or (is_uri and scheme not in SCHEMES):
        known = ", ".join(f"{each}://" for each in SCHEMES)
        raise click.BadParameter(
            f"{location!r} cannot be opened. Expected a path, or a URI that begins "
            f"with one of {known}. Mount other storage, or copy the checkpoints to a "
            "disk."
        )
    return location


_location = click.argument("location", metavar="DIR|URI", callback=_checked)
_json = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON list only."
)


@click.command()
@_location
@click.option(
    "--mirror", metavar="URI", callback=_checked,
    help="Show for every commit of DIR whether the mirror at URI has a copy.",
)  # fmt: skip
@click.option("--states", is_flag=True, help="List the named States of every commit.")
@click.option(
    "--verify", "every_byte", is_flag=True,
    help="Read every byte, as `tfpreempt verify` does (default: check sizes only).",
)  # fmt: skip
@_json
def inspect(
    location: str, mirror: str | None, states: bool, every_byte: bool, as_json: bool
) -> None:
    """List the checkpoints of a run, intact or not.

    Name the directory or mirror URI of a run, or a single checkpoint: run/5,
    run/ckpt-5, gs://bucket/run/5.3-1a2b3c4d. The newest checkpoint comes first. A
    restart tries the checkpoints in the same order, and takes the first that is
    committed and intact, or external and complete. Nothing is changed.

    \b
    state    committed      has a marker, and a manifest that agrees with the files
             not committed  a save or upload that is running or was interrupted; see
                            the note below the table
             corrupt        a file is missing or corrupt; see below the table
             external       written without tfpreempt, so without checksums
    checked  sizes, every byte, "index and lengths" (external), or nothing

    Exit status 0 also if a checkpoint is corrupt (`tfpreempt verify` then exits with
    1), 2 if DIR or URI cannot be read or does not exist.

    --json: a list, newest first, of objects with name, state, checked, where ("local",
    "mirror", "both"), path, uri, form, step, sequence, token, saved_at (ISO 8601, UTC),
    bytes, world_size, workers, because, kept_because ("newest", "every 1000 steps",
    "best val_loss"), states (name, worker or null, bytes), problems and remarks; null
    where unknown.
    """
    rows = look(location, mirror, every_byte=every_byte)
    if mirror is not None and not any(row.uri for row in rows):
        echo(f"note: no checkpoints in the mirror (--mirror {mirror!r})", err=True)
    if as_json:
        echo(json.dumps([to_json(row) for row in rows], indent=1))
        return
    console = Console()
    show_table(console, rows, location)
    if states:
        show_states(console, rows)


@click.command()
@_location
@click.option(
    "--threads", type=click.IntRange(1, 64), default=THREADS, show_default=True,
    help="Number of threads that read at the same time.",
)  # fmt: skip
@click.option(
    "--replay", "is_replay", is_flag=True,
    help="Also run COMMAND from the second newest commit to the step of the newest "
    "commit, in a copy of the directory, and compare all values.",
)  # fmt: skip
@_json
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def verify(
    location: str,
    threads: int,
    is_replay: bool,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Verify the checksums of the checkpoints by reading every byte.

    Name the directory or mirror URI of a run, or a single checkpoint: run/5,
    run/ckpt-5, gs://bucket/run/5.3-1a2b3c4d. Objects of a bucket are read without
    storing a copy. Checkpoints written without tfpreempt have no checksums: only their
    index and lengths are checked.

    \b
    Exit status:
      0    all committed checkpoints are intact
      1    a checkpoint is corrupt, or there is no commit
      2    DIR or URI cannot be read, or does not exist
      130  interrupted

    With --replay, status 1 also means that a value differs, and status 2 that the
    steps could not be repeated. COMMAND writes its other files, such as logs, as in
    training.

    --json: the list of `tfpreempt inspect --json`.
    """
    if is_replay != bool(command) or (is_replay and as_json):
        raise click.UsageError(
            "--replay needs the command of the run, without --json: "
            "tfpreempt verify --replay DIR -- python train.py"
        )
    begin = time.monotonic()
    rows = look(location, every_byte=True, threads=threads)
    seconds = time.monotonic() - begin
    intact = [row.entry for row in rows if row.entry.is_committed]
    corrupt = sum(row.entry.condition is CommitStatus.CORRUPT for row in rows)
    if as_json:
        echo(json.dumps([to_json(row) for row in rows], indent=1))
    else:
        console = Console()
        show_table(console, rows, location)
        count = sum(entry.size or 0 for entry in intact)
        speed = f", {size_text(count / seconds)}/s" if seconds > 0 and count else ""
        text = f"{len(intact)} intact ({size_text(count)} in {seconds:.1f} s{speed})"
        if corrupt:
            text += f", {corrupt} corrupt"
        elif not intact:
            text += "; no commit found"
        console.print(text, markup=False)
    if corrupt or not intact:
        raise SystemExit(1)
    if is_replay:
        _replay(intact, command)


def _replay(intact: list[Entry], command: tuple[str, ...]) -> None:
    """Repeats the steps between two commits, and shows the result.

    Raises:
        SystemExit: a value differs.
    """
    result = replay(intact, command)
    steps = f"steps {result.older.step} to {result.newer.step} repeated"
    for name in result.differing:
        echo(f"differs: {name}")
    if result.differing:
        echo(
            f"{steps}: {len(result.differing)} of {result.count} values differ from "
            f"{result.newer.label}. If the program is deterministic, the hardware has "
            "computed wrongly, in the run or now"
        )
        raise SystemExit(1)
    echo(f"{steps}: {result.count} values are equal")
