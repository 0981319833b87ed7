"""Per-replica values are bit-exact, for every type, on two logical devices."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.tensorflow
_CASES = pathlib.Path(__file__).with_name("per_replica_cases.py")


def test_per_replica_cases():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", _CASES]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=_CASES.parents[2]
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
