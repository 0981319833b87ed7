"""The soak campaign's detection of growth."""

from __future__ import annotations

import pytest

from campaigns.soak import ENOUGH, KEPT, Sample, check_flat

SUPERVISOR = {"threads": 4, "descriptors": 18, "KiB": 15_000}
WORKER = {"threads": 115, "descriptors": 15, "KiB": 363_000, "steps": 1000}
FILES = {"files": 32}


def samples(first: Sample, **more: float) -> dict[str, list[Sample]]:
    """Returns the samples of an hour, with a constant growth."""
    return {
        "it": [
            {unit: int(value + i * more.get(unit, 0)) for unit, value in first.items()}
            for i in range(10 * ENOUGH)
        ]
    }


def test_constant_or_fluctuating_memory_is_flat() -> None:
    for sample in (SUPERVISOR, WORKER, FILES):
        check_flat(samples(sample))
        busy = {unit: value + 4 for unit, value in sample.items()}
        check_flat({"it": [sample, sample, busy] * 10 * ENOUGH})


def test_memory_that_tensorflow_keeps_per_step_is_flat() -> None:
    check_flat(samples(WORKER, steps=50, KiB=50 * KEPT))


@pytest.mark.parametrize(
    ("first", "more"),
    [
        (SUPERVISOR, {"descriptors": 0.1}),
        (SUPERVISOR, {"threads": 0.1}),
        (SUPERVISOR, {"KiB": 20}),
        (WORKER, {"steps": 50, "KiB": 50 * KEPT + 400}),
        (FILES, {"files": 0.5}),
    ],
)
def test_growing_memory_is_found(first: Sample, more: dict[str, float]) -> None:
    with pytest.raises(AssertionError, match="more, it"):
        check_flat(samples(first, **more))
