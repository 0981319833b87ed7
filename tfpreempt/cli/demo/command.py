"""`tfpreempt demo`: trains through real preemptions and shows that nothing was lost."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import random
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path

import click
from rich.table import Table

from tfpreempt.cli.demo.job import EPOCH_STEPS, draw_preemptions, supervised, train
from tfpreempt.cli.demo.result import Result, assess
from tfpreempt.cli.signals import ENDS
from tfpreempt.cli.tables import Console
from tfpreempt.cli.terminal import echo
from tfpreempt.core import loading
from tfpreempt.errors import (
    ConfigurationError,
    TensorFlowMissingError,
    TfpreemptError,
)


@click.command()
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default="demo-out",
    show_default=True,
    help="Directory for logs, journals, checkpoints and weights; each call makes a "
    "folder of its own in it.",
)  # fmt: skip
@click.option(
    "--workers", type=click.IntRange(1, 16), default=2, show_default=True,
    help="Worker processes.",
)  # fmt: skip
@click.option(
    "--preemptions", type=click.IntRange(0), default=3, show_default=True,
    help="Preemptions, at random steps, of a random worker or of all.",
)  # fmt: skip
@click.option(
    "--seed", type=click.IntRange(0), default=lambda: random.randrange(2**31),
    help="Draws the first weights, and which worker is preempted at which step; a "
    "new one each time if not given.",
)  # fmt: skip
@click.option(
    "--steps", type=click.IntRange(1), default=1_000, show_default=True,
    help="Training steps.",
)  # fmt: skip
@click.option(
    "--keras", is_flag=True,
    help="Train by model.fit with the callback; otherwise a loop of one's own.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON, not a table.")
def demo(
    out: Path,
    workers: int,
    preemptions: int,
    seed: int,
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
    began, way = time.monotonic(), "fit" if keras else "loop"
    if keras and steps % EPOCH_STEPS:
        raise click.ClickException(
            f"--steps {steps} with --keras: model.fit trains whole epochs, of "
            f"{EPOCH_STEPS} steps here. Give a multiple of {EPOCH_STEPS}."
        )
    try:
        drawn = draw_preemptions(preemptions, workers=workers, steps=steps, seed=seed)
        directory = _fresh_directory(out)
        # These end the demo as Ctrl-C does, with its supervisor and workers.
        for number in ENDS:
            if signal.getsignal(number) is signal.SIG_DFL:  # not ignored, as by nohup
                signal.signal(number, lambda number, _: sys.exit(128 + number))
        echo(f"seed {seed}, files in {directory}", err=True)
        folders = [directory / name for name in ("interrupted", "uninterrupted")]
        for folder, planned in zip(folders, (drawn, ()), strict=True):
            command = supervised(folder, workers, len(planned), way, steps, seed)
            train(folder, command, planned)
        result = assess(folders, workers, steps)
    except TfpreemptError as error:
        raise click.ClickException(str(error)) from error
    seconds = round(time.monotonic() - began, 1)
    faults = result.faults(preemptions)
    if as_json:
        more = {"seed": seed, "directory": str(directory), "seconds": seconds}
        echo(json.dumps({**dataclasses.asdict(result), **more}))
    else:
        Console().print(_table(result))
        verdict = "Something was lost." if faults else "Nothing was lost."
        echo(f"{verdict} {seconds} s, seed {seed}, files in {directory}")
        report = [sys.argv[0], "report", str(folders[0] / "checkpoints")]
        echo(f"Where the time went: {shlex.join(report)}")
    for fault in faults:
        echo(f"Error: {fault}", err=True)
    sys.exit(bool(faults))


def _fresh_directory(out: Path) -> Path:
    """A new folder in `out`: a demo neither resumes nor deletes an earlier one.

    Raises:
        ConfigurationError: none can be made, or there is nothing to train on.
    """
    if not loading.has_tensorflow():
        raise TensorFlowMissingError(f"The demo {loading.WANTED}")
    if importlib.util.find_spec("sklearn") is None:
        raise ConfigurationError(
            "The demo trains on the handwritten digits that come with scikit-learn, "
            f"which is not installed. Install it with: {loading.to_install('demo')}"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        name = time.strftime("%m%d-%H%M-")
        return Path(tempfile.mkdtemp(prefix=name, dir=out.resolve()))
    except OSError as error:
        raise ConfigurationError(
            f"--out {out}: no folder can be made there ({error}). Name a directory "
            "that can be written to."
        ) from error


def _table(result: Result) -> Table:
    """The closing table."""
    table = Table("", "", title="What the preemptions cost", show_header=False)
    for number, seconds in enumerate(result.notice_to_commit_seconds, start=1):
        table.add_row(f"preemption {number}: notice to commit", f"{seconds:.3f} s")
    table.add_row("steps lost", str(result.steps_lost))
    table.add_row("restarts", str(result.restarts))
    table.add_row("final accuracy", f"{result.final_accuracy:.1%}")
    is_same = "yes" if result.bit_identical else "NO"
    table.add_row("final weights byte-identical", is_same)
    return table
