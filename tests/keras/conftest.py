"""What the tests of Keras share: no garbage collection while they run."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def uncollected() -> Iterator[None]:
    """Leaves the models of finished tests where they are; they need 2 GiB or less.

    To collect them takes TensorFlow up to 140 s at a time, half the time of these
    tests; what is frozen is not looked at later either.
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
