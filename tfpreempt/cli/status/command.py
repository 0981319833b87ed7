"""The command `tfpreempt status`."""

from __future__ import annotations

import dataclasses
import json
import sys

import click

from tfpreempt.cli.journals.locate import find_journal, hint
from tfpreempt.cli.journals.tail import JournalTailer
from tfpreempt.cli.report.run_report import build_report
from tfpreempt.cli.status.read_status import read_status_now
from tfpreempt.cli.status.text import table, to_json
from tfpreempt.cli.tables import Console
from tfpreempt.cli.terminal import echo
from tfpreempt.core.scratch import is_url
from tfpreempt.errors import ConfigurationError

_UNFOLDED = 10_000  # columns: so many that no line is folded


@click.command()
@click.argument("location", metavar="DIR|URI")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object only.")
def status(location: str, as_json: bool) -> None:
    """Show the live status of a job, from any machine that sees its directory.

    DIR is the checkpoint directory, or the directory of the journal. URI, such as
    gs://bucket/run, works on a machine that trains: the journal is in the scratch
    directory of the URL, or in $TFPREEMPT_JOURNAL_DIR. Nothing is changed, and no
    worker is asked: every worker updates a status file every five seconds.

    \b
    starting  before the first step
    training  also during an evaluation, or in the callbacks of a fit
    saving    training waits for a save
    waiting   at the end of a step, for the other workers
    silent    no report for 30 s: the process is stopped, or its machine is unreachable
    down      the process has ended, or exited to be restarted
    finished  the training is complete

    The table also shows a minute or more without a step, the time left after a notice,
    the newest commit and its age, restarts by reason, the upload to the mirror, the
    goodput as in `tfpreempt report`, and workers that are slower than the others.
    Ages depend on how well the clocks of the machines agree; a worker that seems silent
    gets seven seconds more.

    \b
    Exit status:
      0  the job is running, is about to be restarted by its supervisor, or is finished
      1  the job has ended otherwise (also to be restarted by its platform), or a
         worker is silent
      2  DIR does not exist, or contains no status

    --json: an object with at, is_fine (exit status 0), ended (outcome; "" while the job
    runs), commits, commit_step, committed_at, restarts (by reason), bad_steps,
    restarts_by, slowdowns and slow_by (by worker), slow (workers), and workers: a list
    of objects with worker, state, since, why, bad_step, step, steps_per_second,
    stepped_at, step_seconds, step_deviation, own_seconds, cpu_seconds, noticed_at,
    deadline, host, pid and upload (as handler.mirror_status); and goodput,
    good_seconds, badput_seconds and durations as in `tfpreempt report`.
    Times are seconds since 1970; null where unknown.
    """
    try:
        journals = JournalTailer(find_journal(location), keeps_all=True)
        found = read_status_now(journals)
        report = build_report(journals.workers, journals.supervisors)
        found = dataclasses.replace(found, report=report)
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:
        advice = (
            " A mirror has no live status; the past events of the run are shown by "
            f"`tfpreempt report {location}`."
            if is_url(location)
            else hint(location)
        )
        raise click.UsageError(
            f"{location!r} has no readable journal ({error.strerror}). Expected the "
            f"checkpoint directory of a run, or the journal in it.{advice}"
        ) from error
    if not found.workers:
        raise click.UsageError(
            f"{location!r} has no status, because no worker has started. Expected the "
            "checkpoint directory of a run, or the journal in it."
        )
    if as_json:
        echo(json.dumps(to_json(found), indent=1))
    else:
        # Fold long lines on a terminal only: in a pipe, each row must be one line.
        width = None if sys.stdout.isatty() else _UNFOLDED
        Console(width=width).print(table(found))
    raise SystemExit(0 if found.is_fine else 1)
