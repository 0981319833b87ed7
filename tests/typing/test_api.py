"""The public surface, as a strict type checker sees it from outside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_public_surface_is_typed() -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"]
    command += ["tests/typing/api.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
