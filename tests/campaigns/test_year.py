"""The year campaign's detection of growth."""

from __future__ import annotations

import pytest

from campaigns.soak import Sample
from campaigns.year import check_bounded

MEASURED: list[Sample] = [
    {"files": 30, "KiB": 200},
    {"RSS KiB": 15_000, "threads": 4, "descriptors": 18},
    {"start ms": 900},
    {"report ms": 400},
    {"journal files": 17},
]


def samples(first: Sample, **more: float) -> list[Sample]:
    """Returns 200 samples with a constant growth."""
    return [
        {unit: int(value + i * more.get(unit, 0)) for unit, value in first.items()}
        for i in range(200)
    ]


@pytest.mark.parametrize("first", MEASURED, ids=lambda first: next(iter(first)))
def test_what_stays_is_bounded(first: Sample) -> None:
    check_bounded("it", samples(first))
    with_peaks = samples(first)
    for i in range(0, 200, 5):
        with_peaks[i] = {unit: 2 * value for unit, value in first.items()}
    check_bounded("it", with_peaks)


@pytest.mark.parametrize(
    ("unit", "more"),
    [
        ("files", 0.1),
        ("KiB", 1),
        ("RSS KiB", 15),
        ("threads", 0.1),
        ("descriptors", 0.1),
        ("start ms", 6),
        ("report ms", 12),
        ("journal files", 0.2),
    ],
)
def test_what_grows_is_found(unit: str, more: float) -> None:
    [first] = [each for each in MEASURED if unit in each]
    with pytest.raises(AssertionError, match=unit):
        check_bounded("it", samples(first, **{unit: more}))
