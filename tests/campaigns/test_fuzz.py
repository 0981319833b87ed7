"""The campaign of random inputs: valid seeds, and the kept inputs that found faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from campaigns import corpus
from campaigns.fuzz import KEPT, KNOWN, TARGETS, attempt, measured

pytestmark = pytest.mark.slow  # reads a large corpus

NAMED = {target.name: target for target in TARGETS}


@pytest.fixture(autouse=True)
def _measured() -> Iterator[None]:
    with measured():
        yield


@pytest.mark.parametrize("name", NAMED)
def test_seeds_are_read_as_they_are(name: str, tmp_path: Path) -> None:
    """Changes of an input that is refused at once find nothing."""
    target = NAMED[name]
    for number, seed in enumerate(target.seeds):
        assert not attempt(target, seed, tmp_path / f"{number}")


@pytest.mark.parametrize("name", NAMED)
def test_kept_inputs_are_refused_or_read(name: str, tmp_path: Path) -> None:
    for number, data in enumerate(KNOWN[name]):
        attempt(NAMED[name], data, tmp_path / f"{number}")


def test_all_that_is_kept_belongs_to_a_target() -> None:
    names = {corpus.path_of(name).name for name in NAMED}
    assert {each.name for each in corpus.CORPUS.iterdir()} <= names
    assert sum(each.stat().st_size for each in corpus.CORPUS.iterdir()) < 200_000


@pytest.mark.parametrize(("name", "data"), KEPT, ids=[f"{n}" for n in range(len(KEPT))])
def test_inputs_that_found_a_fault_are_refused_or_read(
    name: str, data: bytes, tmp_path: Path
) -> None:
    attempt(NAMED[name], data, tmp_path)
