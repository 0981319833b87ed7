"""README's examples are what they say: they are taken from its text and run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str, containing: str = "") -> str:
    """The one code block of a language that has a text in it."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)
    (found,) = (each for each in blocks if containing in each)
    return str(found)


def environment() -> dict[str, str]:
    """As a user's shell has it: `python` and `tfpreempt` are on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    program = block("python", "PreemptionCheckpointHandler")
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    return tmp_path


def test_linked_files_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", README)) <= targets


def preempt(command: list[str], directory: Path, at: str) -> None:
    """Sends SIGTERM to an example once it has said something; it leaves to restart."""
    log = directory / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=directory, env=environment(), stdout=file, stderr=file
        )
        try:
            limit = time.monotonic() + 120
            while at not in log.read_text("utf-8"):
                assert process.poll() is None, log.read_text("utf-8")
                assert time.monotonic() < limit, log.read_text("utf-8")
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 143, log.read_text("utf-8")
        finally:
            process.kill()


@pytest.mark.tensorflow
def test_run_example_commits_on_sigterm_and_goes_on(directory: Path) -> None:
    command = [sys.executable, "train.py"]
    preempt(command, directory, "step 100,")
    second = run_to_end(command, directory)
    assert "step 0," not in second
    assert "step 1900," in second
    assert "step" not in run_to_end(command, directory)


@pytest.mark.tensorflow
def test_fit_example_commits_on_sigterm_and_goes_on(tmp_path: Path) -> None:
    program = block("python", "PreemptionCallback")
    (tmp_path / "fit.py").write_text(program, encoding="utf-8")
    command = [sys.executable, "fit.py"]
    preempt(command, tmp_path, "Epoch 3/20")
    second = run_to_end(command, tmp_path)
    assert "Epoch 1/20" not in second
    assert "epochs in history: 20" in second
    again = run_to_end(command, tmp_path)
    assert "Epoch" not in again
    assert "epochs in history: 20" in again


def run_to_end(command: list[str], directory: Path) -> str:
    done = subprocess.run(
        command,
        cwd=directory,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.tensorflow
@pytest.mark.multiprocess
def test_supervisor_example_runs_as_it_stands(directory: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", block("bash")],
        cwd=directory,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, rest = done.stdout.split("left with exit code 143")
    assert "step 0," in first
    assert "step 1900," not in first
    assert "step 0," not in rest
    assert rest.count("step 1900,") == 1  # by the second run, not by the third
