"""Workers without collectives: each trains as many steps as it is told."""

from __future__ import annotations

import sys

import tensorflow as tf
from toy_model import INDEX, hold, log_to_stdout, make_strategy, say

from tfpreempt import PreemptionCheckpointHandler

directory, steps = sys.argv[1], int(sys.argv[2])
log_to_stdout()
strategy = make_strategy("mwms")
local = tf.Variable(0.0)
handler = PreemptionCheckpointHandler(
    strategy.cluster_resolver, tf.train.Checkpoint(local=local), directory
)
say("restored", handler.total_run_calls)


def train_step() -> None:
    if handler.total_run_calls == 6:
        hold()
    local.assign_add(1.0)


while handler.total_run_calls < steps:
    handler.run(train_step)
say("trained", INDEX)
handler.close()
say("closed", INDEX)
