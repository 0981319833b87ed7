"""Asks scontrol whether Slurm would start this job again."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping

from tfpreempt.cli.doctor.facts import Requeue, SlurmState
from tfpreempt.platforms.slurm import run_scontrol

ANSWER_SECONDS = 5.0

RunCommand = Callable[[list[str], float], str]
"""Runs a command with a time limit; returns what it prints. Raises OSError or
subprocess.SubprocessError."""


def ask_slurm(
    environment: Mapping[str, str], requeue: Requeue, run: RunCommand | None = None
) -> SlurmState:
    """What the controller says of requeues, and of this job.

    Args:
        environment: Slurm's variables; without SLURM_JOB_ID no job is asked for.
        requeue: as the config has it.
        run: runs scontrol, twice at most.
    """
    run = run_scontrol if run is None else run
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


def parse_codes(text: str) -> frozenset[int]:
    """The exit codes of a line such as "1,142-150"; none of what is no number."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,3})(?:-(\d{1,3}))?\s*", part)
        if match:
            found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)


def _fields(text: str, separator: str) -> dict[str, str]:
    pairs = (entry.partition("=") for entry in text.split(separator))
    return {name.strip(): value.strip() for name, sign, value in pairs if sign}


def _flag(text: str) -> bool | None:
    """A number that is 0 or not; None where nobody says."""
    return bool(int(text)) if text.isdecimal() else None
