"""What `tfpreempt run` was asked to do, and what the workers are told of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from tfpreempt.cli.run.cluster import make_tf_config
from tfpreempt.cli.run.policy import Limits
from tfpreempt.core import life
from tfpreempt.core.memory import VARIABLES, LentMemory
from tfpreempt.core.scratch import local_directory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """One run under supervision.

    Attributes:
        command: the workers' program with its arguments.
        workers: how many of them.
        limits: budgets and times.
        checkpoint_dir: absolute, or a URL; handed on to the workers.
        remote_checkpoint_dir: handed on to the workers, which copy their commits there.
        log_dir: for the workers' output.
        log_size: bytes of a log file, after which the next one begins.
        log_files: how many of a worker's are kept.
        journal_dir: for the supervisor's own record.
        task: where TF_CONFIG was given what this machine's task is called, such as
            "worker-3"; then workers is 1.
        has_echo: whether worker 0's output is copied to the console.
        environment: what the workers inherit.
        snapshots: bytes for the workers' snapshots; 0 for none, or `memory.AUTO`.
        memory: what each worker has for them; None for none.
        hang_timeout: seconds that a boundary may take, or `hangs.AUTO`; None: as long
            as it takes.
        first_worker: index in the cluster of the first of them; None where TF_CONFIG
            names a task that does not train.
        metrics_address: host and port, where metrics are served; None: nowhere.
        metrics_file: that metrics are written to; None: none.
    """

    command: tuple[str, ...]
    workers: int
    limits: Limits
    checkpoint_dir: str | None
    remote_checkpoint_dir: str | None
    log_dir: Path
    log_size: int
    log_files: int
    journal_dir: Path
    task: str | None
    has_echo: bool
    environment: Mapping[str, str]
    snapshots: int = 0
    memory: LentMemory | None = None
    hang_timeout: float | None = None
    first_worker: int | None = 0
    metrics_address: tuple[str, int] | None = None
    metrics_file: Path | None = None

    def label(self, worker: int) -> str:
        """What a worker is called in files and on the console."""
        return self.task or f"worker-{worker}"

    @property
    def local_dir(self) -> str | None:
        """The directory of this machine in which the workers commit."""
        given = self.checkpoint_dir
        return None if given is None else local_directory(given)

    @property
    def journal_path(self) -> Path:
        """The supervisor's record; those of other machines may lie beside it."""
        suffix = f"-{self.task}" if self.task else ""
        return self.journal_dir / f"supervisor{suffix}.jsonl"

    def worker_environment(
        self, worker: int, incarnation: str, restart: int, ports: tuple[int, ...]
    ) -> dict[str, str]:
        """The environment of one worker.

        Where TF_CONFIG is given it stays, and the workers get no incarnation: the
        supervisors of the other machines have other names for theirs. What this one
        calls the start goes into their journals.
        """
        told = {
            "TFPREEMPT_SUPERVISED": incarnation,
            "TFPREEMPT_NUM_RESTARTS": str(restart),
            "TFPREEMPT_JOURNAL_DIR": str(self.journal_dir),
        }
        if self.checkpoint_dir is not None:
            told["TFPREEMPT_CHECKPOINT_DIR"] = self.checkpoint_dir
        if self.remote_checkpoint_dir is not None:
            told["TFPREEMPT_REMOTE_CHECKPOINT_DIR"] = self.remote_checkpoint_dir
        if self.task is None:
            told["TF_CONFIG"] = make_tf_config(ports, worker)
            told["TFPREEMPT_INCARNATION"] = incarnation
        if self.memory is not None:
            told |= self.memory.to_environment()
        lent = (*VARIABLES, life.VARIABLE)  # by a supervisor of this one
        given = {k: v for k, v in self.environment.items() if k not in lent}
        return {**given, **told}
