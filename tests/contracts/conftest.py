"""Servers that the contracts share, ended with the run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contracts import storage_places


@pytest.fixture(scope="session")
def storage_servers() -> Iterator[storage_places.Servers]:
    yield from storage_places.session_servers()
