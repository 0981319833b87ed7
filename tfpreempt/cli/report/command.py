"""The command `tfpreempt report`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

import click

from tfpreempt.cli.journals.locate import (
    commits_in,
    count_commits,
    fetched_journal,
    find_journal,
    has_journal,
    hint,
)
from tfpreempt.cli.journals.tail import JournalTailer
from tfpreempt.cli.report.run_report import RunReport, build_report
from tfpreempt.cli.report.scalars import read_scalars
from tfpreempt.cli.report.view import show, to_json
from tfpreempt.cli.sizes import age_text
from tfpreempt.cli.status.read_status import read_status_now
from tfpreempt.cli.status.run_status import ReportedState
from tfpreempt.cli.tables import Console
from tfpreempt.cli.terminal import echo
from tfpreempt.core.clock import SystemClock
from tfpreempt.core.log_output import plain
from tfpreempt.errors import CheckpointError, TfpreemptError
from tfpreempt.storage.open_store import BUCKET_SCHEMES


@click.command()
@click.argument("location", metavar="DIR|URI")
@click.option(
    "--html", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the report as an HTML page: a single file that opens offline.",
)  # fmt: skip
@click.option(
    "--tensorboard", metavar="LOGDIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Read the scalars logged for TensorBoard in LOGDIR, and draw them with the "
    "interruptions marked. Without this option the metrics of every epoch recorded by "
    "PreemptionCallback are drawn. Nothing is written to LOGDIR.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object only.")
def report(
    location: str, html: Path | None, tensorboard: Path | None, as_json: bool
) -> None:
    """Summarize a run: interruptions, lost work, goodput.

    DIR is the checkpoint directory, or the directory of the journal. URI is the mirror
    (--mirror-dir, gs://, s3://, az:// or file://): its copy of the journal, seconds
    old, is useful if the machines are unreachable. If the checkpoint directory of the
    run is a URL, the journal of this machine (in the scratch directory of the URL, or
    in $TFPREEMPT_JOURNAL_DIR) and the copy are read together. The run may still be
    running. Nothing is changed.

    Goodput is the share of all workers' time spent on steps that the run has kept.
    Badput is the rest, by the classes of Google's ml-goodput-measurement.
    docs/report.md defines the terms.

    Exit status 0 also if part of the journal is missing (a warning names the missing
    part), 2 if there is no journal, or FILE or LOGDIR cannot be used.

    --json: an object with begin, end (seconds since the epoch), outcome, step, seconds,
    goodput, good_seconds, badput_seconds by class, idle_seconds (between a complete
    training and a later start), steps_lost, bytes_written, durations, interruptions,
    commits, restores, workers (spans of each), metrics (points of time, step and
    value), faults and warnings; null where unknown.
    """
    if html is not None and not html.parent.is_dir():
        raise click.UsageError(
            f"--html {str(html)!r}: the directory {str(html.parent)!r} does not "
            "exist. Create the directory, or name another file."
        )
    try:
        report = _read(location, tensorboard)
        if html is not None:
            from tfpreempt.cli.report.page import make_page

            page = make_page(report, location)
            html.write_text(page, encoding="utf-8", errors="backslashreplace")
    except (OSError, TfpreemptError) as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        echo(json.dumps(to_json(report), indent=1))
        return
    for warning in report.warnings:
        echo(f"warning: {plain(warning)}", err=True)
    show(Console(), report)
    if html is not None:
        echo(f"written: {html}", err=True)


def _read(location: str, tensorboard: Path | None) -> RunReport:
    found = find_journal(location)
    local = JournalTailer(found, keeps_all=True) if has_journal(found) else None
    if local is None or location.partition("://")[0] in BUCKET_SCHEMES:
        report = _read_copy(location, found, local)
    else:
        report = _as_of_now(_make_report(location, local), local)
    commits = commits_in(found.parent) if report.step is None else []
    if commits:
        count = count_commits(found.parent, commits)
        warning = f"{count}, but no journal of these commits"
        report = dataclasses.replace(report, warnings=(warning, *report.warnings))
    if tensorboard is None:
        return report
    curves, warnings = read_scalars(tensorboard)
    return dataclasses.replace(
        report,
        metrics={**report.metrics, **curves},
        own_metrics=report.own_metrics - curves.keys(),
        warnings=(*report.warnings, *warnings),
    )


def _read_copy(location: str, found: Path, local: JournalTailer | None) -> RunReport:
    """Returns the report of the copy in a mirror, together with the local journal.

    Args:
        location: path or URI of the mirror.
        found: directory of the local journal.
        local: the local journal; None if there is none.
    """
    try:
        with fetched_journal(location, None if local is None else found) as copy:
            if not has_journal(copy):
                raise _nothing_there(location, found)
            journals = JournalTailer(copy, keeps_all=True)
            report = _make_report(location, journals)
            # If the copy has newer records, another machine has continued the run.
            if local is not None and report.end <= _make_report(location, local).end:
                return _as_of_now(report, local)
            warnings = (*_warnings_of_copy(location, journals), *report.warnings)
            return dataclasses.replace(report, warnings=warnings)
    except (OSError, CheckpointError) as error:
        if local is None:
            raise CheckpointError(
                f"{location!r} has no journal in {found}, and no copy of a journal can "
                f"be downloaded: {error}"
            ) from error
        report = _as_of_now(_make_report(location, local), local)
        warning = (
            f"only the journal of this machine was read, in {found}: the copy in "
            f"{location} cannot be read: {error}"
        )
        return dataclasses.replace(report, warnings=(*report.warnings, warning))


def _make_report(location: str, journals: JournalTailer) -> RunReport:
    journals.read_on(SystemClock.wall())
    report = build_report(journals.workers, journals.supervisors, journals.warnings)
    if report is None:
        raise click.UsageError(
            f"the journal of {location!r} has no records of a worker"
        )
    return report


def _as_of_now(report: RunReport, journals: JournalTailer) -> RunReport:
    """Updates the report of a running job from the status files of the workers."""
    if report.outcome != "running":
        return report
    status = read_status_now(journals)
    steps = [each for each in (report.step, status.step) if each is not None]
    report = dataclasses.replace(report, step=max(steps, default=None))
    silent = [each for each in status.workers if each.state is ReportedState.SILENT]
    if not silent:
        return report
    age = age_text(status.at - max(each.since or 0.0 for each in silent))
    committed = "no commit" if status.commit_step is None else status.commit_step
    warning = (
        f"no report of {len(silent)} worker(s) for {age}, and no record of the end: if "
        f"the workers were killed, the steps after the newest commit ({committed}) "
        "are lost, but not counted as lost here"
    )
    return dataclasses.replace(
        report, outcome="silent", warnings=(*report.warnings, warning)
    )


def _warnings_of_copy(location: str, journals: JournalTailer) -> Iterable[str]:
    """Yields warnings about records that the mirror's copy of a journal may lack."""
    yield (
        f"this is the copy of the journal in {location}: the records of the last "
        "seconds may be missing"
    )
    worlds = [each["world_size"] or 0 for each in journals.records("restored")]
    if len(journals.workers) < max(worlds, default=0):
        yield (
            "the journals of workers that do not share the disk of the chief are "
            "missing here: these journals are on the machines of the workers only"
        )


def _nothing_there(location: str, found: Path) -> click.UsageError:
    advice = (
        "The URL has no copy of a journal either. The journal of a run is on the "
        "machines that trained: copy the journal to this machine, and name its "
        "directory or set TFPREEMPT_JOURNAL_DIR."
        if "://" in location
        else "Name the checkpoint directory of a run, the directory of its journal, or "
        "its mirror."
    )
    return click.UsageError(
        f"{location!r} has no journal: no *.jsonl in {found}. {advice}{hint(location)}"
    )
