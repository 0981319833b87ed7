"""Per-replica values are bit-exact, for every type, on two logical devices."""

from __future__ import annotations

import pathlib

import pytest

from tests.multiprocess.harness import ROOT, Zygote

pytestmark = pytest.mark.tensorflow
_CASES = pathlib.Path(__file__).with_name("per_replica_cases.py")
_PYTEST = pathlib.Path(pytest.__file__).with_name("__main__.py")


def test_per_replica_cases(zygote: Zygote) -> None:
    """Logical devices are made once in a process, so the cases have a process."""
    command = (_PYTEST, "-q", "-p", "no:cacheprovider", _CASES)
    done = zygote.run(*command, directory=ROOT, limit=120)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
