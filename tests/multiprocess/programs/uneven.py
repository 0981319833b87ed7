"""Workers without collectives: each worker trains its own number of steps."""

from __future__ import annotations

import sys

from toy_model import INDEX, hold, log_to_stdout, make_strategy, say

from tfpreempt import PreemptionCheckpointHandler
from tfpreempt.states import JsonState

directory, steps = sys.argv[1], int(sys.argv[2])
log_to_stdout()
strategy = make_strategy("mwms")
local = JsonState("local", 0, per_worker=True)
shared = JsonState("shared", 0)  # the chief's value is saved
handler = PreemptionCheckpointHandler(strategy.cluster_resolver, None, directory)
say("restored", handler.total_run_calls)


def train_step() -> None:
    if handler.total_run_calls == 6:
        hold()
    local.value += 1
    shared.value += 1


while handler.total_run_calls < steps:
    handler.run(train_step)
say("trained", INDEX)
handler.close()
say("closed", INDEX)
