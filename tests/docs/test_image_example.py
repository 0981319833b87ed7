"""The complete example of model.fit: two preemptions change nothing in its results."""

from __future__ import annotations

import importlib.util
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT, blocks
from tests.fakes.gcs import GcsServer
from tests.multiprocess.harness import (
    LIMIT,
    RESTART,
    Place,
    Zygote,
    records,
    wait_until,
    worker_environment,
)
from tfpreempt.cli.report.scalars import read_scalars

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.multiprocess,
    pytest.mark.timeout(600),
]

PAGE = "fit/example.md"
EPOCHS = 8
SUMMARIES = ROOT / "tests/fakes/summaries"


def environment(directory: Path, bucket: GcsServer) -> dict[str, str]:
    """Returns a shell's environment with `python` and `tfpreempt` on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return worker_environment(directory, {"PATH": path} | bucket.environment())


def results(directory: Path) -> tuple[bytes, bytes, dict[str, list[Any]]]:
    """Weights with the optimizer's, history, and TensorBoard's scalars by their tag."""
    with zipfile.ZipFile(directory / "shapes.keras") as model:
        weights = model.read("model.weights.h5")
    curves, warnings = read_scalars(directory / "logs")
    assert warnings == []
    steps_and_values = {
        tag: [point[1:] for point in points]
        for tag, points in curves.items()
        if "per_second" not in tag  # a measured time
    }
    return weights, (directory / "history.json").read_bytes(), steps_and_values


def test_two_preemptions_at_random_change_no_result(
    zygote: Zygote, here: Place, rng: random.Random
) -> None:
    """A preemption of the worker, and one of the machine with its disk."""
    make_images, train = blocks(PAGE)
    *_, command = blocks(PAGE, "bash")[0].splitlines()
    undisturbed, preempted = here.path / "undisturbed", here.path / "preempted"
    undisturbed.mkdir()
    if importlib.util.find_spec("tensorboard") is None:
        shutil.copytree(SUMMARIES / "tensorboard", undisturbed / "tensorboard")
    program = undisturbed / "make_images.py"
    program.write_text(make_images, encoding="utf-8")
    assert zygote.run(program, directory=undisturbed).returncode == 0
    program = undisturbed / "train.py"
    program.write_text(train, encoding="utf-8")
    shutil.copytree(undisturbed, preempted)

    with GcsServer() as bucket:
        env = environment(undisturbed, bucket)
        ended = zygote.run(program, directory=undisturbed, env=env, limit=2 * LIMIT)
        assert ended.returncode == 0, ended.stdout + ended.stderr

    checkpoints = preempted / "ckpt"
    log = checkpoints / "logs" / "worker-0.log"
    first = rng.randint(1, EPOCHS // 2 - 1)
    second = rng.randint(first + 1, EPOCHS - 2)

    def wait_moment(epoch: int) -> None:
        """Returns at some moment of an epoch."""
        begun = f"Epoch {epoch}/{EPOCHS}"
        wait_until(lambda: log.exists() and begun in log.read_text(), begun, 2 * LIMIT)
        time.sleep(rng.uniform(0.0, 1.5))

    output = preempted / "supervisor.log"
    with GcsServer() as bucket:

        def start() -> subprocess.Popen[bytes]:
            with output.open("ab") as out:
                return subprocess.Popen(
                    shlex.split(command),
                    cwd=preempted,
                    env=environment(preempted, bucket),
                    stdout=out,
                    stderr=out,
                )

        supervisor = start()
        try:
            wait_moment(first)
            [worker] = records(checkpoints, "started")[-1]["pids"]
            os.kill(int(worker), signal.SIGTERM)
            wait_moment(second)
            supervisor.terminate()
            assert supervisor.wait(LIMIT) == RESTART, output.read_text()
            commits = [r["step"] for r in records(checkpoints, "commit")]
            print(f"SIGTERM in epochs {first} and {second}, commits at {commits}")
            shutil.rmtree(checkpoints)
            supervisor = start()
            assert supervisor.wait(2 * LIMIT) == 0, output.read_text()
        finally:
            supervisor.terminate()
            supervisor.wait(LIMIT)
    assert "downloading step" in log.read_text()
    weights, history, scalars = results(preempted)
    expected_weights, expected_history, expected_scalars = results(undisturbed)
    assert weights == expected_weights
    assert history == expected_history
    assert scalars == expected_scalars
    steps = {tag: [step for step, _ in curve] for tag, curve in scalars.items()}
    batches = len(steps["train/batch_loss"])
    assert steps["train/batch_loss"] == list(range(1, batches + 1))
    assert steps["train/epoch_loss"] == steps["validation/epoch_loss"]
    assert steps["validation/epoch_loss"] == list(range(EPOCHS))
