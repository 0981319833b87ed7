"""Measures many real workers on TensorFlow's coordination service, in many preemptions.

All workers run one program under MultiWorkerMirroredStrategy, on the few cores of this
machine. In each round SIGTERM hits a different worker during a step. When all workers
have exited, all are restarted in the same directory. Times start at the signal:
`decided` is the time until the last worker knows the decided step, `gone` the time
until the last process has exited. A lost step ends the bench. `campaigns/crowd.py`
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
    """Yields two rows: the time to the decision, and to the exit of all workers.

    Args:
        workers: number of processes.
        rounds: number of preemptions.
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
