"""What the tests of Keras share: no garbage collection while they run."""

from __future__ import annotations

import gc
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
