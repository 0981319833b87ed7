"""Counts the bytes that all workers write at a preemption, in copies of the state.

The kernel counts the bytes that each worker passed to write calls between the signal
and its exit (`wchar` of /proc/<pid>/io, read when the process is a zombie). Two parts
are subtracted, known by their files: the worker's own shard of the commit, which is not
a copy, and its records (journal and log). The remainder is expected to be one copy of
the replicated state, of which each worker writes a share; `uneven` is the largest share
divided by the smallest share. The preemptions are those of `notice_to_exit`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.preemption import Strike
from benchmarks.row import alone, side

BAR = 1.02
UNEVEN_BAR = 1.1


def row(
    ours: Sequence[Strike], theirs: Sequence[Strike], mebibytes: int
) -> dict[str, Any]:
    """Returns the row from rounds of `notice_to_exit`, for a state of given MiB."""
    state = mebibytes << 20
    shares = [share_bytes(each) for each in ours]
    copies = [sum(each) / state for each in shares]
    uneven = statistics.median(max(each) / min(each) for each in shares)
    made = alone("copies_written", copies, unit="copies of the state", bar=BAR)
    is_one = not second_copies(ours) and uneven <= UNEVEN_BAR
    return {
        **made,
        **side("theirs", [sum(share_bytes(each)) / state for each in theirs], 3),
        "ok": made["ok"] and is_one,
        "mebibytes": mebibytes,
        "uneven": round(uneven, 3),
        "second_copies": second_copies(ours),
    }


def share_bytes(strike: Strike) -> list[int]:
    """Returns the bytes written by each worker, without its shard, journal and log."""
    return [
        written - shard_bytes(strike, worker) - strike.journal_grown[worker]
        for worker, written in enumerate(strike.written)
    ]


def shard_bytes(strike: Strike, worker: int) -> int:
    """Returns the size of a worker's own shard of the commit."""
    mark = f"/worker-{worker:04d}/"
    return sum(size for name, size in strike.files.items() if mark in f"/{name}")


def second_copies(strikes: Sequence[Strike]) -> list[str]:
    """Returns the data files of a second copy of the state.

    A copy has a prefix, such as `53/ckpt`, and a data file for each thread that wrote.
    """
    extra = []
    for each in strikes:
        data = [name for name in each.files if ".data-" in name]
        own = data[0].partition(".data-")[0] if data else ""
        extra += [name for name in data if name.partition(".data-")[0] != own]
    return extra
