"""Fixtures of the tests of States."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tfpreempt.checkpoint.lease import lease


@pytest.fixture(autouse=True)
def _leases_end() -> Iterator[None]:
    """Releases the leases of a test, which would log a warning during a later test."""
    yield
    lease.release_all()
