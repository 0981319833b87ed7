"""Programs on the pages of docs/checkpoints run, and their names exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import tfpreempt
from tests.docs.pages import blocks, read
from tests.fakes.gcs import GcsServer
from tests.multiprocess.harness import Zygote, worker_environment
from tfpreempt.checkpoint.restore.handle import Checkpoint
from tfpreempt.cli import main

RAY = {"to_uri", "to_dict"}  # in the table of Ray's functions
RAYS = "migrating/adaptdl-and-ray.md"
LOADER = """
import grain
import tensorflow as tf
import tfpreempt
samples, steps, seen = range(1000), 3, []
train = seen.append
checkpoint = tf.train.Checkpoint()
"""
HANDLES = """
import fsspec
import tensorflow as tf
import tfpreempt
filesystem = fsspec.filesystem("file")
handler = tfpreempt.PreemptionCheckpointHandler(
    None, tf.train.Checkpoint(v=tf.Variable(0.0)), "ckpt",
    mirror_dir="file://" + __import__("os").path.abspath("mirror"))
handler.run(lambda: None)
handler.close()
"""

RULES = """
import keras
import numpy as np
import tensorflow as tf
"""
FIT = """
x, y = np.ones((8, 2)), np.ones((8, 1))
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, y, epochs=6, verbose=0, validation_data=(x, y), callbacks=[callback])
print({reason for each in callback.checkpoints()
       for reason in each.kept_because.split(", ")})
"""
LOOP = """
checkpoint = tf.train.Checkpoint(v=tf.Variable(0.0))
handler = tfpreempt.PreemptionCheckpointHandler(None, checkpoint, "loop")
handler.run(lambda: checkpoint.v.assign(1.0))
"""
PARTIAL = """
handler.close()
checkpoint = tf.train.Checkpoint(v=tf.Variable(0.0), new=tf.Variable(5.0))
__import__("os").rename("ckpt", "fit")
__import__("os").rename("loop", "ckpt")
"""
SHOWN = """
print("values", float(checkpoint.v), float(checkpoint.new))
"""


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
    """Like `run`, for a program that imports TensorFlow."""
    file = directory / "train.py"
    file.write_text(program, encoding="utf-8")
    environment = worker_environment(directory, more)
    ended = zygote.run(file, directory=directory, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.slow
def test_the_loop_of_states_resumes_and_is_listed(tmp_path: Path) -> None:
    (program,) = blocks("checkpoints/states.md")
    more = {"TFPREEMPT_CHECKPOINT_DIR": str(tmp_path / "ckpt")}
    for _ in range(2):
        told = run(f"{program}\nprint(step.value, len(losses.value))", tmp_path, more)
        assert told.split() == ["100", "100"]
    for command, shown in zip(
        ("inspect", "verify"), blocks("checkpoints/inspect.md", "console"), strict=False
    ):
        found = CliRunner().invoke(main, [command, more["TFPREEMPT_CHECKPOINT_DIR"]])
        assert found.output.splitlines()[0].split() == shown.splitlines()[1].split()


@pytest.mark.tensorflow
def test_the_first_program_resumes_from_the_bucket(
    zygote: Zygote, tmp_path: Path
) -> None:
    (program,) = blocks("checkpoints/index.md")
    with GcsServer() as server:
        for machine in ("first", "second"):
            (tmp_path / machine).mkdir()
            told = fork(zygote, program, tmp_path / machine, server.environment())
    assert "downloading step 1000" in told


@pytest.mark.tensorflow
def test_the_program_without_a_cloud_outlives_its_disk(
    zygote: Zygote, tmp_path: Path
) -> None:
    (program,) = blocks("checkpoints/without-a-cloud.md")
    told = fork(zygote, program, tmp_path, {})
    assert told.count("downloading step 20") == 1
    assert "20.0" in told.split()


@pytest.mark.tensorflow
def test_rules_asynchronous_saves_and_a_partial_restore(
    zygote: Zygote, tmp_path: Path
) -> None:
    rules, metrics = blocks("checkpoints/retention.md")
    (save,) = blocks("checkpoints/asynchronous-saves.md")
    (partial,) = blocks("which-checkpoint.md")
    program = f"{RULES}{rules}{FIT}{LOOP}{metrics}{save}{PARTIAL}{partial}{SHOWN}"
    told = fork(zygote, program, tmp_path, {})
    assert "'best val_loss'" in told
    assert "values 1.0 5.0" in told


@pytest.mark.tensorflow
def test_the_position_of_a_loader_is_kept(zygote: Zygote, tmp_path: Path) -> None:
    *_, program = blocks("data.md")
    shown = "\nprint(len(seen), next(batches)[:3])"
    lines = [
        fork(zygote, f"{LOADER}{program}{shown}", tmp_path, {}).splitlines()[0]
        for _ in range(2)
    ]
    assert [line[:2] for line in lines] == ["3 ", "0 "]
    assert lines[0][2:] == lines[1][2:]


@pytest.mark.tensorflow
def test_handles_and_the_status_of_the_mirror(zygote: Zygote, tmp_path: Path) -> None:
    (status,) = blocks("checkpoints/mirror.md")
    handles, notes = blocks("checkpoints/handles.md")
    shown = """
assert status.is_complete and status.last_error is None
assert newest.get_metadata() == {"accuracy": 0.93, "by": "nightly"}
"""
    fork(zygote, f"{HANDLES}{status}{handles}{notes}{shown}", tmp_path, {})


@pytest.mark.tensorflow
def test_names_exist() -> None:
    states = read("checkpoints/states.md")
    for name in re.findall(r"`(\w+)\(name[,)]", states):
        assert hasattr(tfpreempt.states, name), name
    for name in ("save_all_states", "load_state", "save_state", "num_restarts"):
        assert f"`{name}(" in states
        assert callable(getattr(tfpreempt, name))
    for name in re.findall(
        r"`checkpoint\.(\w+)\(", read("checkpoints/handles.md") + read(RAYS)
    ):
        assert hasattr(Checkpoint, name) or name in RAY, name
