"""From SIGTERM to the last process gone: two workers, 512 MiB, memory as the disk.

The sides take turns, each round in a fresh directory. The rows say too where our time
goes, from our journal: to the decision, to the commit, and from there to the end.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from tests.bench.preemption import Strike, strike
from tests.bench.row import compare

BAR = 0.5
VICTIMS = {"worker 1": (1,), "all": (0, 1)}

Rounds = dict[str, dict[str, list[Strike]]]


def run(rounds: int, mebibytes: int) -> Rounds:
    """Strikes both sides in turn; by whom the signal hits and by side."""
    found: Rounds = {name: {"ours": [], "theirs": []} for name in VICTIMS}
    for _ in range(rounds):
        for name, victims in VICTIMS.items():
            for side, strikes in found[name].items():
                strikes.append(strike(side, victims, mebibytes))
    return found


def rows(found: Rounds, mebibytes: int) -> Iterator[dict[str, Any]]:
    """One row for each choice of victims."""
    for name, sides in found.items():
        yield compare(
            "notice_to_exit",
            [each.seconds for each in sides["ours"]],
            [each.seconds for each in sides["theirs"]],
            unit="s",
            bar=BAR,
            signalled=name,
            state_mebibytes=mebibytes,
            codes=sorted({each.codes for each in sides["ours"]}),
            profile=profile(sides["ours"]),
            load=round(os.getloadavg()[0], 1),
        )


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
