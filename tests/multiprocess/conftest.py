"""The results of train.py without interruptions, computed once for all tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.multiprocess.harness import Zygote, place

Results = list[dict[str, Any]]
Reference = Callable[[str, int], Results]


@pytest.fixture(scope="session")
def reference_of(
    zygote_of: Callable[[str], Zygote],
) -> Callable[[str, str, int], Results]:
    """Like `reference`, with the framework as the first argument."""

    @functools.cache
    def run(framework: str, strategy: str, world: int) -> Results:
        with place(zygote_of(framework)) as made:
            cluster = made.train(strategy, world)
            cluster.expect(*[0] * world)
            return cluster.results()

    return run


@pytest.fixture
def reference(
    framework: str, reference_of: Callable[[str, str, int], Results]
) -> Reference:
    """`reference(strategy, world)`: results of a train.py that runs undisturbed."""
    return functools.partial(reference_of, framework)
