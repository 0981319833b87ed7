"""The programs of the page about loops on JAX, preempted and resumed."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import blocks
from tests.multiprocess.harness import RESTART, records
from tests.multiprocess.jax_processes import (
    JaxProcess,
    ended,
    environment,
    jax_processes,
)

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(280)]
BEFORE = """
import os, time, tfpreempt
run = tfpreempt.PreemptionCheckpointHandler.run
def run_slowly(handler, *args):
    print("step", handler.total_run_calls, os.getpid(), flush=True)
    time.sleep(0.002)
    return run(handler, *args)
tfpreempt.PreemptionCheckpointHandler.run = run_slowly
"""
AFTER = """
import hashlib
found = hashlib.sha256()
for leaf in jax.tree.leaves(state.value):
    is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    found.update(np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes())
print("final", found.hexdigest(), float(loss) if handler.run_calls else "", flush=True)
"""


def program(folder: Path, index: int) -> Path:
    """Writes a program of the page to a file; adds pauses, and prints its end."""
    path = folder / "program.py"
    text = blocks("loops-on-jax.md")[index]
    path.write_text(f"{BEFORE}\n{text}\n{AFTER}", encoding="utf-8")
    return path


@pytest.fixture
def chance() -> random.Random:
    seed = random.SystemRandom().randrange(1000)
    print("seed", seed)
    return random.Random(seed)


def folders(tmp_path: Path) -> list[Path]:
    """Returns the directories of a run without a notice and of a run with a notice."""
    made = [tmp_path / "undisturbed", tmp_path / "run"]
    for each in made:
        each.mkdir()
    return made


def test_the_loop_resumes_exactly_under_the_supervisor(
    tmp_path: Path, chance: random.Random
) -> None:
    """One of the two workers gets SIGTERM."""
    finals = []
    for folder in folders(tmp_path):
        path, logs = program(folder, 0), folder / "logs"
        command = ["-m", "tfpreempt", "run", "--workers", "2"]
        command += ["--checkpoint-dir", "ckpt-jax-loop", "--log-dir", str(logs), "--"]
        with (folder / "out.txt").open("wb") as out:
            supervisor = subprocess.Popen(
                [sys.executable, *command, sys.executable, str(path)],
                cwd=folder,
                env=environment(),
                stdout=out,
                stderr=out,
            )
        worker = JaxProcess(logs / "worker-1.log", supervisor)
        try:
            if folder.name == "run":
                step = worker.wait_line("step", chance.randrange(1, 300))
                os.kill(int(step.split()[1]), signal.SIGTERM)
            assert supervisor.wait(200) == 0, (folder / "out.txt").read_text()
        finally:
            supervisor.kill()
        finals.append(worker.lines("final"))
    assert finals[0] == finals[1]
    assert float(finals[0][0].split()[1]) < 0.01
    assert len(records(folder / "ckpt-jax-loop", "commit", because="preemption")) == 1


@pytest.mark.skipif(
    importlib.util.find_spec("flax") is None, reason="the extra `flax` is not installed"
)
def test_the_loop_of_flax_resumes_exactly(
    tmp_path: Path, chance: random.Random
) -> None:
    finals = []
    for folder in folders(tmp_path):
        path = program(folder, 1)
        if folder.name == "run":
            with jax_processes(folder, count=1, program=path) as (process,):
                process.wait_line("step", chance.randrange(1, 300))
                process.process.send_signal(signal.SIGTERM)
                ended([process], RESTART)
        with jax_processes(folder, count=1, program=path) as (process,):
            ended([process], 0)
            finals.append(process.lines("final"))
    assert finals[0] == finals[1]
    assert float(finals[0][0].split()[1]) < 0.2
