"""Asks scontrol whether Slurm would requeue the job."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from collections.abc import Mapping
from typing import Literal

from tfpreempt.platforms.slurm import RunCommand, run_scontrol

ANSWER_SECONDS = 5.0

Requeue = Literal["exit", "scontrol"]
"""The values of `SlurmTerminationConfig(requeue=)`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlurmState:
    """The facts that decide whether Slurm requeues the job.

    Attributes:
        requeue: argument `requeue` of the config.
        requeued_codes: exit codes in RequeueExit. A job that exits with one of these
            codes is requeued.
        held_codes: exit codes in RequeueExitHold. A job that exits with one of these
            codes is requeued, but waits until a user releases the job.
        may_requeue: whether `scontrol requeue`, or the end of a failed node, may
            requeue the job (sbatch --requeue). Without a job, this is the default of
            the cluster. None if unknown.
        is_batch: whether the job was submitted by sbatch; None without a job.
        fault: error message if scontrol failed; "" if it succeeded.
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
    """Asks the Slurm controller about its requeue settings and the current job.

    Args:
        environment: environment variables. Without SLURM_JOB_ID the function reads only
            the settings of the cluster.
        requeue: argument `requeue` of the config.
        run: function that runs scontrol; called at most twice.
    """
    job = environment.get("SLURM_JOB_ID", "").strip()
    try:
        config = _fields(run(["scontrol", "show", "config"], ANSWER_SECONDS), "\n")
        command = ["scontrol", "-o", "show", "job", job]
        own = _fields(run(command, ANSWER_SECONDS), " ") if job else {}
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
    """Returns the exit codes in a list such as "1,142-150"; skips malformed entries."""
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
    """Converts a flag of scontrol: "0" to False, another number to True, else None."""
    return text.strip("0") != "" if text.isascii() and text.isdecimal() else None
