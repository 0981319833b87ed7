"""The command `tfpreempt report`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click
from rich.console import Console

from tfpreempt.cli.journals import find_journal
from tfpreempt.cli.report.records import take_records
from tfpreempt.cli.report.scalars import read_scalars
from tfpreempt.cli.report.story import Story, make_story
from tfpreempt.cli.report.view import plain, show, to_json
from tfpreempt.core.journal import read_files
from tfpreempt.errors import TfpreemptError


@click.command()
@click.argument("place", metavar="DIR|URI")
@click.option(
    "--html", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path),
    help="Write the report as a page too: one file, which opens offline.",
)  # fmt: skip
@click.option(
    "--tensorboard", metavar="LOGDIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Read the scalars that training has logged for TensorBoard, and draw them "
    "with the interruptions marked. Without it there are those of each epoch that "
    "PreemptionCallback has seen. Nothing is written there.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object only.")
def report(
    place: str, html: Path | None, tensorboard: Path | None, as_json: bool
) -> None:
    """Tell the story of a run: what happened, and where the time went.

    DIR is the checkpoint directory, or the journal's. The journal of a URI such as
    gs://bucket/run is in $TFPREEMPT_JOURNAL_DIR, or below ./tfpreempt-journal where it
    was trained. The run may still go on. Nothing is changed.

    Goodput is the share of all workers' time that went into steps which the run has
    kept; badput is the rest, by the classes of Google's ml-goodput-measurement.
    docs/report.md has the words.

    Exit status 0, also where something of the journal is missing (a warning says what),
    2 if there is none, or FILE or LOGDIR is none.

    --json: an object with begin, end (seconds since the epoch), outcome, step, seconds,
    goodput, good_seconds, badput_seconds by class, steps_lost, bytes_written,
    durations, interruptions, commits, restores, workers (spans of each), metrics
    (points of time, step and value), faults and warnings; null where unknown.
    """
    try:
        story = _read(place, tensorboard)
        if html is not None:
            from tfpreempt.cli.report.page import make_page

            page = make_page(story, place)
            html.write_text(page, encoding="utf-8", errors="backslashreplace")
    except (OSError, TfpreemptError) as error:
        raise click.UsageError(plain(str(error))) from error
    if as_json:
        click.echo(json.dumps(to_json(story), indent=1))
        return
    for warning in story.warnings:
        click.echo(f"warning: {plain(warning)}", err=True)
    show(Console(highlight=False), story)
    if html is not None:
        click.echo(f"written: {html}", err=True)


def _read(place: str, tensorboard: Path | None) -> Story:
    directory = _find(place)
    story = make_story(*take_records(read_files(directory)))
    if story is None:
        raise click.UsageError(f"the journal in {directory} tells of no worker")
    if tensorboard is None:
        return story
    curves, warnings = read_scalars(tensorboard)
    return dataclasses.replace(
        story,
        metrics={**story.metrics, **curves},
        warnings=(*story.warnings, *warnings),
    )


def _find(place: str) -> Path:
    """The journal's directory."""
    found = find_journal(place)
    if any(found.glob("*.jsonl")):
        return found
    hint = (
        "The journal of a bucket's run is on the machines that trained: bring it here, "
        "and name its directory or set TFPREEMPT_JOURNAL_DIR to it."
        if "://" in place
        else "Name the checkpoint directory of a run, or the directory of its journal."
    )
    raise click.UsageError(f"{place!r} has no journal: no *.jsonl in {found}. {hint}")
