"""The command `tfpreempt status`."""

from __future__ import annotations

import json
import sys

import click

from tfpreempt.cli.journals.locate import find_journal, hint
from tfpreempt.cli.journals.tail import JournalTailer
from tfpreempt.cli.status.read_status import read_status_now
from tfpreempt.cli.status.text import table, to_json
from tfpreempt.cli.tables import Console
from tfpreempt.cli.terminal import echo
from tfpreempt.core.scratch import is_url
from tfpreempt.errors import ConfigurationError

_UNFOLDED = 10_000  # columns


@click.command()
@click.argument("place", metavar="DIR|URI")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object only.")
def status(place: str, as_json: bool) -> None:
    """Show what a running job is at, from any machine that sees its directory.

    DIR is the checkpoint directory, or the journal in it. URI, such as gs://bucket/run,
    works on a machine that trains: the journal is in the scratch directory of the URL,
    or in $TFPREEMPT_JOURNAL_DIR. Nothing is changed, and no worker is asked: each tells
    every five seconds how far it is.

    \b
    starting  no step was begun yet
    training  so it is also in an evaluation, or in callbacks of a fit
    saving    and training waits for it
    waiting   at the end of a step, for the other workers
    silent    nothing was heard of it for 30 s: it is stopped, or its machine has gone
    down      its process has ended, or left to be started again
    finished  its training is over

    Beside these: that no step has come for a minute or longer, the time that a notice
    leaves, the newest commit and its age, restarts by what they were for, and the
    upload to an object store. Ages are as exact as the clocks of the machines agree; a
    worker that seems silent gets seven seconds more.

    \b
    Exit status:
      0  it goes on, its supervisor is about to start it again, or training is finished
      1  it has ended otherwise (also to be started again by its platform), or a
         worker is silent
      2  DIR is none, or nothing is told there

    --json: an object with at, is_fine (exit status 0), ended (how; "" while it goes
    on), commits, commit_step, committed_at, restarts (by reason), restarts_by, and
    workers: a list of objects with worker, state, since, why, step, steps_per_second,
    stepped_at, noticed_at, deadline, host, pid and upload (as handler.mirror_status).
    Times are seconds since 1970; null where unknown.
    """
    try:
        found = read_status_now(JournalTailer(find_journal(place)))
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:
        advice = (
            f" What a bucket has of a run tells nothing of now; `tfpreempt report "
            f"{place}` tells what has happened."
            if is_url(place)
            else hint(place)
        )
        raise click.UsageError(
            f"{place!r} has no journal that can be read ({error.strerror}). Expected "
            f"the checkpoint directory of a run, or the journal in it.{advice}"
        ) from error
    if not found.workers:
        raise click.UsageError(
            f"Nothing is told in {place!r}: no worker has begun there. Expected the "
            "checkpoint directory of a run, or the journal in it."
        )
    if as_json:
        echo(json.dumps(to_json(found), indent=1))
    else:
        # A terminal folds what is too long; in a pipe a row is one line.
        width = None if sys.stdout.isatty() else _UNFOLDED
        Console(width=width).print(table(found))
    raise SystemExit(0 if found.is_fine else 1)
