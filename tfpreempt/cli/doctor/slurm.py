"""Asks scontrol whether Slurm would start this job again."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from collections.abc import Callable, Mapping
from typing import Literal

from tfpreempt.platforms.slurm import run_scontrol

ANSWER_SECONDS = 5.0

Requeue = Literal["exit", "scontrol"]
"""As `SlurmTerminationConfig(requeue=)`."""

RunCommand = Callable[[list[str], float], str]
"""Runs a command with a time limit; returns what it prints. Raises OSError or
subprocess.SubprocessError."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlurmState:
    """Whether Slurm starts the job again.

    Attributes:
        requeue: how the config means to be requeued.
        requeued_codes: exit codes on which the controller requeues (RequeueExit).
        held_codes: those on which it does and then holds the job (RequeueExitHold).
        may_requeue: whether `scontrol requeue` and a node that fails requeue this job
            (sbatch's --requeue), or by default any job; None where nobody says.
        is_batch: whether this job is sbatch's; None where no job was asked for.
        fault: why the controller could not be asked; "" if it was.
    """

    requeue: Requeue
    requeued_codes: tuple[int, ...] = ()
    held_codes: tuple[int, ...] = ()
    may_requeue: bool | None = None
    is_batch: bool | None = None
    fault: str = ""


def ask_slurm(
    environment: Mapping[str, str], requeue: Requeue, run: RunCommand = run_scontrol
) -> SlurmState:
    """What the controller says of requeues, and of this job.

    Args:
        environment: Slurm's variables; without SLURM_JOB_ID no job is asked for.
        requeue: as the config has it.
        run: runs scontrol, twice at most.
    """
    job = environment.get("SLURM_JOB_ID", "").strip()
    try:
        config = _fields(run(["scontrol", "show", "config"], ANSWER_SECONDS), "\n")
        told = ["scontrol", "-o", "show", "job", job]
        own = _fields(run(told, ANSWER_SECONDS), " ") if job else {}
    except subprocess.CalledProcessError as error:
        fault = (error.stderr or "").strip() or str(error)
        return SlurmState(requeue=requeue, fault=fault.splitlines()[-1])
    except (OSError, subprocess.SubprocessError) as error:
        return SlurmState(requeue=requeue, fault=str(error))
    return SlurmState(
        requeue=requeue,
        requeued_codes=parse_codes(config.get("RequeueExit", "")),
        held_codes=parse_codes(config.get("RequeueExitHold", "")),
        may_requeue=_flag(own.get("Requeue", config.get("JobRequeue", ""))),
        is_batch=_flag(own.get("BatchFlag", "")),
    )


def parse_codes(text: str) -> tuple[int, ...]:
    """The exit codes of a line such as "1,142-150"; none of what is no number."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,3})(?:-(\d{1,3}))?\s*", part)
        if match:
            found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(found))


def _fields(text: str, separator: str) -> dict[str, str]:
    pairs = (entry.partition("=") for entry in text.split(separator))
    return {name.strip(): value.strip() for name, sign, value in pairs if sign}


def _flag(text: str) -> bool | None:
    """A number that is 0 or not; None where nobody says."""
    return text.strip("0") != "" if text.isascii() and text.isdecimal() else None
