"""`tfpreempt demo`: trains through real preemptions and shows that nothing was lost."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click
from rich.console import Console

from tfpreempt.cli.demo.job import Job, demo_command
from tfpreempt.cli.demo.plan import (
    EPOCH_STEPS,
    STEPS,
    Strike,
    Striker,
    draw_strikes,
)
from tfpreempt.cli.demo.result import Result, assess
from tfpreempt.cli.demo.view import result_table, show_progress
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
    "--steps", type=click.IntRange(1), default=STEPS, show_default=True,
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
        strikes = draw_strikes(
            workers=workers, preemptions=preemptions, seed=seed, steps=steps
        )
        if keras:
            _require_whole_epochs(steps)
        _require_scikit_learn()
        directory = _fresh_directory(out)
        console.print(f"seed {seed}, files in {directory}", highlight=False)
        with _left_by_sigterm():
            result = _run(console, directory, strikes, workers, steps, seed, keras)
    except TfpreemptError as error:
        raise click.ClickException(str(error)) from error
    seconds = round(time.monotonic() - began, 1)
    _report(result, as_json, seed=seed, directory=directory, seconds=seconds)


@contextlib.contextmanager
def _left_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the demo as Ctrl-C does, with its supervisor and workers."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _run(
    console: Console,
    directory: Path,
    strikes: tuple[Strike, ...],
    workers: int,
    steps: int,
    seed: int,
    keras: bool,
) -> Result:
    """Trains twice, once struck and once left alone, and compares."""
    jobs = {"interrupted": strikes, "uninterrupted": ()}
    for title, planned in jobs.items():
        command = demo_command(
            directory / title,
            workers=workers,
            steps=steps,
            seed=seed,
            preemptions=len(planned),
            keras=keras,
        )
        job = Job(directory / title, command, workers)
        with job, show_progress(console, title, steps) as show:
            job.watch(Striker(planned), show)
    return assess(
        *(directory / title for title in jobs),
        workers=workers,
        steps=steps,
        asked=len(strikes),
    )


def _report(
    result: Result, as_json: bool, *, seed: int, directory: Path, seconds: float
) -> None:
    """Prints the outcome; exits with 1 if anything was lost or differs."""
    failures = result.failures()
    if as_json:
        more = {"seed": seed, "directory": str(directory), "seconds": seconds}
        click.echo(json.dumps({**result.to_json(), **more}))
    else:
        Console().print(result_table(result))
        verdict = "Nothing was lost." if not failures else "Something was lost."
        click.echo(f"{verdict} {seconds} s, seed {seed}, files in {directory}")
    for failure in failures:
        click.echo(f"Error: {failure}", err=True)
    if failures:
        raise SystemExit(1)


def _require_whole_epochs(steps: int) -> None:
    """Says before any process is started what `model.fit` can't do."""
    if steps % EPOCH_STEPS:
        raise ConfigurationError(
            f"--steps {steps} with --keras: model.fit trains whole epochs, of "
            f"{EPOCH_STEPS} steps here. Give a multiple of {EPOCH_STEPS}."
        )


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
        for number in range(1, 10_000):
            directory = out.resolve() / f"run-{number}"
            try:
                directory.mkdir()
            except FileExistsError:
                continue
            return directory
    except OSError as error:
        raise ConfigurationError(
            f"--out {out}: no folder can be made there ({error}). Name a directory "
            "that can be written to."
        ) from error
    raise ConfigurationError(f"--out {out} holds 9,999 runs already. Name another.")
