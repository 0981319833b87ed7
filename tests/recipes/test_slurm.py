"""docs/recipes/slurm, on a real Slurm: preempted, requeued, the same in the end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes.slurm import Slurm, why_not

RECIPE = Path(__file__).parents[2] / "docs" / "recipes" / "slurm"

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.multiprocess,
    pytest.mark.timeout(600),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    folder = tmp_path / "slurm"
    folder.mkdir()
    return Slurm(folder, (RECIPE / "slurm.conf").read_text())


def copy(folder: Path) -> Path:
    """The recipe's files, as a user has them."""
    folder.mkdir()
    for name in ("job.sh", "train.py"):
        shutil.copy(RECIPE / name, folder)
    return folder


def weights(text: str) -> str:
    (line,) = [each for each in text.splitlines() if each.startswith("weights ")]
    return line


def test_preempted_requeued_and_exact(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    slurm.environment |= {"PATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"}
    here = copy(tmp_path / "job")
    log = here / "train.log"
    with slurm.running():
        job = slurm.submit("job.sh", cwd=here)
        slurm.wait(lambda: log.exists() and "Epoch 3/" in log.read_text(), "epoch 3")
        other = slurm.submit("-p", "high", "--wrap", "sleep 1", cwd=here)
        slurm.wait_state(other, "COMPLETED")
        slurm.wait_state(job, "PENDING")
        assert slurm.state(job)["Restarts"] == "1"
        slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        slurm.wait_state(job, "COMPLETED")
    text = log.read_text()
    assert "start 0\n" in text
    assert "start 1\n" in text
    assert "committed; exiting to be restarted" in text
    assert "resumed at step" in text

    alone = copy(tmp_path / "undisturbed")
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=alone,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert weights(text) == weights(done.stdout)
    assert weights(text).endswith("epochs 40")
