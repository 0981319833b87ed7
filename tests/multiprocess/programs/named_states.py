"""Two workers whose States sync by collectives, registered in different order."""

from __future__ import annotations

import json
import sys
from typing import Any

import tensorflow as tf
from toy_model import INDEX, log_to_stdout, make_strategy, say

import tfpreempt
from tfpreempt.states import JsonState

directory = sys.argv[1]
log_to_stdout()
strategy = make_strategy("mwms")


class Summed(JsonState):
    """A State whose sync is a collective: the values become equal on all workers."""

    def sync(self) -> None:
        @tf.function
        def total(value: Any) -> Any:
            return strategy.reduce("SUM", value, axis=None)

        mine = tf.constant(float(self.value))
        self.value = float(total(mine))


names = ["a", "b", "c"]
states = [Summed(name, 1.0) for name in (names if INDEX == 0 else reversed(names))]
own = JsonState("own", f"of {INDEX}", per_worker=True)
with strategy.scope():
    weights = tf.Variable(0.0)
checkpoint = tf.train.Checkpoint(weights=weights)
with tfpreempt.PreemptionCheckpointHandler(
    strategy.cluster_resolver, checkpoint, directory
) as handler:
    say("restored", handler.total_run_calls, json.dumps(own.value))
    for _ in range(2):
        handler.run(strategy.run, weights.assign_add, args=(1.0,))
        own.value += "+"
        say("saved", tfpreempt.save_all_states())
        own.value += "!"
        say("loaded", tfpreempt.load_state(own), json.dumps(own.value))
    late = JsonState("late")
    say("late", tfpreempt.load_state(late))
    late.unregister()
