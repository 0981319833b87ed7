"""The command `tfpreempt probe`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from tfpreempt.cli.journals.locate import find_journal
from tfpreempt.cli.probe.progress import send_progress, trainer_status
from tfpreempt.cli.probe.workers import problem, training_workers
from tfpreempt.cli.sizes import Seconds
from tfpreempt.cli.terminal import echo
from tfpreempt.errors import ConfigurationError
from tfpreempt.storage.files import replace


@click.command()
@click.argument("condition", type=click.Choice(["ready", "alive"]))
@click.argument("location", metavar="DIR|URI")
@click.option("--worker", type=click.IntRange(min=0), help="Read this worker only.")
@click.option(
    "--hang-timeout", type=Seconds(),
    help="Longest time without a step, in seconds. Evaluations and callbacks count.",
)  # fmt: skip
@click.option(
    "--total-steps", type=click.IntRange(min=1), help="Steps of the complete training."
)
@click.option(
    "--progress-file", type=click.Path(dir_okay=False, path_type=Path),
    help="File to write with the progress, as JSON.",
)  # fmt: skip
@click.option("--trainjob", is_flag=True, help="Send the progress to Kubeflow Trainer.")
def probe(
    condition: str,
    location: str,
    worker: int | None,
    hang_timeout: float | None,
    total_steps: int | None,
    progress_file: Path | None,
    trainjob: bool,
) -> None:
    """Answer a probe of the container that trains, from the workers' status files.

    The command must run in the container of the workers, as the probes of Kubernetes
    do. DIR or URI is the checkpoint directory.

    \b
    ready  a worker of this container has begun its first step, and trains
    alive  also before the first step, and after the end of training
    In both cases, no worker that trains has been silent for 30 s, or has made no step
    for --hang-timeout.

    The progress of a worker is reported while it trains. An error of the report is
    printed, and does not change the exit status.

    \b
    Exit status:
      0  this container is ready, or alive
      1  it is not
      2  the command line is invalid
    """
    try:
        training = list(training_workers(find_journal(location), worker))
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from error
    problems = [text for now in training if (text := problem(now, hang_timeout))]
    if condition == "ready" and not training:
        problems = ["no worker of this container trains"]
    for now in () if problems else training:
        status = trainer_status(now, total_steps)
        try:
            if progress_file is not None:
                replace(str(progress_file), f"{json.dumps(status)}\n".encode())
            if trainjob and now.worker == 0:
                send_progress(status)
        except (OSError, KeyError) as error:
            echo(f"the progress was not reported: {error!r}", err=True)
    states = [f"worker {now.worker}: {now.doing}, step {now.step}" for now in training]
    echo("; ".join(problems or states or ["no worker of this container trains"]))
    raise SystemExit(1 if problems else 0)
