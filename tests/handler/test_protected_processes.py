"""Processes that protection ends, without TensorFlow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfpreempt.checkpoint import layout

pytestmark = pytest.mark.timeout(60)

PROGRAM = """
import os, signal, time
import tfpreempt


class Config(tfpreempt.TerminationConfig):
    def leave(self, committed, cluster=None, *, mirrored=True):
        print("leaves as worker", cluster.worker, "of", cluster.world)
        super().leave(committed, cluster, mirrored=mirrored)


def fail():
    raise ValueError("the exit function is wrong")


tfpreempt.protect(Config({arguments}))
{before}
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(30)
"""
CLUSTER = {
    "cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]},
    "task": {"type": "worker", "index": 1},
}


def run(
    arguments: str = "", before: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program that is told to go.

    Args:
        arguments: of its config.
        before: what it does first.
        **environment: more of its environment.
    """
    program = PROGRAM.replace("{arguments}", arguments).replace("{before}", before)
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def test_the_config_is_told_which_worker_leaves() -> None:
    """Of TF_CONFIG's cluster: there is no handler yet that could know it."""
    done = run("grace_period=0.3", TF_CONFIG=json.dumps(CLUSTER))
    assert done.returncode == 143, done.stderr
    assert done.stdout == "leaves as worker 1 of 2\n"


def test_the_lease_of_the_directory_goes_with_the_process(tmp_path: Path) -> None:
    """A start on another machine cannot see that this process is dead."""
    before = (
        "counter = tfpreempt.states.StepCounter('step'); tfpreempt.save_all_states()"
    )
    done = run(before=before, TFPREEMPT_CHECKPOINT_DIR=str(tmp_path))
    assert done.returncode == 143, done.stderr
    assert list(tmp_path.glob("*/COMMITTED"))
    assert list(tmp_path.joinpath(layout.LEASE).glob("*")) == []


def test_an_exit_function_that_raises_ends_the_program_by_its_error() -> None:
    """As at a boundary; here no program is there to catch it."""
    done = run("exit_fn=fail")
    assert done.returncode == 1, done.stderr
    assert "ValueError: the exit function is wrong" in done.stderr
