"""The options of `tfpreempt run`, and the environment of the workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from tfpreempt.cli.run.restart_policy import RestartLimits
from tfpreempt.cli.run.tf_config import make_tf_config
from tfpreempt.core import heartbeat
from tfpreempt.core.scratch import local_directory
from tfpreempt.core.snapshot_memory import VARIABLES, SnapshotMemory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of a run under supervision.

    Attributes:
        command: program of the workers, with its arguments.
        workers: number of workers on this machine.
        limits: budgets and times.
        checkpoint_dir: absolute path or URL, passed to the workers.
        mirror_dir: mirror, passed to the workers, which copy their commits
            there.
        log_dir: directory for the workers' output.
        log_size: bytes of a log file at which the next file begins.
        log_files: number of log files kept per worker.
        journal_dir: directory of the supervisor's journal.
        task: name of this machine's task if TF_CONFIG was given, such as "worker-3";
            then `workers` is 1.
        has_echo: whether worker 0's output is copied to the console.
        environment: environment inherited by the workers.
        snapshots: bytes for the workers' snapshots; 0 for no snapshots, or
            `memory.AUTO`.
        memory: memory of the workers for snapshots; None without snapshots.
        hang_timeout: seconds allowed without a boundary, or `hangs.AUTO`; None: no
            limit.
        first_worker: index in the cluster of this machine's first worker; None if
            TF_CONFIG names a task that does not train.
        metrics_address: host and port for serving metrics; None: not served.
        metrics_file: file for metrics; None: not written.
    """

    command: tuple[str, ...]
    workers: int
    limits: RestartLimits
    checkpoint_dir: str | None
    mirror_dir: str | None
    log_dir: Path
    log_size: int
    log_files: int
    journal_dir: Path
    task: str | None
    has_echo: bool
    environment: Mapping[str, str]
    snapshots: int = 0
    memory: SnapshotMemory | None = None
    hang_timeout: float | None = None
    first_worker: int | None = 0
    metrics_address: tuple[str, int] | None = None
    metrics_file: Path | None = None

    def label(self, worker: int) -> str:
        """Returns the name of a worker in files and on the console."""
        return self.task or f"worker-{worker}"

    @property
    def local_dir(self) -> str | None:
        """The directory of this machine in which the workers commit."""
        given = self.checkpoint_dir
        return None if given is None else local_directory(given)

    @property
    def journal_path(self) -> Path:
        """The supervisor's journal file; other machines may have files beside it."""
        suffix = f"-{self.task}" if self.task else ""
        return self.journal_dir / f"supervisor{suffix}.jsonl"

    def worker_environment(
        self, worker: int, incarnation: str, restart: int, ports: tuple[int, ...]
    ) -> dict[str, str]:
        """Returns the environment of a worker.

        A given TF_CONFIG is passed on, and the workers then get no common incarnation
        name: supervisors of other machines use other names. The name of this
        supervisor's start is recorded in the workers' journals.

        Args:
            worker: index of the worker on this machine.
            incarnation: name of the start of the workers.
            restart: number of restarts so far.
            ports: ports of the local cluster; empty with a given TF_CONFIG.
        """
        told = {
            "TFPREEMPT_SUPERVISED": incarnation,
            "TFPREEMPT_NUM_RESTARTS": str(restart),
            "TFPREEMPT_JOURNAL_DIR": str(self.journal_dir),
        }
        if self.checkpoint_dir is not None:
            told["TFPREEMPT_CHECKPOINT_DIR"] = self.checkpoint_dir
        if self.mirror_dir is not None:
            told["TFPREEMPT_MIRROR_DIR"] = self.mirror_dir
        if self.task is None:
            told["TF_CONFIG"] = make_tf_config(ports, worker)
            told["TFPREEMPT_INCARNATION"] = incarnation
        if self.memory is not None:
            told |= self.memory.to_environment()
        lent = (*VARIABLES, heartbeat.VARIABLE)  # set by a parent supervisor
        given = {k: v for k, v in self.environment.items() if k not in lent}
        return {**given, **told}
