"""What a worker that is not the chief writes at a preemption.

Counted by the kernel: all bytes that worker 1 passed to write calls between the signal
and its end (`wchar` of /proc/<pid>/io, read when it is a zombie). Its own shard of the
commit and its records (journal and log) are known by their files; what is left beyond
those is the payload, to be 0 but for at most 4 KiB of control files. The preemptions
are those of `notice_to_exit`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tests.bench.preemption import Strike
from tests.bench.row import alone, side

CONTROL = 4096
WORKER = 1


def row(
    ours: Sequence[Strike], theirs: Sequence[Strike], mebibytes: int
) -> dict[str, Any]:
    """The row, from rounds of `notice_to_exit` with a state of so many MiB."""
    beyond = [each.written[WORKER] - shard_bytes(each) for each in ours]
    made = alone("non_chief_bytes", beyond, unit="bytes", bar=CONTROL, digits=0)
    control = max(each.journal_grown[WORKER] for each in ours)
    return {
        **made,
        **side("theirs", [each.written[WORKER] for each in theirs], 0),
        "ok": made["ok"] and not payload_files(ours),
        "mebibytes": mebibytes,
        "journal_and_log": control,
        "unexplained": max(0, int(made["ours"]) - control),
        "shard": int(statistics.median(shard_bytes(each) for each in ours)),
        "payload_files": payload_files(ours),
    }


def shard_bytes(strike: Strike) -> int:
    """Size of the worker's own shard of the commit."""
    mark = f"/worker-{WORKER:04d}/"
    return sum(size for name, size in strike.files.items() if mark in f"/{name}")


def payload_files(strikes: Sequence[Strike]) -> list[str]:
    """Data files of a second copy of the state: one copy is the chief's.

    A copy has a prefix, such as `53/ckpt`, and a data file for each thread that wrote.
    """
    extra = []
    for each in strikes:
        data = [name for name in each.files if ".data-" in name]
        own = data[0].partition(".data-")[0] if data else ""
        extra += [name for name in data if name.partition(".data-")[0] != own]
    return extra
