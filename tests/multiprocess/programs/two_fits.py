"""Two fits in one process of two workers, handlers that are dropped, many notices."""

from __future__ import annotations

import gc
import sys

from toy_model import INDEX, Model, hold, log_to_stdout, make_strategy, say

from tfpreempt import PreemptionCheckpointHandler, TerminationConfig

directory = sys.argv[1]
log_to_stdout()
model = Model(make_strategy("mwms"))
resolver = model.strategy.cluster_resolver


def train_step() -> None:
    hold(f"in-step-{model.steps}")
    model.step()


def fit(handler: PreemptionCheckpointHandler, last: int) -> None:
    while model.steps < last:
        handler.run(train_step)


stays = TerminationConfig(exit_fn=lambda: say("exit_fn"))
unused = PreemptionCheckpointHandler(resolver, None, f"{directory}-unused", stays)
first = PreemptionCheckpointHandler(resolver, model.checkpoint, directory, stays)
if INDEX == 1:
    del unused  # without close(), and long before worker 0 does
    gc.collect()
    say("dropped")
fit(first, 12)
say("fitted", first.total_run_calls)
unused = None
gc.collect()
first.close()
second = PreemptionCheckpointHandler(resolver, model.checkpoint, f"{directory}-second")
say("restored", second.total_run_calls)
fit(second, 20)
