"""Measures the time from SIGTERM to the exit of the last process, with two workers.

The files are in memory. The states are those of `states.py`. The sides take turns, each
round in a new directory. `raw` is a plain write and sync of as many bytes, in each
round. From the journal of tfpreempt, the rows also have the time to the decision, to
the commit, and from the commit to the exit. The bytes that the workers wrote in the
same rounds are a separate row (`copies_written`).
"""

from __future__ import annotations

import collections
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import copies_written, plain
from benchmarks.preemption import Strike, strike
from benchmarks.row import MEMORY, compare
from benchmarks.states import FEW, MANY, MODELS, SOME

BAR = 0.35
VICTIMS = {"worker 1": (1,), "all": (0, 1)}
CASES = [
    ("worker 1", FEW),
    ("all", FEW),
    *(("worker 1", state) for state in (SOME, MANY, *MODELS)),
]
"""Workers that get SIGTERM, and the state."""


def rows(rounds: int = 5, mebibytes: int = 512) -> Iterator[dict[str, Any]]:
    """Yields a row for each case, and the row of `copies_written`.

    Args:
        rounds: number of preemptions of each kind and side.
        mebibytes: size of a state of tensors.
    """
    found: dict[tuple[str, str], dict[str, list[Strike]]] = {
        case: {"ours": [], "theirs": []} for case in CASES
    }
    raw: dict[tuple[str, str], list[float]] = {case: [] for case in CASES}
    for _ in range(rounds):
        for case, sides in found.items():
            for side, strikes in sides.items():
                strikes.append(strike(side, VICTIMS[case[0]], mebibytes, case[1]))
            raw[case].append(plain_write(saved_mebibytes(sides["ours"][-1])))
    for case, sides in found.items():
        yield compare(
            "notice_to_exit",
            [each.seconds for each in sides["ours"]],
            [each.seconds for each in sides["theirs"]],
            raw=raw[case],
            unit="s",
            bar=BAR,
            signalled=case[0],
            state=case[1],
            mebibytes=saved_mebibytes(sides["ours"][-1]),
            codes=sorted({each.codes for each in sides["ours"]}),
            profile=profile(sides["ours"]),
        )
    sides = found[CASES[0]]
    yield copies_written.row(sides["ours"], sides["theirs"], mebibytes)


def saved_mebibytes(strike: Strike) -> int:
    """Returns the MiB of the tensors in a commit."""
    sizes: dict[str, int] = collections.defaultdict(int)
    for name, size in strike.files.items():
        if ".data-" in name:
            sizes[name.partition("/")[0]] += size
    return round(max(sizes.values()) / 2**20)


def plain_write(mebibytes: int) -> float:
    """Returns the seconds to write and sync bytes, with the threads of a commit."""
    from tfpreempt.checkpoint.bundles.bundle_writer import THREADS  # imports TensorFlow

    memory = np.ones(mebibytes << 20, np.uint8)
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        return plain.write(Path(directory, "plain"), [memory], THREADS)


def profile(strikes: Sequence[Strike]) -> dict[str, float]:
    """Returns the median seconds of each phase of tfpreempt's exit."""
    parts: dict[str, list[float]] = {"to_decision": [], "to_commit": [], "to_gone": []}
    for each in strikes:
        decided = max(times(each, "decision"), default=0.0)
        committed = max(times(each, "commit"), default=0.0)
        parts["to_decision"].append(decided)
        parts["to_commit"].append(committed - decided)
        parts["to_gone"].append(each.seconds - committed)
    return {name: round(statistics.median(v), 3) for name, v in parts.items()}


def times(strike: Strike, event: str) -> list[float]:
    """Returns the seconds from the signal to each record of an event."""
    return [r["monotonic"] for r in strike.journal if r["event"] == event]
