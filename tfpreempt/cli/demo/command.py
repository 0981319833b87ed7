"""`tfpreempt demo`: trains through real preemptions and shows that nothing was lost."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from tfpreempt.cli.demo.job import (
    Plan,
    Trained,
    draw_plan,
    supervised,
    train,
)
from tfpreempt.cli.demo.result import Result, assess
from tfpreempt.errors import ConfigurationError, TfpreemptError


@click.command()
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("demo-out"),
    show_default=True,
    help="Directory for logs, journals, checkpoints and weights; each call makes a "
    "folder of its own in it.",
)
@click.option(
    "--workers", type=click.IntRange(1, 16), default=2, show_default=True,
    help="Worker processes.",
)  # fmt: skip
@click.option(
    "--preemptions", type=click.IntRange(0), default=3, show_default=True,
    help="Preemptions, at random steps, of a random worker or of all.",
)  # fmt: skip
@click.option(
    "--seed", type=click.IntRange(0), default=None,
    help="Draws steps, victims and weights; a new one each time if not given.",
)  # fmt: skip
@click.option(
    "--steps", type=click.IntRange(1), default=1_000, show_default=True,
    help="Training steps.",
)  # fmt: skip
@click.option(
    "--keras", is_flag=True,
    help="Train by model.fit with the callback; otherwise a loop of one's own.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object only.")
def demo(
    out: Path,
    workers: int,
    preemptions: int,
    seed: int | None,
    steps: int,
    keras: bool,
    as_json: bool,
) -> None:
    """Train on handwritten digits through real preemptions, and compare.

    A small convolutional network trains with MultiWorkerMirroredStrategy on local
    worker processes. Real SIGTERMs hit them at random steps; each time all workers
    agree on a step, commit it, exit and are started again. Then the same model is
    trained once without interruption, and the final weights are compared byte for
    byte. Exit status 1 if anything was lost or differs.
    """
    if seed is None:
        seed = random.SystemRandom().randrange(2**31)
    began = time.monotonic()
    console = Console(stderr=True, quiet=as_json)
    try:
        plan = draw_plan(
            way="fit" if keras else "loop",
            workers=workers,
            steps=steps,
            seed=seed,
            preemptions=preemptions,
        )
        _require_scikit_learn()
        directory = _fresh_directory(out)
        console.print(f"seed {seed}, files in {directory}", highlight=False)
        # SIGTERM ends the demo as Ctrl-C does, with its supervisor and workers.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        result = _train_twice(console, directory, plan)
    except TfpreemptError as error:
        raise click.ClickException(str(error)) from error
    seconds = round(time.monotonic() - began, 1)
    failures = result.failures()
    if as_json:
        more = {"seed": seed, "directory": str(directory), "seconds": seconds}
        click.echo(json.dumps({**result.to_json(), **more}))
    else:
        Console().print(_table(result))
        verdict = "Nothing was lost." if not failures else "Something was lost."
        click.echo(f"{verdict} {seconds} s, seed {seed}, files in {directory}")
    for failure in failures:
        click.echo(f"Error: {failure}", err=True)
    sys.exit(bool(failures))


def _require_scikit_learn() -> None:
    """Says what is missing before any process is started."""
    if importlib.util.find_spec("sklearn") is None:
        raise ConfigurationError(
            "The demo trains on the handwritten digits that come with scikit-learn, "
            "which is not installed. Install it with: pip install 'tfpreempt[demo]', "
            "or, in a clone, pip install '.[demo]'"
        )


def _fresh_directory(out: Path) -> Path:
    """A new folder in `out`: a demo neither resumes nor deletes an earlier one."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        name = time.strftime("%m%d-%H%M-")
        return Path(tempfile.mkdtemp(prefix=name, dir=out.resolve()))
    except OSError as error:
        raise ConfigurationError(
            f"--out {out}: no folder can be made there ({error}). Name a directory "
            "that can be written to."
        ) from error


def _train_twice(console: Console, directory: Path, plan: Plan) -> Result:
    """Trains with preemptions and without, and compares."""
    folders = [directory / name for name in ("interrupted", "uninterrupted")]
    trained: dict[Path, list[Trained]] = {}
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress("{task.description}", *columns, console=console) as bar:
        for folder, planned in zip(folders, (plan.preemptions, ()), strict=True):
            command = supervised(folder, plan, max_preemptions=len(planned))
            task = bar.add_task(folder.name, total=plan.steps)
            trained[folder] = []
            job = train(folder, command, plan.workers, planned)
            with contextlib.closing(job):
                for new in job:
                    trained[folder] += new
                    last = max(new, key=lambda each: each.step)
                    told = f"loss {last.loss:.4f}, restarts {last.restart}"
                    text = f"{folder.name:<13} {told}"
                    bar.update(task, completed=last.step + 1, description=text)
    return assess(folders, trained[folders[0]], plan)


def _table(result: Result) -> Table:
    """The closing table."""
    table = Table("", "", title="What the preemptions cost", show_header=False)
    for number, each in enumerate(result.preemptions, start=1):
        names = ", ".join(map(str, each.notified))
        table.add_row(
            f"preemption {number}: worker(s) {names}, committed step {each.step}",
            f"notice to commit {each.notice_to_commit_seconds:.3f} s",
        )
    table.add_row("steps lost", str(result.steps_lost))
    table.add_row("restarts", str(result.restarts))
    table.add_row("final accuracy", f"{result.final_accuracy:.1%}")
    identical = "yes" if result.bit_identical else "NO"
    table.add_row("final weights byte-identical", identical)
    return table
