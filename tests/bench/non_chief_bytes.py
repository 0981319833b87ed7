"""What a worker that is not the chief writes at a preemption.

Counted by the kernel: all bytes that worker 1 passed to write calls between the signal
and its end (`wchar` of /proc/<pid>/io, read when it is a zombie). Its own shard of the
commit and its records (journal and log) are known by their files; what is left beyond
those is the payload, to be 0 but for at most 4 KiB of control files.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tests.bench.preemption import Strike

CONTROL = 4096
WORKER = 1


def row(ours: Sequence[Strike], theirs: Sequence[Strike]) -> dict[str, Any]:
    """The row, from rounds of `notice_to_exit`."""
    beyond = [each.written[WORKER] - shard_bytes(each) for each in ours]
    mine = int(statistics.median(beyond))
    other = int(statistics.median(each.written[WORKER] for each in theirs))
    control = max(each.journal_grown[WORKER] for each in ours)
    payload = max(0, mine - control)
    return {
        "bench": "non_chief_bytes",
        "ours": mine,
        "theirs": other,
        "ratio": round(mine / other, 6),
        "unit": "bytes beyond its own shard",
        "bar": CONTROL,
        "ok": mine <= CONTROL and not payload_files(ours),
        "journal_and_log": control,
        "unexplained": payload,
        "shard": int(statistics.median(shard_bytes(each) for each in ours)),
        "payload_files": payload_files(ours),
    }


def shard_bytes(strike: Strike) -> int:
    """Size of the worker's own shard of the commit."""
    mark = f"/worker-{WORKER:04d}/"
    return sum(size for name, size in strike.files.items() if mark in f"/{name}")


def payload_files(strikes: Sequence[Strike]) -> list[str]:
    """Files of the state that appear more than once: one copy is the chief's."""
    extra = []
    for each in strikes:
        data = [name for name in each.files if ".data-" in name]
        extra += data[1:] + [name for name in data if "workertemp" in name]
    return extra
