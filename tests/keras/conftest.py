"""No garbage collection during the Keras tests."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def uncollected() -> Iterator[None]:
    """Keeps the models of finished tests in memory, at most 2 GiB.

    A garbage collection of these models takes TensorFlow up to 140 s, half of the time
    of these tests. Frozen objects are not traversed by later collections.
    """
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


@pytest.fixture
def summaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scalar summaries without the package tensorboard, which need not be there."""
    from tests.fakes.summaries.tensorboard.summary.v2 import scalar

    for name in ("tensorboard", "tensorboard.summary", "tensorboard.summary.v2"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["tensorboard.summary.v2"].scalar = scalar  # type: ignore[attr-defined]
