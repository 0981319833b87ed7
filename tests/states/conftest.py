"""Fixtures of the tests of States."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tfpreempt.checkpoint.lease import lease


@pytest.fixture(autouse=True)
def _leases_end() -> Iterator[None]:
    """A lease that a test leaves would be missed, and said so, amid a later test."""
    yield
    lease.release_all()
