"""Many real workers on TensorFlow's coordination service, through many preemptions.

All run one program under MultiWorkerMirroredStrategy, on this machine's few cores. Each
round SIGTERM hits one of them, another each time, in the midst of its steps; when all
are gone, all are started again in the same directory. Times are from the signal:
`decided` until the last worker has the step that all save at, `gone` until the last
process has ended. A step that is lost ends it: see `campaigns/crowd.py`, which
compares the final bytes too.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.row import alone
from campaigns.crowd import PREEMPTIONS, WORKERS, preempt
from tests.multiprocess.harness import Zygote, place

BARS = {"decided": 0.5, "gone": 1.7}  # seconds


def rows(workers: int = WORKERS, rounds: int = PREEMPTIONS) -> Iterator[dict[str, Any]]:
    """Two rows: until all have decided, and until all are gone.

    Args:
        workers: processes.
        rounds: preemptions.
    """
    seed = time.time_ns() % 1_000_000
    draw = random.Random(seed)
    found, step = [], 0
    with contextlib.closing(Zygote()) as zygote, place(zygote) as here:
        for _ in range(rounds):
            found.append(preempt(here, workers, draw.randrange(workers), step))
            step = found[-1].step
    times = {
        "decided": [each.decided for each in found],
        "gone": [each.gone for each in found],
    }
    facts = {"workers": workers, "steps_lost": 0, "seed": seed}
    for of, seconds in times.items():
        yield alone("many_workers", seconds, unit="s", bar=BARS[of], of=of, **facts)
