"""`python -m benchmarks.gpu`: its output, and its programs on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from tests.multiprocess.harness import ROOT

pytestmark = pytest.mark.slow  # starts programs


def test_a_machine_without_a_gpu_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu"])
    assert gpu.main() == 2
    assert "no NVIDIA GPU" in capsys.readouterr().err


@pytest.mark.tensorflow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("framework", gpu.FRAMEWORKS)
def test_every_program_runs_on_the_cpu(framework: str) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "CPU"]
    command += ["--frameworks", framework]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=840
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (lines, done.stderr)
    assert {line["line"] for line in lines} == {
        "device",
        "exactness",
        "notice_to_exit",
        "async_save",
        "step_overhead",
    }
    assert all(line["ok"] for line in lines if "ok" in line)
