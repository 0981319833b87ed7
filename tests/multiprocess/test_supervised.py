"""The whole path at once: `python -m tfpreempt run`, two workers, two preemptions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.multiprocess.conftest import Reference
from tests.multiprocess.harness import (
    LIMIT,
    PROGRAMS,
    Place,
    Worker,
    records,
    wait_until,
    worker_environment,
)

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(280)]


def test_two_preemptions_under_the_supervisor(
    here: Place, reference: Reference
) -> None:
    """H: two preemptions under the real supervisor, and the undisturbed run's bytes."""
    here.hold()
    logs = here.path / "logs"
    program = [sys.executable, str(PROGRAMS / "train.py"), str(here.checkpoints)]
    command = [sys.executable, "-m", "tfpreempt", "run", "--workers", "2"]
    command += ["--checkpoint-dir", str(here.checkpoints), "--log-dir", str(logs), "--"]
    command += [*program, "--strategy", "mwms", "--hold-at", "3", "8"]
    output = here.path / "supervisor.log"
    workers = [
        Worker(0, logs / f"worker-{i}.log", here.path / "never") for i in range(2)
    ]
    with output.open("wb") as out:
        supervisor = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            env=worker_environment(here.path),
            cwd=here.path,
        )
    try:
        for count, victim in enumerate([1, 0], start=1):
            for worker in workers:
                worker.wait_line("holding", count)
            os.kill(int(workers[victim].lines("pid")[-1][0]), signal.SIGTERM)
            wait_until(
                lambda: len(records(here.checkpoints, "notice")) >= count,  # noqa: B023
                "a notice",
            )
            here.release()
            if count == 1:
                wait_until(lambda: len(records(here.checkpoints, "commit")), "a commit")
                here.hold()
        assert supervisor.wait(LIMIT) == 0, output.read_text()
    finally:
        supervisor.terminate()
        supervisor.wait(LIMIT)
    said = output.read_text()
    assert "preemptions: 2, failures: 0" in said
    commits = [(r["step"], r["because"]) for r in records(here.checkpoints, "commit")]
    assert commits == [(4, "preemption"), (9, "preemption"), (12, "finished")]
    assert [worker.result() for worker in workers] == reference("mwms", 2)
