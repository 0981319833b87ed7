"""The values of a record that any user may have written."""

from __future__ import annotations

import pytest

from tfpreempt.core.record_validation import is_kind


@pytest.mark.parametrize("value", [0, -0.0, 1e-17, 3, 1e10])
def test_valid_seconds(value: float) -> None:
    assert is_kind(value, "number")


@pytest.mark.parametrize("value", [5e-324, -1e-300, 1e300, 10**400, "1", True])
def test_a_quotient_of_valid_numbers_is_finite(value: object) -> None:
    """A report that divides by 5e-324 fails."""
    assert not is_kind(value, "number")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_are_finite(value: float) -> None:
    assert not is_kind(value, "seconds")
