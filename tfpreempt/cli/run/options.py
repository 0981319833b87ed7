"""The options of `tfpreempt run`, and the environment of the workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from tfpreempt.cli.run.restart_policy import RestartLimits
from tfpreempt.cli.run.tf_config import make_jax_variables, make_tf_config
from tfpreempt.core import heartbeat
from tfpreempt.core.scratch import local_directory
from tfpreempt.core.snapshot_memory import VARIABLES, SnapshotMemory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of a run under supervision.

    Attributes:
        command: program of the workers, with its arguments.
        workers: number of workers on this machine.
        limits: limits for restarts, and timeouts.
        checkpoint_dir: absolute path or URL of the checkpoint directory, passed to the
            workers; None if the user has named none.
        mirror_dir: URI of the mirror, passed to the workers, which upload their
            commits; None: no mirror.
        log_dir: directory for the workers' output.
        log_size: size in bytes at which a log file is rotated.
        log_files: number of log files to keep for every worker.
        journal_dir: directory of the supervisor's journal.
        task: name of this machine's task, such as "worker-3", if the user has set
            TF_CONFIG (`workers` is 1 then); None if TF_CONFIG is not set.
        has_echo: whether worker 0's output is copied to the console.
        environment: environment inherited by the workers.
        snapshots: bytes of memory to reserve for the workers' snapshots; 0: no
            snapshots; `snapshot_space.AUTO`: depends on the free memory.
        memory: memory reserved for the workers' snapshots; None without snapshots.
        hang_timeout: maximum seconds between two step boundaries, or
            `hang_detector.AUTO`; None: no limit.
        first_worker: index of this machine's first worker in the cluster; None if this
            machine's task in TF_CONFIG does not train.
        metrics_address: host and port on which to serve metrics; None: not served.
        metrics_file: file to which to write metrics; None: not written.
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
        """Local directory of the workers' commits; None without `checkpoint_dir`."""
        given = self.checkpoint_dir
        return None if given is None else local_directory(given)

    @property
    def journal_path(self) -> Path:
        """Path of the supervisor's journal; each machine of a run has its own path."""
        suffix = f"-{self.task}" if self.task else ""
        return self.journal_dir / f"supervisor{suffix}.jsonl"

    def worker_environment(
        self, worker: int, incarnation: str, restart: int, ports: tuple[int, ...]
    ) -> dict[str, str]:
        """Returns the environment variables of a worker.

        If the user has set TF_CONFIG, the worker inherits TF_CONFIG, and
        TFPREEMPT_INCARNATION is not set: its value must be equal on all workers, but
        the supervisor of every machine chooses different names. The same applies to
        JAX_COORDINATOR_ADDRESS. TFPREEMPT_SUPERVISED is always set; the workers record
        its value in their journals.

        Args:
            worker: index of the worker on this machine.
            incarnation: name that this supervisor has given to the start of all
                workers.
            restart: number of restarts so far.
            ports: ports of the local cluster; empty if the user has set TF_CONFIG.
        """
        own = {
            "TFPREEMPT_SUPERVISED": incarnation,
            "TFPREEMPT_NUM_RESTARTS": str(restart),
            "TFPREEMPT_JOURNAL_DIR": str(self.journal_dir),
        }
        if self.checkpoint_dir is not None:
            own["TFPREEMPT_CHECKPOINT_DIR"] = self.checkpoint_dir
        if self.mirror_dir is not None:
            own["TFPREEMPT_MIRROR_DIR"] = self.mirror_dir
        if self.task is None:
            own["TF_CONFIG"] = make_tf_config(ports, worker)
            if "JAX_COORDINATOR_ADDRESS" not in self.environment:
                own |= make_jax_variables(ports, worker)
                own["TFPREEMPT_INCARNATION"] = incarnation
        if self.memory is not None:
            own |= self.memory.to_environment()
        # Do not pass on these variables: an outer supervisor may have set them.
        lent = (*VARIABLES, heartbeat.VARIABLE)
        given = {k: v for k, v in self.environment.items() if k not in lent}
        return {**given, **own}
