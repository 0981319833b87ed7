"""Processes that protection ends, without TensorFlow."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

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
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(30)
"""
CLUSTER = {
    "cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]},
    "task": {"type": "worker", "index": 1},
}


def run(arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("{arguments}", arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def test_the_config_is_told_which_worker_leaves() -> None:
    """Of TF_CONFIG's cluster: there is no handler yet that could know it."""
    done = run("grace_period=0.3", TF_CONFIG=json.dumps(CLUSTER))
    assert done.returncode == 143, done.stderr
    assert done.stdout == "leaves as worker 1 of 2\n"


def test_an_exit_function_that_raises_ends_the_program_by_its_error() -> None:
    """As at a boundary; here no program is there to catch it."""
    done = run("exit_fn=fail")
    assert done.returncode == 1, done.stderr
    assert "ValueError: the exit function is wrong" in done.stderr
