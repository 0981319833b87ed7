"""A program that is protected from its first line; it holds at a named moment."""

from __future__ import annotations

import os
import sys
import time
from typing import IO

import tfpreempt

directory, moment, grace = sys.argv[1:4]
config = tfpreempt.TerminationConfig(grace_period=float(grace))
protection = tfpreempt.handle_early_notices(config)

import tensorflow as tf  # noqa: E402 - protection comes first
from toy_model import Model, hold, log_to_stdout, make_strategy, say  # noqa: E402

STEPS = 6
log_to_stdout()
alone = "TF_CONFIG" not in os.environ
if moment == "before the strategy":
    hold("start")


class SlowToLoad(tfpreempt.State):
    """Holds in the midst of the handler's construction."""

    def save(self, fileobj: IO[bytes]) -> None:
        pass

    def load(self, fileobj: IO[bytes]) -> None:
        hold("start")
        if moment == "in a restore that fails":
            raise OSError("the disk has gone")


def handle(model: Model, where: str) -> tfpreempt.PreemptionCheckpointHandler:
    resolver = None if alone else model.strategy.cluster_resolver
    made = tfpreempt.PreemptionCheckpointHandler(
        resolver, model.checkpoint, where, config
    )
    say("restored", made.total_run_calls)
    return made


def train(handler: tfpreempt.PreemptionCheckpointHandler, model: Model) -> None:
    while handler.total_run_calls < STEPS:
        handler.run(model.step)


def evaluate(handler: tfpreempt.PreemptionCheckpointHandler) -> None:
    """Many batches, among which the machine may go."""
    handler.check_preemption()
    hold("start")
    for _ in range(100):
        handler.check_preemption()
        time.sleep(0.01)
    say("evaluated")


if moment in ("in the restore", "in a restore that fails"):
    slow = SlowToLoad("slow")
    protection.close()  # the handler's own start is to be safe too
model = Model(make_strategy("none" if alone else "mwms"))
handler = handle(model, directory)
train(handler, model)
if moment == "in an evaluation":
    evaluate(handler)
handler.close()
if moment == "after the loop":
    hold("start")
if moment == "between two handlers":
    hold("start")
    second = tf.train.Checkpoint(v=tf.Variable(0.0))
    other = tfpreempt.PreemptionCheckpointHandler(
        None, second, directory + "/second", config
    )
    while True:
        other.run(lambda: second.v.assign_add(1.0))
say("ended")
