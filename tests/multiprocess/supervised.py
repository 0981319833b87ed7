"""`tfpreempt run` with a program of these tests; the tests kill its workers.

The workers are forks, see programs/forking_supervisor.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.multiprocess.harness import (
    PROGRAMS,
    Place,
    Worker,
    records,
    wait_until,
)

# The first snapshot comes after a second.
TRAIN = ("--pause", "0.3", "--strategy")
STRATEGIES = {1: "none", 2: "mwms"}


@dataclasses.dataclass
class Run:
    """A supervised run of train.py, which the test kills."""

    here: Place
    supervisor: Worker
    workers: list[Worker]
    memory: Path | None = None

    def pid(self, worker: int) -> int:
        """Returns the process id of a worker that the supervisor started last."""
        journal = self.here.checkpoints
        starts = wait_until(
            lambda: records(journal, "started") + records(journal, "restarted"),
            "the start",
        )
        return int(starts[-1]["pids"][worker])

    def find_memory(self) -> None:
        """Finds the memory of this run's snapshots."""
        [path] = self.workers[0].wait_line("snapshots")
        self.memory = Path(path)

    def snapshots(self, worker: int) -> list[Path]:
        """Returns the complete snapshots of a worker."""
        assert self.memory is not None
        found = self.memory.glob(f"*-{worker}/[0-9]*/COMMITTED")
        return [marker.parent for marker in found]

    def wait_snapshot(self) -> int:
        """Waits until all workers have a snapshot; returns the newest step."""
        self.find_memory()
        for each in range(len(self.workers)):
            wait_until(lambda: self.snapshots(each), "a snapshot")  # noqa: B023
        return max(int(path.name) for path in self.snapshots(0))

    def kill(
        self, worker: int, said: str = "step", number: signal.Signals = signal.SIGKILL
    ) -> int:
        """Kills a worker, after a snapshot of all workers and a later step.

        Args:
            worker: worker to kill.
            said: word that the worker prints for each step.
            number: signal that kills or stops the worker.

        Returns:
            The number of steps of the worker.
        """
        newest = self.wait_snapshot()
        victim = self.workers[worker]
        wait_until(lambda: len(victim.lines(said)) > newest, "a step")
        os.kill(self.pid(worker), number)
        return len(victim.lines(said))

    def wait(self) -> None:
        wait_until(lambda: self.supervisor.code is not None, "the supervisor ends")
        assert self.supervisor.code == 0, self.supervisor.output
        assert self.memory is None or not self.memory.exists()

    def restored(self, worker: int) -> dict[str, object]:
        return records(self.here.checkpoints, "restored", worker=worker)[-1]


@contextlib.contextmanager
def run(
    here: Place, world: int, *options: str, program: Sequence[str] = ()
) -> Iterator[Run]:
    """Context manager: runs `tfpreempt run` with these options in a directory."""
    logs = here.path / "logs"
    file, *arguments = program or ("train.py", *TRAIN, STRATEGIES[world])
    supervising = here.start(
        "forking_supervisor.py",
        *("--workers", world, "--log-dir", logs, "--snapshots", "64M"),
        *("--backoff", 0, *options, "--", sys.executable, PROGRAMS / file),
        *(here.checkpoints, *arguments),
    )
    never = here.path / "never"
    workers = [Worker(0, logs / f"worker-{i}.log", never) for i in range(world)]
    try:
        yield Run(here, supervising[0], workers)
    finally:
        if supervising[0].code is None:
            supervising[0].send(signal.SIGTERM)
        supervising.wait()
