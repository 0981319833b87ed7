"""The core where TensorFlow is missing, or is imported late, on real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.gcs import GcsServer
from tests.multiprocess.harness import LIMIT, PROGRAMS, RESTART, ROOT
from tests.without_tensorflow import python_path_without

pytestmark = pytest.mark.multiprocess
PROGRAM = (sys.executable, str(PROGRAMS / "states_alone.py"))
COMMAND = (sys.executable, "-m", "tfpreempt")


@pytest.fixture
def without(tmp_path: Path) -> dict[str, str]:
    """The environment of processes for which TensorFlow is missing."""
    missing = python_path_without(tmp_path / "missing")
    return environment(os.pathsep.join([missing, str(ROOT)]))


def environment(python_path: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TFPREEMPT_")}
    kept |= {"PYTHONPATH": python_path, "TFPREEMPT_PLATFORM": "generic"}
    return kept | {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}


def run(
    *words: object, env: dict[str, str], code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; checks its exit code."""
    done = subprocess.run(
        [str(word) for word in words],
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done


def line(done: subprocess.CompletedProcess[str], word: str) -> str:
    """Returns the last line with a word, from the word on."""
    found = [each for each in done.stdout.splitlines() if word in each]
    return found[-1][found[-1].index(word) :]


@pytest.fixture
def gcs() -> Iterator[GcsServer]:
    with GcsServer() as server:
        yield server


@pytest.fixture
def undisturbed(tmp_path: Path, without: dict[str, str]) -> str:
    """The last line of a run that no notice disturbs."""
    done = run(*PROGRAM, tmp_path / "undisturbed", env=without)
    assert line(done, "TensorFlow") == "TensorFlow False"
    return line(done, "final")


def test_a_process_is_preempted_and_another_one_resumes_exactly(
    tmp_path: Path, without: dict[str, str], undisturbed: str
) -> None:
    directory = tmp_path / "run"
    first = run(*PROGRAM, directory, 6, env=without, code=RESTART)
    assert "final" not in first.stdout
    second = run(*PROGRAM, directory, env=without)
    assert line(second, "starts") == "starts 7"
    assert line(second, "final") == undisturbed


@pytest.mark.parametrize("is_url", [False, True])
def test_a_process_on_another_machine_resumes_from_the_mirror(
    tmp_path: Path,
    without: dict[str, str],
    gcs: GcsServer,
    undisturbed: str,
    is_url: bool,
) -> None:
    """For a directory that is lost with its disk, and for a URL."""
    for number, code in ((6, RESTART), (99, 0)):
        machine = tmp_path / f"machine-{number}"
        machine.mkdir()
        env = without | {"TFPREEMPT_SCRATCH_DIR": str(machine)} | gcs.environment()
        directory = "gs://bucket/run" if is_url else machine / "run"
        if not is_url:
            mirror = (tmp_path / "mirror").as_uri()
            env |= {"TFPREEMPT_MIRROR_DIR": mirror}
        done = run(*PROGRAM, directory, number, env=env, code=code)
    assert line(done, "starts") == "starts 7"
    assert line(done, "final") == undisturbed


def test_a_supervised_run_and_the_output_of_the_commands(
    tmp_path: Path, without: dict[str, str], gcs: GcsServer, undisturbed: str
) -> None:
    directory, mirror = tmp_path / "run", "gs://bucket/run"
    mirrored = {"TFPREEMPT_MIRROR_DIR": mirror}
    env = without | gcs.environment() | mirrored
    supervised = (*COMMAND, "run", "--checkpoint-dir", directory, "--", *PROGRAM)
    done = run(*supervised, directory, 3, 8, env=env)
    assert line(done, "final") == undisturbed

    def shown(*words: object) -> Any:
        return json.loads(run(*COMMAND, *words, "--json", env=env).stdout)

    causes = [each["cause"] for each in shown("report", directory)["interruptions"]]
    assert causes == ["preemption"] * 2
    [worker] = shown("status", directory)["workers"]
    assert (worker["state"], worker["step"]) == ("finished", 12)
    for place in (directory, mirror):
        assert shown("inspect", place)[0]["step"] == 12
        assert all(each["state"] == "committed" for each in shown("verify", place))


@pytest.mark.tensorflow
def test_a_program_that_imports_tensorflow_in_its_first_step(tmp_path: Path) -> None:
    """The random numbers of TensorFlow are those of the undisturbed run as well."""
    late, env = "--late-tensorflow", environment(str(ROOT))
    undisturbed = run(*PROGRAM, late, tmp_path / "undisturbed", env=env)
    supervised = (*COMMAND, "run", "--checkpoint-dir", tmp_path / "run", "--", *PROGRAM)
    done = run(*supervised, late, tmp_path / "run", 6, env=env)
    assert line(done, "final") == line(undisturbed, "final")
