"""Hides the environment variables of this machine from the tests."""

from __future__ import annotations

import os

import pytest

OURS = ("TFPREEMPT_", "SLURM_", "KUBERNETES_", "TPU_", "GCE_", "AWS_", "TF_CONFIG")


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(OURS):
            monkeypatch.delenv(name)
