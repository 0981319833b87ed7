"""Many real workers on TensorFlow's coordination service, through many preemptions.

All run one program under MultiWorkerMirroredStrategy, on this machine's few cores. Each
round SIGTERM hits one of them, another each time, in the midst of its steps; when all
are gone, all are started again in the same directory. Times are from the signal:
`decided` until the last worker has the step that all save at, `gone` until the last
process has ended. `steps_lost` counts steps that were begun and are trained again.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from typing import Any

from tests.bench.row import alone
from tests.multiprocess.harness import RESTART, Place, Zygote, place, records

BARS = {"decided": 0.5, "gone": 1.7}  # seconds
START_SECONDS = 300.0
READY_STEPS = 3


def rows(workers: int = 16, rounds: int = 20) -> Iterator[dict[str, Any]]:
    """Two rows: until all have decided, and until all are gone.

    Args:
        workers: processes.
        rounds: preemptions.
    """
    seed = time.time_ns() % 1_000_000
    draw = random.Random(seed)
    decided, gone, lost = [], [], 0
    zygote = Zygote()
    try:
        with place(zygote) as here:
            for number in range(rounds):
                victim = draw.randrange(workers)
                decision, end, steps = _strike(here, workers, victim, number)
                decided.append(decision)
                gone.append(end)
                lost += steps
    finally:
        zygote.close()
    facts = {"workers": workers, "steps_lost": lost, "seed": seed}
    for of, seconds in (("decided", decided), ("gone", gone)):
        yield alone("many_workers", seconds, unit="s", bar=BARS[of], of=of, **facts)


def _strike(
    here: Place, workers: int, victim: int, number: int
) -> tuple[float, float, int]:
    """One life: seconds to the last decision, to the last end, and steps lost."""
    cluster = here.train("mwms", workers, "--steps", 1_000_000)
    for worker in cluster:
        worker.wait_line("step", READY_STEPS, START_SECONDS)
    began = cluster[victim].send(signal.SIGTERM)
    codes = cluster.wait()
    ended = time.time()
    if codes != [RESTART] * workers:
        raise RuntimeError(f"preemption {number} ended with {codes}\n{cluster.story()}")
    told = [r for r in records(here.checkpoints, "decision") if r["wall"] >= began]
    committed = records(here.checkpoints, "commit")[-1]["step"]
    trained = max(int(worker.lines("step")[-1][0]) for worker in cluster)
    if len(told) != workers:
        raise RuntimeError(f"{len(told)} of {workers} workers know a decision")
    last = max(record["wall"] for record in told)
    return last - began, ended - began, trained - committed
