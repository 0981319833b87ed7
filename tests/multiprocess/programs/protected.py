"""A program with early notices from its first line; it blocks at a named moment."""

from __future__ import annotations

import sys
import time
from typing import IO

import tfpreempt

directory, moment, grace = sys.argv[1:4]
config = tfpreempt.TerminationConfig(grace_period=float(grace))
protection = tfpreempt.handle_early_notices(config)

from toy_model import (  # noqa: E402 - protection comes first
    IS_ALONE,
    Model,
    hold,
    log_to_stdout,
    make_strategy,
    say,
)

STEPS = 6
log_to_stdout()
if moment == "before the strategy":
    hold("start")


class SlowToLoad(tfpreempt.State):
    """Blocks during the construction of the handler."""

    def save(self, fileobj: IO[bytes]) -> None:
        pass

    def load(self, fileobj: IO[bytes]) -> None:
        hold("start")
        if moment == "in a restore that fails":
            raise OSError("the disk has gone")


def handle(model: Model, where: str) -> tfpreempt.PreemptionCheckpointHandler:
    resolver = None if IS_ALONE else model.strategy.cluster_resolver
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
model = Model(make_strategy("none" if IS_ALONE else "mwms"))
handler = handle(model, directory)
train(handler, model)
if moment == "in an evaluation":
    evaluate(handler)
handler.close()
if moment == "after the loop":
    hold("start")
if moment == "between two handlers":
    hold("start")
    other = tfpreempt.PreemptionCheckpointHandler(
        None, model.checkpoint, directory + "/second", config
    )
    while True:
        other.run(model.step)
say("ended")
