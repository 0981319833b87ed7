"""From SIGTERM to the last process gone: two workers, 512 MiB, memory as the disk.

The sides take turns, each round in a fresh directory. `raw` is a plain write and sync
of as many bytes, in each round. The rows say too where our time goes, from our journal:
to the decision, to the commit, and from there to the end. What the workers wrote in the
same rounds is a row of its own (`copies_written`).
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import copies_written, plain
from benchmarks.preemption import Strike, strike
from benchmarks.row import MEMORY, compare

BAR = 0.35
VICTIMS = {"worker 1": (1,), "all": (0, 1)}
CASES = [("worker 1", 16), ("all", 16), ("worker 1", 512), ("worker 1", 4096)]
"""Workers that get SIGTERM, and the number of tensors of the state."""


def rows(rounds: int = 5, mebibytes: int = 512) -> Iterator[dict[str, Any]]:
    """One row for each case, and the row of `copies_written`.

    Args:
        rounds: preemptions of each kind and side, in turn.
        mebibytes: size of the state.
    """
    found: dict[tuple[str, int], dict[str, list[Strike]]] = {
        case: {"ours": [], "theirs": []} for case in CASES
    }
    raw: dict[tuple[str, int], list[float]] = {case: [] for case in CASES}
    for _ in range(rounds):
        for case, sides in found.items():
            victims, tensors = VICTIMS[case[0]], case[1]
            raw[case].append(plain_write(mebibytes))
            for side, strikes in sides.items():
                strikes.append(strike(side, victims, mebibytes, tensors))
    for case, sides in found.items():
        yield compare(
            "notice_to_exit",
            [each.seconds for each in sides["ours"]],
            [each.seconds for each in sides["theirs"]],
            raw=raw[case],
            unit="s",
            bar=BAR,
            signalled=case[0],
            tensors=case[1],
            mebibytes=mebibytes,
            codes=sorted({each.codes for each in sides["ours"]}),
            profile=profile(sides["ours"]),
        )
    sides = found[CASES[0]]
    yield copies_written.row(sides["ours"], sides["theirs"], mebibytes)


def plain_write(mebibytes: int) -> float:
    """Seconds to write and sync so many bytes, by as many threads as a commit has."""
    from tfpreempt.checkpoint.tensors.bundle_writer import THREADS  # imports TensorFlow

    memory = np.ones(mebibytes << 20, np.uint8)
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        return plain.write(Path(directory, "plain"), [memory], THREADS)


def profile(strikes: Sequence[Strike]) -> dict[str, float]:
    """Median seconds of each part of our way out."""
    parts: dict[str, list[float]] = {"to_decision": [], "to_commit": [], "to_gone": []}
    for each in strikes:
        decided = max(times(each, "decision"), default=0.0)
        committed = max(times(each, "commit"), default=0.0)
        parts["to_decision"].append(decided)
        parts["to_commit"].append(committed - decided)
        parts["to_gone"].append(each.seconds - committed)
    return {name: round(statistics.median(v), 3) for name, v in parts.items()}


def times(strike: Strike, event: str) -> list[float]:
    """Seconds from the signal to each record of an event."""
    return [r["monotonic"] for r in strike.journal if r["event"] == event]
