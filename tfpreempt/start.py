"""How a handler starts: one storage, one commit to restore, agreed on by all."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable
from typing import Any

from tfpreempt import errors
from tfpreempt.checkpoint import probe
from tfpreempt.checkpoint.restore import Candidate
from tfpreempt.checkpoint.saver import CheckpointSaver
from tfpreempt.checkpoint.writer import make_saver
from tfpreempt.cluster import Cluster
from tfpreempt.coordination import rendezvous
from tfpreempt.coordination.memory import MemoryStore
from tfpreempt.coordination.store import KeyValueStore

log = logging.getLogger(__name__)

NOT_SHARED = "DirectoryNotSharedError: "
DISAGREES = "WorkersDisagreeError: "


class Start:
    """Builds this worker's saver and finds the commit that all will restore.

    Args:
        given: the user's checkpoint, manager or None.
        own_directory: the user's checkpoint_dir.
        cluster: who the workers are.
        restore: False starts afresh.
        max_to_keep: commits to keep.
        save_fn: the user's, or None.
        io_device: where TensorFlow's files are written; None: where the variables are.

    Attributes:
        saver: set by `agree`.
        candidate: what all workers are to restore; None to start afresh.
        token: unique to this start, equal on all workers.
        skipped: what was found damaged on the way (chief only).
    """

    def __init__(
        self,
        given: Any,
        own_directory: str | os.PathLike[str] | None,
        *,
        cluster: Cluster,
        restore: bool,
        max_to_keep: int | None,
        save_fn: Callable[..., Any] | None,
        io_device: str | None = None,
    ) -> None:
        self.saver: CheckpointSaver
        self.candidate: Candidate | None = None
        self.token = ""
        self.skipped: list[str] = []
        self._given = given
        self._own_directory = own_directory
        self._cluster = cluster
        self._restore = restore
        self._max_to_keep = max_to_keep
        self._save_fn = save_fn
        self._io_device = io_device

    def agree(self, store: KeyValueStore, prefix: str, timeout: float) -> None:
        """Runs the rendezvous; main thread of every worker, in the same order.

        Args:
            store: the store.
            prefix: namespace of this start.
            timeout: seconds to wait for the slowest worker.

        Raises:
            DirectoryNotSharedError: a worker sees other storage.
            CheckpointDamagedError: there are commits, and none is whole.
            WorkersDisagreeError: workers differ in world size or in what they find.
            ConfigurationError: the directory cannot work.
            WaitTimeoutError: a worker is missing.
        """
        probes: list[str] = []

        def propose() -> rendezvous.Plan:
            plan = self._propose()
            probes.append(plan["probe"])
            return plan

        try:
            plan, problems = rendezvous.agree(
                store,
                prefix,
                self._cluster.worker,
                self._cluster.world,
                propose=propose,
                check=self._check,
                timeout=timeout,
            )
        finally:
            for token in probes:
                probe.remove_probe(self.saver.directory, token)
        raise_problems(problems)
        self.token = str(plan["token"])

    def _build(self, directory: str | None) -> CheckpointSaver:
        self.saver = make_saver(
            self._given,
            self._own_directory,
            worker=self._cluster.worker,
            world_size=self._cluster.world,
            is_chief=self._cluster.is_chief,
            max_to_keep=self._max_to_keep,
            save_fn=self._save_fn,
            chief_directory=directory,
            io_device=self._io_device,
        )
        return self.saver

    def _propose(self) -> rendezvous.Plan:
        saver = self._build(None)
        saver.start()
        if self._restore:
            self._find_newest(saver)
        return {
            "directory": saver.directory,
            "probe": probe.write_probe(saver.directory),
            "checkpoint": self.candidate.token if self.candidate else None,
            "world": self._cluster.world,
            "token": uuid.uuid4().hex[:12],
        }

    def _check(self, plan: rendezvous.Plan) -> str | None:
        if self._cluster.is_chief:
            return None
        if plan["world"] != self._cluster.world:
            return (
                f"{DISAGREES}worker 0 counts {plan['world']} workers, this one "
                f"{self._cluster.world}; give all workers the same TF_CONFIG cluster"
            )
        directory = self._shared_directory(plan)
        if directory is None:
            own = getattr(self._given, "directory", self._own_directory)
            return (
                f"{NOT_SHARED}{own!r} here is not the same storage as worker 0's "
                f"{plan['directory']!r} (a file that worker 0 wrote there is not to be "
                "seen). Use a directory that all machines mount. (For machines without "
                "one, remote_checkpoint_dir is to be the way, in a later version.)"
            )
        saver = self._build(directory)
        if plan["checkpoint"] is not None:
            self.candidate = saver.find(plan["checkpoint"])
            if self.candidate is None:
                return (
                    f"{DISAGREES}worker 0 restores the commit {plan['checkpoint']} of "
                    f"{plan['directory']!r}, which this worker does not find there"
                )
        return None

    def _shared_directory(self, plan: rendezvous.Plan) -> str | None:
        """Where this worker sees what worker 0 wrote; None if nowhere."""
        own = getattr(self._given, "directory", self._own_directory)
        for directory in (plan["directory"], os.path.abspath(own) if own else None):
            if directory and probe.check_probe(directory, plan["probe"]):
                return str(directory)
        return None

    def _find_newest(self, saver: CheckpointSaver) -> None:
        lost: list[str] = []  # damaged commits of ours
        self.candidate = saver.newest(self.skipped.append, lost.append)
        self.skipped += lost
        if lost and self.candidate is None:
            found = "; ".join(text.rstrip(".") for text in lost)
            raise errors.CheckpointDamagedError(
                f"no commit in {saver.directory} is whole ({found}), and a training "
                "that begins anew would write over them. Put the files back from a "
                "copy; or, to begin anew, move them away or pass restore=False"
            )
        instead = "an older commit is used" if self.candidate else "it is passed over"
        for problem in self.skipped:
            log.warning("tfpreempt: %s; %s", problem.rstrip("."), instead)


def raise_problems(problems: dict[int, str]) -> None:
    """Raises, on every worker, what any worker found wrong with the start.

    Args:
        problems: for each worker that has one, "ClassOfError: text".
    """
    if not problems:
        return
    name = problems[min(problems)].split(":")[0]
    kind = getattr(errors, name, errors.WorkersDisagreeError)
    text = "; ".join(
        f"worker {i}: {problem.removeprefix(f'{name}: ')}"
        for i, problem in problems.items()
    )
    raise kind(text)


def make_store(cluster: Cluster) -> KeyValueStore:
    """The store that this cluster's workers share."""
    if cluster.world == 1:
        return MemoryStore()
    from tfpreempt.coordination.tf_service import TensorFlowStore

    return TensorFlowStore(cluster.jobs)
