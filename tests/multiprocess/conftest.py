"""One zygote for the session, one place in memory for each test, shared references."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.multiprocess.harness import Place, Zygote, place

Results = list[dict[str, Any]]
Reference = Callable[[str, int], Results]


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """The process that forks workers."""
    process = Zygote()
    try:
        yield process
    finally:
        process.close()


@pytest.fixture
def here(zygote: Zygote) -> Iterator[Place]:
    """A place of this test's own."""
    with place(zygote) as made:
        yield made


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
