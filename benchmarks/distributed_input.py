"""Measures a step with distributed input, by tfpreempt's iterator and by TensorFlow's.

The iterator of `tfpreempt.data.distribute` splits a global batch when a step reads the
batch; as an option, it copies slices to the devices ahead. TensorFlow's own iterator
always copies ahead, and cannot be saved. A step reads a batch of many MiB, and reads
each number once; a batch of no MiB shows the cost of reading a batch. Both iterators
are in one process. Steps of the two iterators take turns, after a pause in which both
can read ahead.

Usage: python -m benchmarks.distributed_input REPLICAS ROUNDS MEBIBYTES COPIED, in a
separate process, because the number of logical devices is fixed at TensorFlow's start.
COPIED is "ahead" or "by the step". Prints the milliseconds of each round's step by
tfpreempt's iterator and by TensorFlow's, as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.row import compare

BAR = 1.02
AHEAD, BY_THE_STEP = "ahead", "by the step"
ROWS = 64
STEPS = 5
"""Steps in a row, by one iterator; more than either reads ahead."""
PAUSE = 0.15
WARM = 3


def rows(rounds: int = 61, mebibytes: int = 64) -> Iterator[dict[str, Any]]:
    """Yields a row for one replica, and rows for two. The bar is for large batches.

    Args:
        rounds: number of rounds of steps with each iterator.
        mebibytes: size of a global batch.
    """
    # Otherwise TensorFlow logs each prefetched batch.
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"}
    for replicas, size, copied in (
        (1, mebibytes, BY_THE_STEP),
        *((2, mebibytes, BY_THE_STEP), (2, mebibytes, AHEAD)),
        *((2, 0, BY_THE_STEP), (2, 0, AHEAD)),
    ):
        command = [sys.executable, "-m", "benchmarks.distributed_input"]
        arguments = map(str, (replicas, rounds, size, copied))
        done = subprocess.run(
            [*command, *arguments],
            check=True,
            stdout=subprocess.PIPE,
            env=environment,
        )
        ours, theirs = json.loads(done.stdout.splitlines()[-1])
        yield compare(
            *("distributed_input", ours, theirs),
            unit="ms",
            bar=BAR if size else None,
            replicas=replicas,
            mebibytes=size,
            copied=copied,
        )


def measure(
    replicas: int, rounds: int, mebibytes: int, copied: str
) -> list[list[float]]:
    """Returns the milliseconds of a step with each iterator, by round."""
    import tensorflow as tf

    from tfpreempt.data import distribute

    devices = tf.config.list_physical_devices("CPU")
    parts = [tf.config.LogicalDeviceConfiguration()] * replicas
    tf.config.set_logical_device_configuration(devices[0], parts)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    whole = tf.random.stateless_uniform([ROWS, (mebibytes << 18) // ROWS], [1, 2])

    def batch(number: tf.Tensor) -> tf.Tensor:
        return whole + tf.cast(number, tf.float32)

    def data() -> tf.data.Dataset:
        options = tf.data.Options()
        options.experimental_symbolic_checkpoint = copied == AHEAD
        batches = tf.data.Dataset.range(1_000_000).map(batch).prefetch(STEPS)
        return batches.with_options(options)

    def looked_at(part: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.tanh(part))

    def step(iterator: Any) -> tf.Tensor:
        found = strategy.run(looked_at, (next(iterator),))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, found, axis=None)

    options = tf.distribute.InputOptions() if copied == AHEAD else None
    iterators = (
        distribute(data(), strategy, options),
        iter(strategy.experimental_distribute_dataset(data())),
    )
    sides = [(each, tf.function(step), []) for each in iterators]
    for turn in range(WARM + rounds):
        for iterator, compiled, taken in sides if turn % 2 else sides[::-1]:
            time.sleep(PAUSE)
            began = time.perf_counter()
            for _ in range(STEPS):
                float(compiled(iterator))
            if turn >= WARM:
                taken.append((time.perf_counter() - began) / STEPS * 1e3)
    return [taken for _, _, taken in sides]


if __name__ == "__main__":
    *sizes, how = sys.argv[1:]
    print(json.dumps(measure(*map(int, sizes), how)))
