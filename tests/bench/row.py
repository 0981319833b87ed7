"""One line of the benchmarks' output."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any


def compare(
    bench: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    unit: str,
    bar: float,
    digits: int = 3,
    **more: Any,
) -> dict[str, Any]:
    """Compares medians; `ok` is a figure to look at, no test asserts it.

    `ratio_of_pairs` is the median over neighbouring rounds; it suffers less where other
    programs load the machine.

    Args:
        bench: its name.
        ours: measurements of tfpreempt.
        theirs: measurements of TensorFlow's handler, interleaved with ours.
        unit: of both.
        bar: the largest ratio that is good.
        digits: after the decimal point.
        **more: further facts for the line.
    """
    mine, other = statistics.median(ours), statistics.median(theirs)
    ratio = mine / other if other > 0 else float("inf")
    pairs = [a / b for a, b in zip(ours, theirs, strict=True) if b > 0]
    return {
        "bench": bench,
        "ours": round(mine, digits),
        "theirs": round(other, digits),
        "ratio": round(ratio, 3),
        "ratio_of_pairs": round(statistics.median(pairs), 3) if pairs else None,
        "unit": unit,
        "bar": bar,
        "ok": ratio <= bar,
        "ours_all": [round(value, digits) for value in ours],
        "theirs_all": [round(value, digits) for value in theirs],
        **more,
    }


def show(row: dict[str, Any]) -> None:
    """Prints it as one line of JSON."""
    print(json.dumps(row), flush=True)
