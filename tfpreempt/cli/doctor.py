"""`tfpreempt doctor`: would a preemption lose work here?"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from tfpreempt.cli._doctor_facts import Facts, Level, Requeue
from tfpreempt.cli._doctor_slurm import ask_slurm
from tfpreempt.cli._doctor_sources import probe_sources
from tfpreempt.cli._doctor_storage import try_save
from tfpreempt.cli._doctor_verdict import assess
from tfpreempt.cli._doctor_view import show, to_json
from tfpreempt.errors import ConfigurationError, TfpreemptError
from tfpreempt.platforms.detect import VARIABLE, detect_platform

_SIZE = "256MiB"
_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


class _Size(click.ParamType[int]):
    """A number of bytes, such as 1GiB."""

    name = "size"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", str(value).strip())
        unit = _UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None or float(match[1]) * unit < 1:
            self.fail(f"{value!r} is no size. Write it like 256MiB or 1.5GB.", param)
        return int(float(match[1]) * unit)


@click.command()
@click.argument("directory", required=False)
@click.option(
    "--size", type=_Size(), default=_SIZE, show_default=True,
    help="Size of the save to try: about that of one of your checkpoints.",
)  # fmt: skip
@click.option(
    "--platform", "name",
    help=f"Look at this platform instead of the one that is detected; as {VARIABLE}.",
)  # fmt: skip
@click.option(
    "--grace", type=click.FloatRange(min=0),
    help="Seconds that a notice leaves, as grace_period= of the config.",
)  # fmt: skip
@click.option(
    "--requeue", type=click.Choice(["exit", "scontrol"]),
    help="On Slurm: how the job is requeued, as requeue= of the config (exit).",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object only.")
def doctor(
    directory: str | None,
    size: int,
    name: str | None,
    grace: float | None,
    requeue: Requeue | None,
    as_json: bool,
) -> None:
    """Look whether a preemption would lose work here.

    Prints which platform this is and why, which notices can be seen here and how long
    each leaves, whether Slurm starts the job again, and how long a save takes in
    DIRECTORY, where a file of --size is written down to the disk and removed again. Run
    it where the training will run, in the same container. Exit status 1 if a preemption
    would lose work or end the job.
    """
    try:
        facts = _gather(directory, size, name, grace, requeue)
    except TfpreemptError as error:
        raise click.ClickException(str(error)) from error
    findings = assess(facts)
    if as_json:
        click.echo(json.dumps(to_json(facts, findings)))
    else:
        show(Console(), facts, findings)
    if any(each.level is Level.PROBLEM for each in findings):
        raise SystemExit(1)


def _gather(
    directory: str | None,
    size: int,
    name: str | None,
    grace: float | None,
    requeue: Requeue | None,
) -> Facts:
    if directory is not None and "://" in directory:
        raise ConfigurationError(
            f"{directory!r} is no local path. Name the directory that the training "
            "commits to; what is mirrored from there to object storage can wait"
        )
    chosen = {} if name is None else {VARIABLE: name}
    platform = detect_platform(environment={**os.environ, **chosen})
    is_slurm = platform.name == "slurm"
    if requeue is not None and not is_slurm:
        raise ConfigurationError(
            f"--requeue {requeue} is for Slurm, and this is {platform.name}. Leave it "
            "out, or name the platform: --platform slurm"
        )
    options: dict[str, Any] = {} if grace is None else {"grace_period": grace}
    if requeue is not None:
        options["requeue"] = requeue
    config = platform.termination_config(**options)
    return Facts(
        platform=platform,
        sources=probe_sources(config.watched_sources()),
        storage=None if directory is None else try_save(Path(directory), size),
        slurm=ask_slurm(os.environ, requeue or "exit") if is_slurm else None,
    )
