"""A user's loop on MultiWorkerMirroredStrategy, with a bad batch on a worker.

    loop_bad_steps_workers.py DIRECTORY WORKER BAD KIND [HOLD]

KIND is "loss" if only the loss of the worker is NaN, "variable" if the variables of all
workers become NaN too, "close" for a loop that saves only in `close()`, "save" for a
loop that calls `save()` after each step, "unclosed" for a loop without `close()`, or
"without" if the data lack the batch. In step HOLD each worker blocks while the test
wants.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from toy_model import INDEX, hold, make_strategy, say

import tfpreempt
from tfpreempt.states import JsonState

directory, worker, bad, kind = sys.argv[1], *map(int, sys.argv[2:4]), sys.argv[4]
holds = [int(each) for each in sys.argv[5:]]
STEPS = 9
batches = np.random.default_rng(INDEX).normal(size=(STEPS, 3)).astype("float32")
if kind == "without":
    batches = np.delete(batches, bad, 0)
elif worker == INDEX:
    batches[bad] = np.nan
strategy = make_strategy("mwms")
with strategy.scope():
    weights = tf.Variable(tf.zeros([3]))
    total = tf.Variable(  # a save adds the values of all workers
        0.0,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
        trainable=False,
    )


class Reader(Iterator[Any]):
    """An iterator over the batches of this worker, whose position is saved."""

    def __init__(self) -> None:
        self.position = JsonState("position", 0)

    def __next__(self) -> Any:
        self.position.value += 1
        return tf.constant(batches[self.position.value - 1])


@tf.function
def update(batch: Any) -> Any:
    def replica(batch: Any) -> Any:
        loss = tf.reduce_sum(batch**2)
        given = batch
        if kind != "variable":
            given = tf.where(tf.math.is_nan(batch), tf.ones_like(batch), batch)
        context = tf.distribute.get_replica_context()
        weights.assign_sub(0.1 * context.all_reduce("sum", given + 0.1 * weights))
        total.assign_add(given[0])
        return loss if kind != "variable" else tf.zeros_like(loss)

    return strategy.run(replica, (batch,))


def step(reader: Reader) -> Any:
    if handler.total_run_calls in holds:
        hold()
    return update(next(reader))


reader = Reader()
handler = tfpreempt.PreemptionCheckpointHandler(
    strategy.cluster_resolver,
    tf.train.Checkpoint(weights=weights, total=total),
    directory,
    save_freq=2 if kind in ("loss", "variable", "without") else None,
    on_bad_step=None if kind == "without" else tfpreempt.BadSteps(),
)
with contextlib.nullcontext() if kind == "unclosed" else handler:
    while handler.total_run_calls < len(batches):
        handler.run(step, reader)
        if kind == "save":
            saved = handler.save()
            assert saved is None or saved.step == handler.total_run_calls
say("final", weights.numpy().tobytes().hex(), total.numpy())
