"""The worker of the preemption benchmarks: the same program for both handlers.

Usage: python -m benchmarks.train SIDE DIRECTORY STATE MEBIBYTES READY

The worker trains until it is preempted. Each step adds a reduced tensor to a small
variable; the rest of the state is a state of `states.py`. The file READY appears after
some steps; at the end it has the time of the end of the last step, in monotonic
seconds.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import tensorflow as tf

from benchmarks import states

WARM_STEPS = 5
STEP_SECONDS = 0.02


def main(side: str, directory: str, state: str, mebibytes: int, ready: Path) -> None:
    """Trains until the process receives a signal."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        checkpoint, _ = states.checkpoint(state, mebibytes)
        checkpoint.total = total = tf.Variable(tf.zeros([4]))
    handler = make_handler(side, strategy.cluster_resolver, checkpoint, directory)

    @tf.function
    def reduced() -> Any:
        def on_replica() -> Any:
            context = tf.distribute.get_replica_context()
            one = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.ones([4]))
            total.assign_add(one)

        strategy.run(on_replica)

    ended = 0.0

    def step() -> None:
        nonlocal ended
        reduced()
        time.sleep(STEP_SECONDS)  # stands for a step of ordinary length
        ended = time.monotonic()

    try:
        for done in range(1, 1_000_000):
            handler.run(step)
            if done == WARM_STEPS:
                ready.touch()
    finally:
        ready.write_text(f"{ended}", encoding="ascii")


def make_handler(side: str, resolver: Any, checkpoint: Any, directory: str) -> Any:
    """Returns the handler of a side, with its defaults."""
    if side == "theirs":
        return tf.distribute.experimental.PreemptionCheckpointHandler(
            resolver, checkpoint, directory
        )
    import tfpreempt

    return tfpreempt.PreemptionCheckpointHandler(resolver, checkpoint, directory)


if __name__ == "__main__":
    side, directory, state, mebibytes, ready = sys.argv[1:]
    main(side, directory, state, int(mebibytes), Path(ready))
