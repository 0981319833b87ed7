"""Slurm: SIGTERM; a requeue is requested by the exit code or by scontrol."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable, Mapping
from typing import Literal

from typing_extensions import Unpack

from tfpreempt.core.arguments import Grace, check_grace
from tfpreempt.core.cluster import LOCAL, Cluster
from tfpreempt.core.restarts import read_count
from tfpreempt.errors import ConfigurationError
from tfpreempt.notice.signals import parse_signal
from tfpreempt.platforms.config import (
    ConfigOptions,
    TerminationConfig,
    check_code,
)

_logger = logging.getLogger(__name__)

KILL_WAIT = 30.0
"""Seconds from SIGTERM to SIGKILL: the default of KillWait in slurm.conf."""
SCONTROL_SECONDS = 10.0

RunCommand = Callable[[list[str], float], str]
"""Function that runs a command with a timeout in seconds; returns the output. It raises
OSError or subprocess.SubprocessError.

`scontrol requeue` has no output if the requeue succeeds.
"""


class SlurmTerminationConfig(TerminationConfig):
    """Config of a Slurm job that is preempted, or reaches its time limit.

    The process exits with code 143.

    Args:
        grace_period: seconds from SIGTERM to SIGKILL. For a preemption this is the
            GraceTime of the partition, for the time limit it is KillWait.
        early_signal: signal that sbatch has requested before the time limit, such as
            "SIGUSR1" for `sbatch --signal=USR1@120`. None: no early signal.
        early_grace_period: seconds from the early signal to the time limit: 120 in the
            example. (Slurm may send the signal up to 60 s earlier.)
        max_restarts: maximum number of restarts (SLURM_RESTART_COUNT). After so many
            restarts, the next notice ends the job without another restart. None: no
            limit.
        exhausted_exit_code: exit code at a notice after `max_restarts` restarts; it
            replaces other exit codes and `exit_fn`. RequeueExit in slurm.conf must not
            list the code.
        requeue: way in which a requeue is requested. "exit": by exit code 143, if
            slurm.conf has `RequeueExit=143`. "scontrol": the chief (without a cluster:
            Slurm's first task) calls `scontrol requeue` immediately before the exit.
            This needs no setting in slurm.conf, and kills processes that still run. In
            both cases the job is not requeued if the process exits with
            `uncommitted_exit_code` or `mirror_incomplete_exit_code`.
        environment: environment variables; by default os.environ.
        run_command: function that runs scontrol; tests pass another function.
        **options: further arguments of `TerminationConfig`.

    Raises:
        ConfigurationError: an argument or an environment variable is invalid.
    """

    def __init__(
        self,
        *,
        grace_period: Grace = KILL_WAIT,
        early_signal: str | int | None = None,
        early_grace_period: Grace = None,
        max_restarts: int | None = None,
        exhausted_exit_code: int = 1,
        requeue: Literal["exit", "scontrol"] = "exit",
        environment: Mapping[str, str] | None = None,
        run_command: RunCommand | None = None,
        **options: Unpack[ConfigOptions],
    ) -> None:
        super().__init__(grace_period=grace_period, **options)
        if early_signal is None and early_grace_period is not None:
            raise ConfigurationError(
                f"early_grace_period is {early_grace_period!r}, and early_signal is "
                "missing; expected the signal of sbatch's --signal too, such as "
                "early_signal='SIGUSR1', or neither argument"
            )
        early_grace = check_grace(early_grace_period, "early_grace_period")
        if early_signal is not None:
            self._signals.append((parse_signal(early_signal), early_grace))
        self._environment = os.environ if environment is None else environment
        self._is_exhausted = _is_exhausted(max_restarts, self._environment)
        check_code("exhausted_exit_code", exhausted_exit_code, self.exit_code)
        self._exhausted_code = exhausted_exit_code
        self._requeued_job = _job_to_requeue(requeue, self._environment)
        self._run_command = run_scontrol if run_command is None else run_command

    def _exit_code_for(self, committed: bool, mirrored: bool = True) -> int | None:
        """Returns `exhausted_exit_code` after `max_restarts` restarts.

        Before, returns the exit code of the base class.
        """
        if self._is_exhausted:
            return self._exhausted_code
        return super()._exit_code_for(committed, mirrored)

    def _exit(
        self, committed: bool, cluster: Cluster = LOCAL, *, mirrored: bool = True
    ) -> None:
        """Requeues the job if `requeue="scontrol"`, and exits.

        After `max_restarts` restarts the job is not requeued. The arguments are those
        of the base class.
        """
        if self._is_exhausted:
            _logger.warning(
                "SLURM_RESTART_COUNT is %s, and max_restarts allows no more restarts; "
                "exiting with code %d, which does not requeue the job. To resume from "
                "the last commit, submit the job again, or raise max_restarts",
                self._environment.get("SLURM_RESTART_COUNT"),
                self._exhausted_code,
            )
        try:
            super()._exit(committed, cluster, mirrored=mirrored)
        except SystemExit:
            # Requeue only here: if an exit_fn returns, training continues, and a
            # requeue would kill the job.
            job = None if self._is_exhausted else self._requeued_job
            task = self._environment.get("SLURM_PROCID", "").strip()
            speaks = cluster.is_chief if cluster.num_workers > 1 else task in {"", "0"}
            if job is not None and speaks:
                self._requeue(job, self._exit_code_for(committed, mirrored))
            raise

    def _requeue(self, job: str, code: int | None) -> None:
        command = ["scontrol", "requeue", job]
        shown = " ".join(command)
        # The code is None if exit_fn chooses the code; then the job is requeued, too.
        if code not in (None, self.exit_code):
            _logger.warning(
                "nothing was committed, or the mirror is incomplete; exiting with code "
                "%s as configured, which does not requeue the job. To resume from the "
                "last commit, submit the job again, or call `%s` while Slurm knows the "
                "job",
                code,
                shown,
            )
            return
        _logger.info("requeueing the job: %s", shown)
        try:
            output = self._run_command(command, SCONTROL_SECONDS)
        except Exception as error:  # noqa: BLE001 - the exit code must not change
            why = getattr(error, "stderr", None) or error
            output = f"{type(error).__name__}: {why}"
        if output := output.strip():
            _logger.warning(
                "`%s` failed (%s). The exit code requeues the job only if RequeueExit "
                "in slurm.conf lists the code; otherwise call `%s` by hand",
                shown,
                output,
                shown,
            )


def _is_exhausted(max_restarts: int | None, environment: Mapping[str, str]) -> bool:
    if max_restarts is None:
        return False
    whole = isinstance(max_restarts, int) and not isinstance(max_restarts, bool)
    if not whole or max_restarts < 0:
        raise ConfigurationError(
            f"max_restarts is {max_restarts!r}; expected an integer of 0 or more, or "
            "None for no limit"
        )
    count = read_count("SLURM_RESTART_COUNT", environment)
    return count is not None and count >= max_restarts


def _job_to_requeue(requeue: object, environment: Mapping[str, str]) -> str | None:
    """Returns the id of the job for `scontrol requeue`; None if `requeue` is "exit"."""
    if requeue not in ("exit", "scontrol"):
        raise ConfigurationError(
            f"requeue is {requeue!r}; expected 'exit' (RequeueExit=143 in slurm.conf) "
            "or 'scontrol'"
        )
    if requeue == "exit":
        return None
    job = environment.get("SLURM_JOB_ID", "").strip()
    if not job:
        raise ConfigurationError(
            "requeue='scontrol' needs the job's id, and the environment variable "
            "SLURM_JOB_ID is not set; run within a Slurm job, or use requeue='exit'"
        )
    return job


def run_scontrol(command: list[str], limit: float) -> str:
    """Runs a command, and returns its output; invalid UTF-8 is replaced.

    Args:
        command: words of the command.
        limit: timeout in seconds, after which the command is killed.

    Raises:
        OSError: the command cannot be started.
        subprocess.SubprocessError: the command fails, or exceeds the timeout.
    """
    done = subprocess.run(
        command,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=limit,
        check=True,
    )
    return done.stdout
