"""The examples of README are taken from its text and run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks, every_block, read
from tests.multiprocess.harness import RESTART, Place, Zygote

START = "quick-start.md"
README = (ROOT / "README.md").read_text(encoding="utf-8")


BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)


def block(containing: str) -> str:
    """Returns the one program that contains a text."""
    (found,) = (each for each in BLOCKS if containing in each)
    return str(found)


def environment() -> dict[str, str]:
    """Returns a user's environment: `python` and `tfpreempt` are on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"}


def test_it_is_read_in_a_few_minutes() -> None:
    assert len(README.splitlines()) <= 120


def test_the_quick_start_has_the_same_programs() -> None:
    assert blocks(START) == BLOCKS
    commands = re.findall(r"^```bash\n(.*?)^```$", README, re.M | re.S)
    there = blocks(START, "bash")
    assert len(commands) == 2
    assert [commands[0] == there[0], commands[1] in there[-1]] == [True, True]


@pytest.mark.parametrize("page", [START, "live.md", "report.md"])
def test_code_fits_into_88_columns(page: str) -> None:
    code = "".join(every_block(read(page) + README))
    assert [line for line in code.splitlines() if len(line) > 88] == []


def test_linked_files_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", README)) <= targets


def write(directory: Path, name: str, containing: str) -> Path:
    """Writes an example into a file there."""
    file = directory / name
    file.write_text(block(containing), encoding="utf-8")
    return file


def preempt(here: Place, program: Path, at: str) -> None:
    """Sends SIGTERM to an example after some output; the example exits to restart."""
    cluster = here.start(str(program))
    cluster[0].wait_text(at)
    cluster[0].send(signal.SIGTERM)
    cluster.expect(RESTART)


def run_to_end(zygote: Zygote, program: Path) -> str:
    done = zygote.run(program, directory=program.parent, limit=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.tensorflow
def test_run_example_commits_on_sigterm_and_resumes(
    zygote: Zygote, here: Place
) -> None:
    program = write(here.path, "train.py", "PreemptionCheckpointHandler")
    preempt(here, program, "step 100,")
    second = run_to_end(zygote, program)
    assert "step 0," not in second
    assert "step 1900," in second
    assert "step" not in run_to_end(zygote, program)


@pytest.mark.tensorflow
def test_fit_example_commits_on_sigterm_and_resumes(
    zygote: Zygote, here: Place
) -> None:
    program = write(here.path, "fit.py", "PreemptionCallback")
    preempt(here, program, "Epoch 3/20")
    second = run_to_end(zygote, program)
    assert "Epoch 1/20" not in second
    assert "epochs in history: 20" in second
    again = run_to_end(zygote, program)
    assert "Epoch" not in again
    assert "epochs in history: 20" in again


@pytest.mark.tensorflow
@pytest.mark.multiprocess
def test_the_supervisor_example_runs(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "PreemptionCheckpointHandler")
    done = subprocess.run(
        ["bash", "-c", blocks(START, "bash")[-1]],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, rest = done.stdout.split("exit code 143")
    assert "step 0," in first
    assert "step 1900," not in first
    assert "step 0," not in rest
    assert rest.count("step 1900,") == 1  # by the second run, not by the third
