"""docs/checkpoints/intervals.md has the formula of the code and measured figures."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import read
from tfpreempt.core.deadline import needed_seconds, until_end

PAGE = read("checkpoints/intervals.md")
MEASURED = read("performance/save.md")


def test_the_formula_is_that_of_the_code() -> None:
    """For a grace period of 10 s or more; below, the reserves are shares of it."""
    found = re.search(r"step \+ ([\d.]+) . save \+ upload \+ (\d+) s", PAGE)
    assert found is not None
    factor, reserve = found.groups()
    for grace in (10.0, 30.0, 120.0):
        for save in (0.0, 1.0, 5.0):
            needed = needed_seconds(save, grace) + grace - until_end(grace)
            assert needed == pytest.approx(float(factor) * save + float(reserve))
    assert needed_seconds(0.0, 4.0) == 1.0
    assert until_end(4.0) == 3.6


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ("stall, step: waits for a device, transformer, 1,242 MiB", "stall of {} s"),
        ("slower, step: waits for a device, transformer, 1,242 MiB", "\n{} s in sum"),
        ("transformer, 1,242 MiB, ext4", "took [{} s]"),
    ],
)
def test_a_figure_of_the_example_was_measured(row: str, shown: str) -> None:
    value = re.findall(rf"^\| {re.escape(row)} \| ([\d.]+) \|", MEASURED, re.M)[0]
    assert shown.format(value) in PAGE
