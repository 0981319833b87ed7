"""What docs/checkpoints.md shows: its programs run, its names exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tfpreempt
from tests.multiprocess.harness import Zygote, worker_environment
from tfpreempt.checkpoint.handle import Checkpoint
from tfpreempt.testing.gcs import GcsServer

RAY = {"to_uri", "to_dict"}  # in the table of what Ray had
PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def run(program: str, directory: Path, more: dict[str, str]) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=directory,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **more},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def fork(zygote: Zygote, program: str, directory: Path, more: dict[str, str]) -> str:
    """The same for one that imports TensorFlow."""
    file = directory / "train.py"
    file.write_text(program, encoding="utf-8")
    environment = worker_environment(directory, more)
    ended = zygote.run(file, directory=directory, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.slow
def test_the_loop_of_states_goes_on_and_ends(tmp_path: Path) -> None:
    (program,) = [block for block in BLOCKS if "StepCounter" in block]
    more = {"TFPREEMPT_CHECKPOINT_DIR": str(tmp_path / "ckpt")}
    for _ in range(2):
        told = run(f"{program}\nprint(step.value, len(losses.value))", tmp_path, more)
        assert told.split() == ["100", "100"]


@pytest.mark.tensorflow
def test_the_first_program_goes_on_from_the_bucket(
    zygote: Zygote, tmp_path: Path
) -> None:
    program = next(block for block in BLOCKS if block.startswith("# train.py"))
    with GcsServer() as server:
        for machine in ("first", "second"):
            (tmp_path / machine).mkdir()
            told = fork(zygote, program, tmp_path / machine, server.environment())
    assert "fetching step 1000" in told


@pytest.mark.tensorflow
def test_the_program_without_a_cloud_outlives_its_disk(
    zygote: Zygote, tmp_path: Path
) -> None:
    (program,) = [block for block in BLOCKS if "GcsServer" in block]
    told = fork(zygote, program, tmp_path, {})
    assert told.count("fetching step 20") == 1
    assert "20.0" in told.split()


@pytest.mark.tensorflow
def test_its_names_exist() -> None:
    for name in re.findall(r"`(\w+)\(name[,)]", PAGE):
        assert hasattr(tfpreempt.states, name), name
    for name in ("save_all_states", "load_state", "save_state", "num_restarts"):
        assert f"`{name}(" in PAGE
        assert callable(getattr(tfpreempt, name))
    for name in re.findall(r"`checkpoint\.(\w+)\(", PAGE):
        assert hasattr(Checkpoint, name) or name in RAY, name
