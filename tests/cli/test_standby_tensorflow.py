"""The demo's program goes on from a standby exactly as it would have without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.tensorflow, pytest.mark.multiprocess]

ROOT = Path(__file__).parents[2]
STEPS = 60
# With a number it is preempted there, as soon as something waits for the next start.
PROGRAM = f"""
import os, pathlib, signal, sys, time
from tfpreempt.cli.demo import worker
out, way, preempted_at = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
journal = out / "checkpoints/journal/supervisor.jsonl"
worker.make_repeatable(1)
if way == "fit":
    worker.tfpreempt.keras.enable_multi_worker()
    worker.EPOCH_STEPS = {STEPS // 3}
strategy = worker.tf.distribute.MultiWorkerMirroredStrategy()
def tell(step, loss):
    if worker.tfpreempt.num_restarts() == 0 and preempted_at == [str(step)]:
        while '"standby_ready"' not in journal.read_text():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)  # the notice is taken by a thread
train = worker.train_by_fit if way == "fit" else worker.train_by_loop
worker.save_result(out, 0, train(strategy, {STEPS}, 1, tell))
"""


@pytest.mark.parametrize("way", ["loop", "fit"])
def test_the_weights_are_those_of_an_undisturbed_run(tmp_path: Path, way: str) -> None:
    calm = train(tmp_path / "calm", way)
    assert not any(each["event"] == "standby_ready" for each in calm)
    struck = train(tmp_path / "struck", way, "31", "--standby", "--standby-after=0")
    restarted = [each for each in struck if each["event"] == "restarted"]
    assert [each["from_standby"] for each in restarted] == [[0]]
    results = [
        (tmp_path / name / "weights-0.bin").read_bytes() for name in ("calm", "struck")
    ]
    assert results[0] == results[1]
    log = (tmp_path / "struck/checkpoints/logs/worker-0.log").read_text()
    assert "cold start" not in log


def train(
    directory: Path, way: str, at: str = "", *options: str
) -> list[dict[str, Any]]:
    """Trains to the end; returns the supervisor's record."""
    directory.mkdir()
    program = directory / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tfpreempt", "run", "--max-failures=0"),
            *(f"--checkpoint-dir={directory}/checkpoints", *options, "--"),
            *(sys.executable, str(program), str(directory), way, *filter(None, [at])),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    journal = directory / "checkpoints/journal/supervisor.jsonl"
    return [json.loads(line) for line in journal.read_text().splitlines()]
