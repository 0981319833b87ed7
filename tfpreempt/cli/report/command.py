"""The command `tfpreempt report`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from tfpreempt.cli.journals import (
    fetched_journal,
    find_journal,
    has_journal,
    hint,
)
from tfpreempt.cli.report.records import take_records
from tfpreempt.cli.report.scalars import read_scalars
from tfpreempt.cli.report.story import Story, make_story
from tfpreempt.cli.report.view import show, to_json
from tfpreempt.cli.status.follow import Follower
from tfpreempt.cli.status.picture import State
from tfpreempt.cli.status.text import age_text
from tfpreempt.cli.tables import Console
from tfpreempt.cli.terminal import echo, plain
from tfpreempt.core.fields import is_kind
from tfpreempt.core.journal import JournalFile, read_files
from tfpreempt.errors import CheckpointError, TfpreemptError


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

    DIR is the checkpoint directory, or the journal's. URI is the mirror
    (--remote-checkpoint-dir, gs://, s3:// or file://), which has a copy of the journal,
    seconds old, for who has lost the machines. The journal of a run that committed to
    gs:// itself is in $TFPREEMPT_JOURNAL_DIR, or below ./tfpreempt-journal where it was
    trained. The run may still go on. Nothing is changed.

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
    if html is not None and not html.parent.is_dir():
        raise click.UsageError(
            f"--html {str(html)!r}: there is no directory "
            f"{str(html.parent)!r}. Make it first, or name another file."
        )
    try:
        story = _read(place, tensorboard)
        if html is not None:
            from tfpreempt.cli.report.page import make_page

            page = make_page(story, place)
            html.write_text(page, encoding="utf-8", errors="backslashreplace")
    except (OSError, TfpreemptError) as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        echo(json.dumps(to_json(story), indent=1))
        return
    for warning in story.warnings:
        echo(f"warning: {plain(warning)}", err=True)
    show(Console(), story)
    if html is not None:
        echo(f"written: {html}", err=True)


def _read(place: str, tensorboard: Path | None) -> Story:
    found = find_journal(place)
    if has_journal(found):
        story = _as_of_now(_tell(place, read_files(found)), found)
    else:
        try:
            with fetched_journal(place) as copy:
                files = read_files(copy)
        except CheckpointError as error:
            raise CheckpointError(
                f"{place!r} has no journal in {found}, nor can a copy of one be "
                f"fetched: {error}"
            ) from error
        if not files:
            raise _nothing_there(place, found)
        story = _tell(place, files, list(_warnings_of_copy(place, files)))
    if tensorboard is None:
        return story
    curves, warnings = read_scalars(tensorboard)
    return dataclasses.replace(
        story,
        metrics={**story.metrics, **curves},
        own_metrics=story.own_metrics - curves.keys(),
        warnings=(*story.warnings, *warnings),
    )


def _tell(
    place: str, files: Sequence[JournalFile], warnings: Sequence[str] = ()
) -> Story:
    records, damaged = take_records(files)
    story = make_story(records, (*warnings, *damaged))
    if story is None:
        raise click.UsageError(f"the journal of {place!r} tells of no worker")
    return story


def _as_of_now(story: Story, journal: Path) -> Story:
    """With what the workers of a run that has not ended say of themselves."""
    if story.outcome != "running":
        return story
    picture = Follower(journal).look_now()
    steps = [each for each in (story.step, picture.step) if each is not None]
    story = dataclasses.replace(story, step=max(steps, default=None))
    silent = [each for each in picture.workers if each.state is State.SILENT]
    if not silent:
        return story
    age = age_text(picture.at - max(each.since or 0.0 for each in silent))
    committed = "no commit" if picture.commit_step is None else picture.commit_step
    warning = (
        f"nothing was heard of {len(silent)} worker(s) for {age}, and no record says "
        "how they ended: if they were killed, what came after the newest commit "
        f"({committed}) is lost, and not counted here"
    )
    return dataclasses.replace(
        story, outcome="silent", warnings=(*story.warnings, warning)
    )


def _warnings_of_copy(place: str, files: Sequence[JournalFile]) -> Iterable[str]:
    """What is not in the copy of a journal."""
    yield (
        f"this is the copy of the journal in {place}: what was recorded after it was "
        "copied last, at most seconds before the end, is missing"
    )
    starts = [r for f in files for r in f.records if r.get("event") == "restored"]
    worlds = [r["world_size"] for r in starts if is_kind(r.get("world_size"), "count")]
    known = {file.path.stem for file in files}
    if len([name for name in known if name.startswith("worker-")]) < max(
        worlds, default=0
    ):
        yield (
            "of workers that do not share the chief's disk the journals are on their "
            "own machines only, and missing here"
        )


def _nothing_there(place: str, found: Path) -> click.UsageError:
    advice = (
        "Nor has the place a copy of one. The journal of a run is on the machines that "
        "trained: bring it here, and name its directory or set TFPREEMPT_JOURNAL_DIR "
        "to it."
        if "://" in place
        else "Name the checkpoint directory of a run, the directory of its journal, or "
        "the mirror of its commits."
    )
    return click.UsageError(
        f"{place!r} has no journal: no *.jsonl in {found}. {advice}{hint(place)}"
    )
