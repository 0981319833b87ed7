"""The worker of `parallel_save`: saves in turn by all workers, and by the chief alone.

Usage: python -m benchmarks.parallel_program DIRECTORY STATE MEBIBYTES ROUNDS REPORT

The state is one of `states.py`. The chief writes a JSON object to REPORT: the seconds
of each save, from the boundary at which all workers wait to the commit, by side; the
number of variables, and their MiB.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import tensorflow as tf

import tfpreempt
from benchmarks import states
from tfpreempt.checkpoint.tensors.replica_parallel import ReplicaParallelWriter


def _never(parts: ReplicaParallelWriter, tensors: object) -> bool:
    """Returns False, so the chief writes the whole state."""
    return False


def main(directory: str, state: str, mebibytes: int, rounds: int, report: Path) -> None:
    """Saves several times on each side, after a warm-up of each side."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        checkpoint, variables = states.checkpoint(state, mebibytes)
    resolver = strategy.cluster_resolver

    @tf.function
    def meet() -> None:
        def on_replica() -> None:
            context = tf.distribute.get_replica_context()
            context.all_reduce(tf.distribute.ReduceOp.SUM, tf.ones([1]))

        strategy.run(on_replica)

    found: dict[str, list[float]] = {"all": [], "chief": []}
    is_worth_it = ReplicaParallelWriter.is_worth_it
    with tfpreempt.PreemptionCheckpointHandler(
        resolver, checkpoint, directory, max_to_keep=1
    ) as handler:
        for number in range(rounds + 1):
            for side, seconds in found.items():
                is_dealt = side == "all"
                ReplicaParallelWriter.is_worth_it = is_worth_it if is_dealt else _never  # type: ignore[method-assign]
                handler.run(meet)
                began = time.perf_counter()
                handler.save()
                if number:
                    seconds.append(time.perf_counter() - began)
    if resolver.task_id == 0:
        size = sum(np.asarray(variable).nbytes for variable in variables)
        facts = {"tensors": len(variables), "mebibytes": round(size / 2**20)}
        report.write_text(json.dumps({"seconds": found, **facts}))


if __name__ == "__main__":
    place, state, *sizes, told = sys.argv[1:]
    main(place, state, *map(int, sizes), Path(told))
