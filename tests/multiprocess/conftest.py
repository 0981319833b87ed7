"""What train.py yields undisturbed, made once for all tests that compare with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.multiprocess.harness import Zygote, place

Results = list[dict[str, Any]]
Reference = Callable[[str, int], Results]


@pytest.fixture(scope="session")
def reference(zygote: Zygote) -> Reference:
    """`reference(strategy, world)`: results of a train.py that runs undisturbed."""
    known: dict[tuple[str, int], Results] = {}

    def run(strategy: str, world: int) -> Results:
        if (strategy, world) not in known:
            with place(zygote) as made:
                cluster = made.train(strategy, world)
                cluster.expect(*[0] * world)
                known[strategy, world] = cluster.results()
        return known[strategy, world]

    return run
