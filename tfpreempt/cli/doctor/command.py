"""`tfpreempt doctor`: checks the readiness of a machine for preemptions."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from tfpreempt.cli.doctor.slurm_settings import Requeue, ask_slurm
from tfpreempt.cli.doctor.sources import probe_sources
from tfpreempt.cli.doctor.storage_check import try_save
from tfpreempt.cli.doctor.verdict import DoctorFinding, DoctorFindings, Level, assess
from tfpreempt.cli.journals.tail import JournalTailer
from tfpreempt.cli.sizes import Seconds, Size
from tfpreempt.cli.tables import Console
from tfpreempt.cli.terminal import echo
from tfpreempt.core import private_api
from tfpreempt.core.clock import SystemClock
from tfpreempt.core.journal import journal_directory
from tfpreempt.errors import ConfigurationError, TfpreemptError
from tfpreempt.platforms.detect import VARIABLE, VARIANTS, detect_platform
from tfpreempt.storage import paths

_STYLES = {Level.OK: "green", Level.ADVICE: "yellow", Level.PROBLEM: "red"}


@click.command()
@click.argument("directory", required=False)
@click.option(
    "--size", type=Size(), default="256MiB", show_default=True,
    help="Size of the trial save: about the size of your checkpoints, such as 2G (GiB) "
    "or 1.5GB.",
)  # fmt: skip
@click.option(
    "--platform", "name", type=click.Choice(sorted(VARIANTS)), metavar="NAME",
    help="Platform to check instead of the detected platform; same values as "
    f"{VARIABLE}: {', '.join(VARIANTS)}.",
)  # fmt: skip
@click.option(
    "--grace", type=Seconds(),
    help="Grace period in seconds, as grace_period= of the config.",
)  # fmt: skip
@click.option(
    "--requeue", type=click.Choice(["exit", "scontrol"]),
    help="On Slurm: how the job is requeued, as requeue= of the config (default exit).",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object only.")
def doctor(as_json: bool, **given: Any) -> None:
    """Check that this machine is ready for preemptions.

    Prints the detected platform and the evidence for it, the notice sources that work
    here and their grace periods, whether Slurm would requeue the job, how long a save
    takes in DIRECTORY, and whether tfpreempt is tested with the installed versions of
    TensorFlow, Keras and JAX. The trial save writes a file of --size to the disk and
    removes it again. Run the command where the training will run, in the same
    container.

    Exit status 1 if a preemption would lose work or end the job.
    """
    try:
        facts = _gather(**given)
        findings = assess(facts)
    except TfpreemptError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        echo(json.dumps(_to_json(facts, findings), default=str))
    else:
        _show(Console(), facts, findings)
    raise SystemExit(any(each.level is Level.PROBLEM for each in findings))


def _gather(
    directory: str | None,
    size: int,
    name: str | None,
    grace: float | None,
    requeue: Requeue | None,
) -> DoctorFindings:
    if directory is not None and "://" in directory:
        raise ConfigurationError(
            f"{paths.without_secrets(directory)!r} is a URL, and doctor tests only "
            "directories. Name the directory of the commits, such as /mnt/ckpt, or "
            "none if the training commits to object storage"
        )
    named = {} if name is None else {VARIABLE: name}
    platform = detect_platform(environment={**os.environ, **named})
    if name is not None:
        evidence = (f"--platform is {name!r}", *platform.evidence[1:])
        platform = dataclasses.replace(platform, evidence=evidence)
    is_slurm = platform.name == "slurm"
    if requeue is not None and not is_slurm:
        raise ConfigurationError(
            f"--requeue {requeue} is for Slurm, and this is {platform.name}. Omit the "
            "option, or name the platform: --platform slurm"
        )
    given = {"grace_period": grace, "requeue": requeue}
    options = {name: value for name, value in given.items() if value is not None}
    config = platform.termination_config(**options)
    return DoctorFindings(
        platform=platform,
        sources=probe_sources(config._notice_sources()),
        storage=None if directory is None else try_save(Path(directory), size),
        slurm=ask_slurm(os.environ, requeue or "exit") if is_slurm else None,
        step_seconds=None if directory is None else _step_seconds(directory),
        versions=_versions(),
        environment=os.environ,
    )


def _versions() -> dict[str, str]:
    """Returns the versions of the installed frameworks; imports no framework."""
    packages = metadata.packages_distributions()
    return {
        library: metadata.version(packages[library][0])
        for library in private_api.SEEN
        if library in packages
    }


def _step_seconds(directory: str) -> float | None:
    """Returns the newest mean step time in the journal of a checkpoint directory.

    Returns None if no step time was recorded.
    """
    journals = JournalTailer(journal_directory(directory), keeps_all=True)
    with contextlib.suppress(OSError):  # no journal, or no directory
        journals.read_on(SystemClock.wall())
    known = [each["step_seconds"] for each in journals.records("commit")]
    return next((seconds for seconds in reversed(known) if seconds), None)


def _show(
    console: Console, facts: DoctorFindings, findings: Sequence[DoctorFinding]
) -> None:
    """Prints the platform, the evidence for it, and the findings."""
    platform = facts.platform
    console.print(f"platform: [bold]{platform.name}[/bold]")
    for evidence in platform.evidence:
        console.print(f"  because {evidence}", markup=False)
    console.print(f"config: {platform.config_class.__name__}()")
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("")
    table.add_column("check", overflow="fold")
    table.add_column("grace\nperiod", justify="right")
    table.add_column("result", overflow="fold")
    for finding in findings:
        table.add_row(
            f"[{_STYLES[finding.level]}]{finding.level.value}[/]",
            escape(finding.about),
            "" if finding.grace_seconds is None else f"{finding.grace_seconds:g} s",
            escape(finding.text),
        )
    console.print(table)
    for finding in findings:
        if finding.code:
            console.print(f"\nCode for {finding.about}:", markup=False)
            console.out(finding.code)  # unwrapped, also on a narrow terminal


def _to_json(
    facts: DoctorFindings, findings: Sequence[DoctorFinding]
) -> dict[str, Any]:
    """Returns the results of the checks, and the findings, as values for JSON."""
    platform, storage, slurm = facts.platform, facts.storage, facts.slurm
    directory = storage and {
        **dataclasses.asdict(storage),
        "exists": storage.missing is None,
    }
    return {
        "platform": platform.name,
        "evidence": platform.evidence,
        "cloud": platform.cloud,
        "config": platform.config_class.__name__,
        "exit_code": platform.config_class.exit_code,
        "grace_seconds": facts.shortest_grace,
        "sources": [dataclasses.asdict(each) for each in facts.sources],
        "directory": directory,
        "slurm": slurm and dataclasses.asdict(slurm),
        "step_seconds": facts.step_seconds,
        "versions": facts.versions,
        "findings": [dataclasses.asdict(each) for each in findings],
        "is_fine": not any(each.level is Level.PROBLEM for each in findings),
    }
