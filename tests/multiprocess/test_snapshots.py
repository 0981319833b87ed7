"""Killed without a notice under `tfpreempt run`: what was in memory is gone on from."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.multiprocess.conftest import Reference
from tests.multiprocess.fits import Fit, undisturbed
from tests.multiprocess.harness import (
    LIMIT,
    PROGRAMS,
    STEPS,
    Place,
    Worker,
    Zygote,
    records,
    wait_until,
    worker_environment,
)

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(280)]

NAME = "TFPREEMPT_SNAPSHOT_DIR="
# The first snapshot comes after a second.
TRAIN = ("--pause", "0.3", "--strategy")
STRATEGIES = {1: "none", 2: "mwms"}


@dataclasses.dataclass
class Run:
    """A supervised run of train.py, which the test kills."""

    here: Place
    supervisor: subprocess.Popen[bytes]
    workers: list[Worker]
    memory: Path = Path()

    def pid(self, worker: int) -> int:
        """Of the process that the supervisor started last."""
        journal = self.here.checkpoints
        starts = wait_until(
            lambda: records(journal, "started") + records(journal, "restarted"),
            "the start",
        )
        return int(starts[-1]["pids"][worker])

    def find_memory(self) -> None:
        """Sees where this run's snapshots are."""
        path = Path(f"/proc/{self.pid(0)}/environ")

        def look() -> str | None:
            words = path.read_text().split("\0")
            found = [word.partition("=")[2] for word in words if word.startswith(NAME)]
            return found[0] if found else None  # it is not what it becomes yet

        self.memory = Path(wait_until(look, "the memory") or "")

    def snapshots(self, worker: int) -> list[Path]:
        """Those of a worker that are whole."""
        found = self.memory.glob(f"*-{worker}/[0-9]*/COMMITTED")
        return [marker.parent for marker in found]

    def kill(self, worker: int, said: str = "step") -> int:
        """Kills one when all have a snapshot, and a step after it.

        Args:
            worker: which.
            said: with each step.

        Returns:
            How many steps it had made.
        """
        self.find_memory()
        for each in range(len(self.workers)):
            wait_until(lambda: self.snapshots(each), "a snapshot")  # noqa: B023
        newest = max(int(path.name) for path in self.snapshots(worker))
        victim = self.workers[worker]
        wait_until(lambda: len(victim.lines(said)) > newest, "a step")
        os.kill(self.pid(worker), signal.SIGKILL)
        return len(victim.lines(said))

    def wait(self) -> None:
        assert self.supervisor.wait(LIMIT) == 0
        assert not self.memory.exists()

    def restored(self, worker: int) -> dict[str, object]:
        return records(self.here.checkpoints, "restored", worker=worker)[-1]


@contextlib.contextmanager
def run(
    here: Place, world: int, *options: str, program: Sequence[str] = ()
) -> Iterator[Run]:
    """`tfpreempt run` in that place; the options are the supervisor's."""
    logs = here.path / "logs"
    command = [sys.executable, "-m", "tfpreempt", "run", "--workers", str(world)]
    command += ["--checkpoint-dir", str(here.checkpoints), "--log-dir", str(logs)]
    file, *arguments = program or ("train.py", *TRAIN, STRATEGIES[world])
    command += ["--snapshots", "64M", "--backoff", "0", *options, "--", sys.executable]
    command += [str(PROGRAMS / file), str(here.checkpoints), *arguments]
    environment = worker_environment(here.path)
    with (here.path / "supervisor.log").open("wb") as out:
        supervisor = subprocess.Popen(
            command, stdout=out, stderr=out, env=environment, cwd=here.path
        )
    never = here.path / "never"
    workers = [Worker(0, logs / f"worker-{i}.log", never) for i in range(world)]
    try:
        yield Run(here, supervisor, workers)
    finally:
        supervisor.terminate()
        supervisor.wait(LIMIT)


@pytest.mark.parametrize("world", [1, 2])
def test_a_killed_worker_costs_what_came_after_the_snapshot(
    here: Place, reference: Reference, world: int
) -> None:
    with run(here, world) as made:
        died = made.kill(world - 1)
        made.wait()
    for worker in range(world):
        restored = made.restored(worker)
        assert restored["tier"] == "memory"
        assert 0 < int(str(restored["step"])) < died
    results = [worker.result() for worker in made.workers]
    assert results == reference(STRATEGIES[world], world)
    [commit] = records(here.checkpoints, "commit")
    assert (commit["step"], commit["because"]) == (STEPS, "finished")


@pytest.mark.parametrize("line", ["keras", "tf_keras"])
def test_so_does_a_killed_fit(here: Place, zygote: Zygote, line: str) -> None:
    program = ("fit.py", f"--line={line}", "--pause=0.3")
    with run(here, 1, program=program) as made:
        died = made.kill(0, "trained")
        made.wait()
    restored = made.restored(0)
    assert restored["tier"] == "memory"
    assert 0 < int(str(restored["step"])) < died
    assert [made.workers[0].result()] == undisturbed(
        zygote, Fit(line=line, data="tfdata")
    )
