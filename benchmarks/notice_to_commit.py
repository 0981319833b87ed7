"""Measures the time that a preemption adds to the last step and to a plain write.

The added time is the time from SIGTERM to the commit, less the rest of the last step,
less a plain write and sync of as many bytes in the same round (`raw`). Two workers
train, with files in memory, and one of the workers receives the signal. The bar is for
the 95th percentile: a tenth of the plain write, at least 100 ms.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.notice_to_exit import VICTIMS, plain_write, times
from benchmarks.preemption import strike
from benchmarks.row import alone

LEAST_BAR = 0.1  # seconds
BAR = 0.1  # of the plain write


def rows(rounds: int = 50, mebibytes: int = 512) -> Iterator[dict[str, Any]]:
    """Yields one row.

    Args:
        rounds: number of preemptions.
        mebibytes: size of the state.
    """
    raw, added = [], []
    for _ in range(rounds):
        raw.append(plain_write(mebibytes))
        struck = strike("ours", VICTIMS["worker 1"], mebibytes)
        added.append(max(times(struck, "commit")) - struck.trained - raw[-1])
    yield alone(
        "notice_to_commit",
        added,
        raw=raw,
        unit="s",
        bar=max(LEAST_BAR, round(BAR * statistics.median(raw), 3)),
        bar_of="ours_p95",
        mebibytes=mebibytes,
    )
