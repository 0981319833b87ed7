"""`tfpreempt demo`: trains through real preemptions, and checks for lost steps."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
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
from tfpreempt.cli.signal_handling import ENDS
from tfpreempt.cli.tables import Console
from tfpreempt.cli.terminal import echo
from tfpreempt.core import lazy_import
from tfpreempt.errors import (
    ConfigurationError,
    TensorFlowMissingError,
    TfpreemptError,
)

# For every backend of the demo, the packages that must be installed.
BACKENDS = {"tensorflow": ("tensorflow",), "jax": ("jax", "keras")}


@click.command()
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default="demo-out",
    show_default=True,
    help="Directory for logs, journals, checkpoints and weights. Every call makes a "
    "new folder there.",
)  # fmt: skip
@click.option(
    "--backend", type=click.Choice(list(BACKENDS)),
    help="Train on TensorFlow or on JAX (default: TensorFlow if it is installed, "
    "otherwise JAX).",
)  # fmt: skip
@click.option(
    "--workers", type=click.IntRange(1, 16),
    help="Number of worker processes (default: 2; with --keras on JAX, always 1).",
)  # fmt: skip
@click.option(
    "--preemptions", type=click.IntRange(0), default=3, show_default=True,
    help="Number of preemptions, at random steps, of a random worker or all workers.",
)  # fmt: skip
@click.option(
    "--seed", type=click.IntRange(0), default=lambda: random.randrange(2**31),
    help="Seed of the initial weights, the preempted workers and the steps of the "
    "preemptions (default: a random seed).",
)  # fmt: skip
@click.option(
    "--steps", type=click.IntRange(1), default=1_000, show_default=True,
    help="Number of training steps.",
)  # fmt: skip
@click.option(
    "--keras", is_flag=True,
    help="Train by model.fit with PreemptionCallback (default: a custom loop with the "
    "handler).",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def demo(
    out: Path,
    backend: str | None,
    workers: int | None,
    preemptions: int,
    seed: int,
    steps: int,
    keras: bool,
    as_json: bool,
) -> None:
    """Train on handwritten digits through real preemptions, and compare the weights.

    A small convolutional network trains on local worker processes, which are connected
    by MultiWorkerMirroredStrategy of TensorFlow or by jax.distributed. SIGTERM is sent
    to the workers at random steps; at every preemption all workers agree on a step,
    commit it, exit and are restarted. Then the same model is trained once without
    interruption, and the final weights are compared byte for byte.

    Exit status 1 if a step was lost, the weights differ, or a preemption made no
    commit.
    """
    began, way = time.monotonic(), "fit" if keras else "loop"
    if keras and steps % EPOCH_STEPS:
        raise click.ClickException(
            f"--steps {steps} with --keras: model.fit trains complete epochs "
            f"of {EPOCH_STEPS} steps. Use a multiple of {EPOCH_STEPS}."
        )
    try:
        backend = _choose_backend(backend)
        workers = workers or (1 if keras and backend == "jax" else 2)
        if keras and backend == "jax" and workers > 1:
            raise ConfigurationError(
                f"--workers {workers} with --keras on JAX: tfpreempt supports "
                "model.fit on JAX in one process. Omit --workers, or --keras."
            )
        drawn = draw_preemptions(preemptions, workers=workers, steps=steps, seed=seed)
        directory = _fresh_directory(out)
        # Make these signals end the demo as Ctrl-C does: with the supervisor and the
        # workers.
        for number in ENDS:
            # An ignored signal stays ignored, as under nohup.
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, lambda number, _: sys.exit(128 + number))
        echo(f"{backend}, seed {seed}, files in {directory}", err=True)
        folders = [directory / name for name in ("interrupted", "uninterrupted")]
        for folder, planned in zip(folders, (drawn, ()), strict=True):
            command = supervised(
                backend, folder, workers, len(planned), way, steps, seed
            )
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
        verdict = "The demo failed." if faults else "No step was lost."
        echo(f"{verdict} {seconds} s, seed {seed}, files in {directory}")
        is_module = os.path.basename(sys.argv[0]) == "__main__.py"
        called = ["python", "-m", "tfpreempt"] if is_module else [sys.argv[0]]
        report = [*called, "report", str(folders[0] / "checkpoints")]
        echo(f"Time per phase: {shlex.join(report)}")
    for fault in faults:
        echo(f"Error: {fault}", err=True)
    sys.exit(bool(faults))


def _choose_backend(asked: str | None) -> str:
    """Returns the requested backend, or the first whose packages are installed.

    Raises:
        ConfigurationError: packages are not installed.
    """
    for backend in [asked] if asked else BACKENDS:
        if all(map(importlib.util.find_spec, BACKENDS[backend])):
            return backend
    if asked == "jax":
        raise ConfigurationError(
            "The demo on JAX needs JAX and Keras, and at least one of them is not "
            f"installed. Install both with: {lazy_import.to_install('jax,demo')}"
        )
    other = f"To run on JAX: {lazy_import.to_install('jax,demo')}."
    raise TensorFlowMissingError(f"The demo {lazy_import.WANTED} {other}")


def _fresh_directory(out: Path) -> Path:
    """Creates a new folder in `out`, so that the files of earlier demos stay.

    Returns:
        The path of the folder.

    Raises:
        ConfigurationError: no folder can be created, or scikit-learn is missing.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise ConfigurationError(
            "The demo needs the handwritten digits of scikit-learn, which is not "
            f"installed. Install it with: {lazy_import.to_install('demo')}"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        name = time.strftime("%m%d-%H%M-")
        return Path(tempfile.mkdtemp(prefix=name, dir=out.resolve()))
    except OSError as error:
        raise ConfigurationError(
            f"--out {out}: cannot create a folder there ({error}). Name a writable "
            "directory."
        ) from error


def _table(result: Result) -> Table:
    """Returns the table printed at the end of the demo."""
    table = Table("", "", title="Cost of the preemptions", show_header=False)
    for number, seconds in enumerate(result.notice_to_commit_seconds, start=1):
        table.add_row(f"preemption {number}: notice to commit", f"{seconds:.3f} s")
    table.add_row("steps lost", str(result.steps_lost))
    table.add_row("restarts", str(result.restarts))
    table.add_row("final accuracy", f"{result.final_accuracy:.1%}")
    is_same = "yes" if result.bit_identical else "NO"
    table.add_row("final weights byte-identical", is_same)
    return table
